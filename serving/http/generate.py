"""From calls to answers: what chat and completions share."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagedjax.host.request import Logprobs, Usage
from pagedjax.stream import Delta
from pagedjax.text import Tokenizer
from serving.errors import Refusal, form_failed
from serving.frontend import Call, Frontend
from serving.http.answer import Answer
from serving.http.forms import OWN_NAME, blame
from serving.http.logprobs import CompletionLogprobs, chat_logprobs, joined
from serving.http.requests import StreamOptions
from serving.http.shapes import DONE, Bodies, CallPiece, Choice, Count, count, joined_choice
from serving.http.site import Asked
from serving.http.tools import CallReader, ToolUse
from serving.reply import Reply


@dataclass(frozen=True)
class Job:
    """A request that is understood: one call for each of its prompts, and how its answer is to look."""

    bodies: Bodies
    calls: Sequence[Call]
    tokenizer: Tokenizer
    options: StreamOptions = StreamOptions()
    is_chat: bool = True
    echoes: Sequence[str] | None = None  # the texts of the prompts, where they are part of the answer
    only_echo: bool = False  # the answer is the prompt alone
    token_ids: bool = False
    tools: ToolUse | None = None
    form_field: str = OWN_NAME  # of the request, that asked for the form of the output

    @property
    def samples(self) -> int:
        return self.calls[0].params.n


@dataclass
class Sample:
    """One choice in the making."""

    choice: int
    lists: CompletionLogprobs | None  # where completions want logprobs
    begun: bool = False
    usage: Usage | None = None
    reader: CallReader | None = None
    calls: bool = False  # it has made some


def respond(asked: Asked, make_job: Callable[[], Awaitable[Job]], *, stream: bool) -> Answer:
    """The answer to chat and to completions."""

    async def read() -> Job:
        with asked.reading():
            return await make_job()

    async def once() -> dict[str, Any]:
        return await whole(asked.frontend, await read())

    async def streamed() -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(events(asked.frontend, await read())) as each:
            async for event in each:
                yield event

    return Answer(streamed() if stream else once, asked.headers)


async def whole(frontend: Frontend, job: Job) -> dict[str, Any]:
    """The body of an answer that comes in one piece."""
    parts: dict[int, list[Choice]] = {}
    usage = Count()
    async with contextlib.aclosing(pieces(frontend, job)) as each:
        async for piece, so_far in each:
            parts.setdefault(piece.index, []).append(piece)
            usage = so_far
    nothing = {"content": [], "refusal": None} if job.calls[0].params.logprobs is not None else None
    return job.bodies.whole([joined_choice(parts[index], logprobs=nothing) for index in sorted(parts)], usage)


async def events(frontend: Frontend, job: Job) -> AsyncGenerator[bytes]:
    """The events of an answer that is streamed."""
    begun: set[int] = set()
    usage, options = Count(), job.options
    async with contextlib.aclosing(pieces(frontend, job)) as each:
        async for piece, so_far in each:
            usage = so_far
            if job.is_chat and piece.index not in begun:
                begun.add(piece.index)
                yield job.bodies.role(piece.index)
            if piece.text or piece.finish or piece.logprobs or piece.token_ids or piece.calls:
                yield job.bodies.piece(piece, usage if options.continuous_usage_stats else None)
    if options.include_usage:
        yield job.bodies.usage(usage)
    yield DONE


async def pieces(frontend: Frontend, job: Job) -> AsyncGenerator[tuple[Choice, Count]]:
    """What comes of a job, with the tokens so far; the count that comes last is complete. Left early, all is cancelled."""
    async with contextlib.AsyncExitStack() as stack:
        replies = await _submit(frontend, job, stack)
        samples = [[_sample(job, at, reply, index) for index in range(job.samples)] for at, reply in enumerate(replies)]
        prompts, generated = sum(len(_prompt(reply)) for reply in replies), 0
        left = len(replies) * job.samples
        async with contextlib.aclosing(_merged(replies)) as updates:
            async for at, delta in updates:
                piece = _piece(job, samples[at][delta.index], at, replies[at], delta)
                generated += 0 if job.only_echo else len(delta.tokens)
                left -= delta.finish is not None
                yield piece, Count(prompts, generated) if left else _count(job, samples)
                _check_end(job, delta)


async def _submit(frontend: Frontend, job: Job, stack: contextlib.AsyncExitStack) -> list[Reply]:
    """Hands all calls over at once, so that they can share steps. When one is refused, none of them goes on."""

    async def submit(call: Call) -> Reply:
        try:
            return await stack.enter_async_context(await frontend.submit(call))
        except Refusal as error:
            raise blame(error, job.form_field) from error

    results = await asyncio.gather(*map(submit, job.calls), return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Reply)]


async def _merged(replies: Sequence[Reply]) -> AsyncGenerator[tuple[int, Delta]]:
    """(which reply, what it gave), as it comes. A reply is not read further than the reader of all of them is."""
    if len(replies) == 1:
        async for update in replies[0]:
            for delta in update:
                yield 0, delta
        return
    readers = [aiter(reply) for reply in replies]
    waiting = {asyncio.ensure_future(anext(reader, None)): at for at, reader in enumerate(readers)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                at, update = waiting.pop(task), task.result()
                if update is not None:
                    for delta in update:
                        yield at, delta
                    waiting[asyncio.ensure_future(anext(readers[at], None))] = at
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _prompt(reply: Reply) -> tuple[int, ...]:
    assert reply.request is not None, "a reply that was handed out has begun"
    return reply.request.prompt


def _sample(job: Job, at: int, reply: Reply, index: int) -> Sample:
    params, lists = job.calls[at].params, None
    if not job.is_chat and params.logprobs is not None:
        echoed = None if job.echoes is None else job.echoes[at]
        lists = CompletionLogprobs(job.tokenizer, _prompt(reply), skip_special=params.skip_special_tokens, echoed=echoed)
    return Sample(at * job.samples + index, lists, reader=None if job.tools is None else job.tools.make_reader())


def _piece(job: Job, sample: Sample, at: int, reply: Reply, delta: Delta) -> Choice:
    """What is shown of an update; the first one of a sample brings what is known of its prompt."""
    first, sample.begun = not sample.begun, True
    sample.usage = delta.usage or sample.usage
    logprobs, text, tokens = delta.logprobs, delta.text, list(delta.tokens)
    if job.only_echo:
        logprobs, text, tokens = None if logprobs is None else (), "", []
    calls: list[CallPiece] = []
    if sample.reader is not None:
        text, calls = sample.reader.read(text, ended=delta.finish is not None)
        sample.calls = sample.calls or bool(calls)
    return Choice(
        index=sample.choice,
        text=job.echoes[at] + text if first and job.echoes is not None else text,
        finish=_finish(job, sample, delta),
        stop=None if job.only_echo else delta.stop,
        logprobs=_logprobs(job, sample, logprobs, delta.prompt_logprobs),
        token_ids=tokens if job.token_ids else None,
        prompt_token_ids=list(_prompt(reply)) if job.token_ids and first else None,
        calls=tuple(calls),
    )


def _finish(job: Job, sample: Sample, delta: Delta) -> str | None:
    """As clients know the reason; None for one that is an error."""
    match delta.finish:
        case "stop" | "length":
            return "length" if job.only_echo else "tool_calls" if sample.calls and delta.finish == "stop" else delta.finish
    return None


def _logprobs(
    job: Job, sample: Sample, entries: tuple[Logprobs, ...] | None, prompt: tuple[Logprobs, ...] | None
) -> dict[str, Any] | None:
    if entries is None:
        return None
    if sample.lists is None:
        return chat_logprobs(job.tokenizer, entries) if entries else None
    parts = [sample.lists.prompt(prompt)] if prompt is not None else []
    return joined([*parts, sample.lists.output(entries)])


def _check_end(job: Job, delta: Delta) -> None:
    """An answer that was cut off by something else than the request is an error, and so is one that has lost its form."""
    if delta.finish == "constraint":
        raise blame(form_failed(), job.form_field)
    if delta.finish == "deadline":
        raise Refusal("deadline_exceeded", "the deadline passed before the answer was complete")
    if delta.finish == "cancelled":
        raise Refusal("cancelled", "the request was cancelled on the server")


def _count(job: Job, samples: list[list[Sample]]) -> Count:
    usage = count([[sample.usage or Usage() for sample in row] for row in samples])
    return Count(usage.prompt, 0, usage.cached) if job.only_echo else usage
