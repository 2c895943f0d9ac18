"""EngineLoop: the one thread that owns the Engine, and the way in and out of it for everybody else."""

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from pagedjax.engine import Engine
from pagedjax.errors import QueueFull, check
from pagedjax.host.beam import choose
from pagedjax.host.request import FinishReason, Logprobs, Request, TokenEvent, Usage
from pagedjax.text import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class Delta:
    """New output of one sequence. Pieces of text joined are the whole text."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs, ...] | None = None
    finish: FinishReason | None = None
    stop: str | int | None = None  # the stop string or stop token that ended it
    usage: Usage | None = None


class Stream:
    """What a request gives, as it comes: iterate it, or `async for` it. Ends when all its sequences have.

    Leaving the iteration early (break, an exception, a cancelled task) cancels the request. Times are time.perf_counter().
    """

    def __init__(self, request_id: str, sequences: int, cancel: Callable[[str], None], submitted: float):
        self.request_id = request_id
        self.submitted = submitted
        self.first_token: float | None = None
        self.finished: float | None = None  # when the last of its sequences ended
        self._unfinished = sequences  # as the loop's thread counts; _left is the reader's count
        self._left = sequences
        self._queue: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self._cancel = cancel
        self._waker: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def cancel(self) -> None:
        """Ends the request; its blocks are free before the next step. The stream ends with finish "cancelled"."""
        self._cancel(self.request_id)

    def put(self, item: Delta | BaseException) -> None:
        """Called by the loop's thread."""
        if isinstance(item, Delta):
            now = time.perf_counter()
            if self.first_token is None and item.tokens:
                self.first_token = now
            self._unfinished -= item.finish is not None
            if self._unfinished == 0 and self.finished is None:
                self.finished = now
        self._queue.put(item)
        if self._waker is not None:
            loop, event = self._waker
            with contextlib.suppress(RuntimeError):  # the reader's event loop is closed: nobody is waiting
                loop.call_soon_threadsafe(event.set)

    def _open(self, item: Delta | BaseException) -> Delta:
        if isinstance(item, BaseException):
            self._left = 0
            raise item
        self._left -= item.finish is not None
        return item

    def __iter__(self) -> Iterator[Delta]:
        try:
            while self._left > 0:
                yield self._open(self._queue.get())
        finally:
            if self._left > 0:
                self.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        event = asyncio.Event()
        self._waker = (asyncio.get_running_loop(), event)
        try:
            while self._left > 0:
                event.clear()
                while self._left > 0 and not self._queue.empty():
                    yield self._open(self._queue.get_nowait())
                if self._left > 0 and self._queue.empty():
                    await event.wait()
        finally:
            if self._left > 0:
                self.cancel()


async def start_off_loop(start: Callable[[], Stream]) -> Stream:
    """Runs what waits for the engine's thread in another one. Cancelled meanwhile: the request is cancelled, too."""
    abandoned = threading.Event()
    made: list[Stream] = []

    def run() -> Stream:
        made.append(start())
        if abandoned.is_set():
            made[0].cancel()
        return made[0]

    try:
        return await asyncio.to_thread(run)
    except asyncio.CancelledError:
        abandoned.set()
        for stream in made:
            stream.cancel()
        raise


@dataclass
class _Live:
    """A request as the loop's thread sees it."""

    stream: Stream
    decoders: list[IncrementalDecoder | None]
    counts: list[int]  # output tokens of each sequence; -1: it has ended
    request: Request
    held: list[list[Delta]]  # of each sample, where the best of several are wanted: until all have ended
    shows_stop: bool  # the text of a stop token is part of the text


class EngineLoop:
    """Runs Engine.step while there is work. `submit` and `cancel` may be called from any thread."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None):
        """Without a tokenizer there is no text, and stop strings are refused."""
        self.engine, self.tokenizer = engine, tokenizer
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Stream:
        """Hands a request to the engine. UserError (QueueFull, too) is raised here, in the caller's thread."""
        (result,) = self.submit_all([request])
        if isinstance(result, Exception):
            raise result
        return result

    async def submit_async(self, request: Request) -> Stream:
        """`submit` for an event loop, which goes on while the engine's thread is in a step."""
        return await start_off_loop(lambda: self.submit(request))

    def submit_all(self, requests: Sequence[Request]) -> list[Stream | Exception]:
        """Hands over several at once, so that they can share their first step. The error of one does not stop the others, but
        after a QueueFull all the rest are refused as well, so that none overtakes another."""
        answer: queue.SimpleQueue[list[Stream | Exception]] = queue.SimpleQueue()
        submitted = time.perf_counter()
        self._raise_if_down()
        self._inbox.put(lambda: answer.put(self._add_all(requests, submitted)))
        return self._wait(answer)

    def cancel(self, request_id: str) -> None:
        """Ends a request. Unknown ids are ignored, since it may just have finished. Never raises: when the engine is down there
        is nothing left to cancel, and nobody takes the command."""
        self._inbox.put(lambda: self._deliver(self.engine.cancel(request_id)))

    def call[T](self, ask: Callable[[Engine], T]) -> T:
        """What `ask` answers when the engine's thread runs it between two steps; its error is raised here."""
        answer: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answer.put((ask(self.engine), None))
            except Exception as error:
                answer.put((None, error))

        self._raise_if_down()
        self._inbox.put(run)
        value, error = self._wait(answer)
        if error is not None:
            raise error
        return cast(T, value)

    def _wait[T](self, answer: "queue.SimpleQueue[T]") -> T:
        while True:
            try:
                return answer.get(timeout=1)
            except queue.Empty:
                self._raise_if_down()

    def close(self) -> None:
        """Cancels everything and ends the thread. Streams that are open end with finish "cancelled"."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
            if threading.current_thread() is not self._thread:  # a finalizer may run anywhere
                self._thread.join()

    def _raise_if_down(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the engine stopped after an error") from self._failure
        if self._closed:
            raise RuntimeError("the engine is closed")

    def _decoder(self, request: Request) -> IncrementalDecoder | None:
        if self.tokenizer is None:
            return None
        params = request.params
        return IncrementalDecoder(
            self.tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special=params.skip_special_tokens,
            after=request.prompt,
        )

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _add_all(self, requests: Sequence[Request], submitted: float) -> list[Stream | Exception]:
        results: list[Stream | Exception] = []
        for request in requests:
            full = results and isinstance(results[-1], QueueFull)
            results.append(results[-1] if full else self._add(request, submitted))
        return results

    def _add(self, request: Request, submitted: float) -> Stream | Exception:
        params = request.params
        try:
            check(
                not params.stop or self.tokenizer is not None,
                f"request {request.id}: stop strings need a tokenizer; the model has none",
            )
            count = params.n if params.beam_width else params.num_sequences
            decoders = [self._decoder(request) for _ in range(count)]
            self.engine.add(request)
        except Exception as error:  # whatever is wrong with this request must not end the others
            return error
        stream = Stream(request.id, params.n, self.cancel, submitted)
        self._live[request.id] = _Live(
            stream, decoders, [0] * count, request, [[] for _ in range(count)], params.include_stop_str_in_output
        )
        return stream

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self.engine.has_work():
                    self._deliver(self.engine.step())
            for request_id in list(self._live):
                self._deliver(self.engine.cancel(request_id))
        except BaseException as error:  # every reader must learn of it, whatever it is
            self._failure = error
            for live in self._live.values():
                failure = RuntimeError(f"the engine stopped after an error: {error}")
                failure.__cause__ = error
                live.stream.put(failure)
            self._live.clear()

    def _take_commands(self) -> bool:
        """Runs what was sent; waits for something when there is no work, or none until a while has passed. False at the end."""
        while True:
            wait = self.engine.seconds_idle() if self.engine.has_work() else None
            try:
                command = self._inbox.get(block=wait != 0, timeout=wait or None)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _deliver(self, events: list[TokenEvent]) -> None:
        for event in events:
            live = self._live.get(event.request_id)
            if live is not None and live.counts[event.index] >= 0:
                delta = self._delta(live, event)
                if delta.finish is not None:
                    live.counts[event.index] = -1
                    if all(count < 0 for count in live.counts):
                        del self._live[event.request_id]
                if len(live.counts) == live.request.params.n:
                    live.stream.put(delta)
                    continue
                live.held[event.index].append(delta)
                if all(count < 0 for count in live.counts):
                    for best in best_samples(live.request, live.held):
                        live.stream.put(best)

    def _delta(self, live: _Live, event: TokenEvent) -> Delta:
        """Decodes the tokens and checks stop strings; a hit ends the sequence in the engine, and what came after is dropped."""
        delta = Delta(
            event.index, "", event.tokens, event.logprobs, event.prompt_logprobs, event.finish, event.stop_id, event.usage
        )
        decoder = live.decoders[event.index]
        if decoder is not None:
            hidden = event.stop_id is not None and not live.shows_stop
            shown = event.tokens[:-1] if hidden else event.tokens
            text = decoder.push(shown)
            if decoder.hit is None and event.finish:
                text += decoder.finish()
            if decoder.hit is not None:
                used = decoder.hit.num_tokens
                kept = used - live.counts[event.index]
                usage = self.engine.finish(event.request_id, event.index, used) or _cut(event.usage, used)
                return replace(
                    delta,
                    text=text,
                    tokens=event.tokens[:kept],
                    logprobs=None if event.logprobs is None else event.logprobs[:kept],
                    finish="stop",
                    stop=decoder.hit.stop,
                    usage=usage,
                )
            delta = replace(delta, text=text)
        live.counts[event.index] += len(event.tokens)
        return delta


def best_samples(request: Request, samples: Sequence[Sequence[Delta]]) -> list[Delta]:
    """Of best_of samples, each in its pieces, the n with the highest mean logprob, in one piece each, best first."""
    entries = [tuple(p for delta in pieces for p in delta.logprobs or ()) for pieces in samples]
    ranked = choose([[p.logprob for p in own] or [-math.inf] for own in entries], request.params.n)
    wants = request.params.logprobs is not None
    return [
        replace(
            samples[i][-1],
            index=index,
            text="".join(delta.text for delta in samples[i]),
            tokens=tuple(t for delta in samples[i] for t in delta.tokens),
            logprobs=entries[i] if wants else None,
            prompt_logprobs=samples[i][0].prompt_logprobs,
        )
        for index, i in enumerate(ranked)
    ]


def _cut(usage: Usage | None, generated: int) -> Usage | None:
    return None if usage is None else replace(usage, generated=generated)
