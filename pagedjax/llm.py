"""LLM: the offline API. Names follow vLLM's, so that its users feel at home."""

import asyncio
import contextlib
import functools
import itertools
import math
import numbers
import os
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from checkpoints.load import open_params, resolve_dtype
from checkpoints.open import open_checkpoint
from pagedjax.config import EngineConfig, resolve, with_options
from pagedjax.device.compile import open_compile_cache
from pagedjax.device.sharding import make_mesh
from pagedjax.engine import Engine, Progress
from pagedjax.errors import QueueFull, UserError, check, is_unicode
from pagedjax.host.request import FinishReason, Logprobs, Request, SamplingParams, Service, Usage
from pagedjax.loop import EngineLoop
from pagedjax.stream import Stream
from pagedjax.text import Grammars, Tokenizer, load_tokenizer, tokenizer_from_gguf

Prompt = str | Sequence[int]
AnyPrompt = Prompt | Mapping[str, Any]  # {"prompt": text} or {"prompt_token_ids": ids}, and cache_salt: as in vLLM
Message = Mapping[str, Any]


@dataclass(frozen=True)
class CompletionOutput:
    """One sample. `token_ids` include the stop token that ended it, `text` does not."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: str | int | None  # the stop string or stop token
    logprobs: tuple[Logprobs, ...] | None
    usage: Usage

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else sum(p.logprob for p in self.logprobs)


@dataclass(frozen=True)
class RequestOutput:
    """A finished request. Times are seconds from when it was handed to the engine, waiting included."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    prompt_logprobs: tuple[Logprobs, ...] | None  # of every prompt token but the first
    outputs: tuple[CompletionOutput, ...]
    time_to_first_token: float | None
    time: float


@dataclass(frozen=True)
class Score:
    """How likely the model finds a text. The first token has no logprob."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    @property
    def perplexity(self) -> float:
        """exp of the mean negative logprob; nan for a text of one token."""
        return math.exp(-sum(self.logprobs) / len(self.logprobs)) if self.logprobs else math.nan


class LLM:
    """A model with its engine. A context manager: leaving it ends the engine's thread, and so does dropping the last reference.
    Streams that are open then end with finish "cancelled"."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        config: EngineConfig | None = None,
        progress: Progress = lambda *_: None,
        **options: Any,
    ):
        """`model`: a Hugging Face folder or hub id, a GGUF file, or an Orbax folder. `options` are fields of EngineConfig by
        path, or vLLM's names: LLM(path, max_model_len=2048, tensor_parallel_size=2)."""
        config = with_options(config or EngineConfig(), options)
        self.model = os.fspath(model)
        checkpoint = open_checkpoint(self.model)
        mesh = make_mesh(config.sharding.model)
        platform = cast(Literal["cpu", "gpu", "tpu"], mesh.devices.flat[0].platform)
        open_compile_cache(config.compile_cache, platform)
        config = resolve(config, checkpoint.config, platform, resolve_dtype(checkpoint, config.dtype, mesh))
        self.tokenizer_source = checkpoint.tokenizer_source
        self.tokenizer: Tokenizer | None = open_tokenizer(self.tokenizer_source)
        self.defaults = checkpoint.defaults
        params, layout, load = open_params(
            checkpoint,
            dtype=config.dtype,
            mesh=mesh,
            stacked=platform != "cpu",
            progress=lambda done, total: progress("load", done, total),
        )
        self.engine = Engine(checkpoint.config, layout, params, config, mesh, load=load, progress=progress)
        self.loop = EngineLoop(self.engine, self.tokenizer)
        weakref.finalize(self, self.loop.close)  # runs at the interpreter's exit, too: a thread inside JAX must not outlive it
        self._ids = itertools.count()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the engine's thread; open streams end with finish "cancelled"."""
        self.loop.close()

    # --- requests ---------------------------------------------------------------------------------------------------

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend (generation_config.json); SamplingParams() where they say nothing."""
        return SamplingParams(**self.defaults.sampling())

    def request(self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None, service: Service | None = None) -> Request:
        """The engine's form of a prompt: text is tokenized (with BOS where the model wants it), token ids are taken as they are."""
        params = sampling_params or self.get_default_sampling_params()
        plain, _ = plain_prompt(prompt)
        salt = prompt.get("cache_salt", "") if isinstance(prompt, Mapping) else ""
        check(isinstance(salt, str), f"cache_salt must be a string; got {salt!r:.80}")
        check(is_unicode(salt), f"cache_salt must be valid Unicode; got {salt!r:.80}")
        ids = tuple(self._tokenizer("a text prompt").encode(plain)) if isinstance(plain, str) else tuple(plain)
        words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            words = self._tokenizer("bad_words").bad_word_ids(params.bad_words)
        form, constraint = params.structured_outputs, None
        if form is not None:
            check(not params.ignore_eos, "structured_outputs must not go with ignore_eos: the form says where a text ends")
            constraint = self._grammars.compile(*form.form, allowed=params.allowed_token_ids)
        own = () if params.ignore_eos else self.defaults.stop_ids
        return Request(
            id=str(next(self._ids)),
            prompt=ids,
            params=params,
            stop_ids=tuple(sorted({*own, *params.stop_token_ids})),
            bad_words=words,
            seed=self.engine.new_seed() if params.seed is None else params.seed,
            constraint=constraint,
            salt=salt,
            service=service or Service(),
        )

    def _tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"{what} needs a tokenizer; the model has none (prompts may be token ids)")
        return self.tokenizer

    @functools.cached_property
    def _grammars(self) -> Grammars:
        """Made when the first request asks for it: the whole vocabulary is read."""
        return Grammars(self._tokenizer("structured_outputs"), self.defaults.stop_ids)

    def stream(self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None, *, service: Service | None = None) -> Stream:
        """Starts one request; iterate the result (or `async for` it) for its pieces. Leaving early cancels it."""
        return self.loop.submit(self.request(prompt, sampling_params, service))

    async def stream_async(
        self, prompt: AnyPrompt, sampling_params: SamplingParams | None = None, *, service: Service | None = None
    ) -> Stream:
        """`stream` for servers: neither tokenizing nor waiting for the engine's thread holds up the event loop."""
        return await self.loop.submit_async(await asyncio.to_thread(self.request, prompt, sampling_params, service))

    # --- what the engine remembers ----------------------------------------------------------------------------------

    def pin_prefix(self, prompt: AnyPrompt) -> int:
        """Holds on to the blocks of a prompt's beginning, those that are cached and those that will be, until `unpin_prefix`; how
        many blocks these are. A pinned block is given out only when running sequences need it and nothing else is left. UserError
        where the prompt fills no block, or pins would hold more than half of the pool."""
        ids, salt = self._prefix(prompt)
        return self.loop.call(lambda engine: engine.scheduler.tables.pin(salt, ids))

    def unpin_prefix(self, prompt: AnyPrompt) -> int:
        """Takes back one `pin_prefix` of the same prompt."""
        ids, salt = self._prefix(prompt)
        return self.loop.call(lambda engine: engine.scheduler.tables.unpin(salt, ids))

    def flush_cache(self) -> int:
        """Forgets all cached blocks that no sequence holds; how many."""
        return self.loop.call(lambda engine: engine.scheduler.tables.flush())

    def trace(self, request_id: str) -> str:
        """Why a request was served as it was, as one line of JSON: queued, waits (because …), admitted, chunk, preempted (by whom,
        and how), resumed, finished. UserError for one that is not known, or that ended more than 1,000 requests ago."""

        def find(engine: Engine) -> str:
            check(bool(engine.scheduler.trace.of(request_id)), f"trace must name a request that is known; got {request_id!r}")
            return engine.scheduler.trace.line(request_id)

        return self.loop.call(find)

    def _prefix(self, prompt: AnyPrompt) -> tuple[list[int], str]:
        request = self.request(prompt, SamplingParams())
        return list(request.prompt), request.salt

    # --- prompts ----------------------------------------------------------------------------------------------------

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template, to which `chat_template_kwargs` are further variables."""
        variables = dict(chat_template_kwargs or {})
        taken = sorted({"self", "messages", "tools", "add_generation_prompt", "template"} & set(variables))
        check(not taken, f"chat_template_kwargs must not hold what has an argument of its own; got {', '.join(taken)}")
        template = variables.pop("chat_template", None)  # the name of one, where a model has several
        tokenizer = self._tokenizer("chat")
        return tuple(
            tokenizer.encode_chat(
                messages, add_generation_prompt=add_generation_prompt, tools=tools, template=template, **variables
            )
        )

    # --- batches ----------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: AnyPrompt | Sequence[AnyPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service: Service | None = None,
    ) -> list[RequestOutput]:
        """All prompts at once, batched continuously; outputs in the order of the prompts. One prompt is a text, token ids, or an
        object with "prompt" or "prompt_token_ids"."""
        batch = as_batch(prompts)
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            each = [sampling_params] * len(batch)
        else:
            each = list(sampling_params)
        check(
            len(each) == len(batch),
            f"there must be one SamplingParams for all prompts or one each; got {len(each)} for {len(batch)}",
        )
        requests = [self.request(prompt, p, service) for prompt, p in zip(batch, each, strict=True)]
        texts = [plain_prompt(prompt)[1] for prompt in batch]
        with contextlib.closing(in_order(self.loop, requests)) as streams:
            return [collect(request, stream, text) for (request, stream), text in zip(streams, texts, strict=True)]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, each a list of {"role": …, "content": …}."""
        check(len(messages) > 0, "chat must be given at least one message; got none")
        batch = cast(Sequence[Sequence[Message]], [messages] if isinstance(messages[0], Mapping) else messages)
        options: dict[str, Any] = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        prompts = [self.chat_prompt(m, add_generation_prompt=add_generation_prompt, **options) for m in batch]
        return self.generate(prompts, sampling_params)

    def score(self, texts: AnyPrompt | Sequence[AnyPrompt]) -> list[Score]:
        """Logprobs of every token of each text but the first, under the raw model distribution."""
        outputs = self.generate(texts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        return [Score(o.prompt_token_ids, tuple(p.logprob for p in o.prompt_logprobs or ())) for o in outputs]


def as_batch(prompts: AnyPrompt | Sequence[AnyPrompt]) -> list[AnyPrompt]:
    """A list of prompts, of one or several."""
    single = isinstance(prompts, str | Mapping) or (len(prompts) > 0 and isinstance(prompts[0], numbers.Integral))
    return [cast(AnyPrompt, prompts)] if single else list(cast(Sequence[AnyPrompt], prompts))


def plain_prompt(prompt: AnyPrompt) -> tuple[Prompt, str | None]:
    """(text or token ids, the text as far as it is known). UserError for what is neither."""
    text: Any = None
    if isinstance(prompt, Mapping):
        unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"})
        held = prompt.keys() & {"prompt", "prompt_token_ids"}
        check(
            len(held) > 0 and not unknown,
            f"a prompt object must hold prompt, prompt_token_ids or both, and may hold cache_salt; got {sorted(prompt)}",
        )
        text = prompt.get("prompt")
        prompt = cast(Prompt, prompt.get("prompt_token_ids", text))
    if isinstance(prompt, str):
        return prompt, prompt
    ids: list[Any] = list(prompt) if isinstance(prompt, Iterable) else [prompt]
    if not all(isinstance(i, numbers.Integral) for i in ids):  # what is long is not spelled out unless it is wrong
        raise UserError(f"a prompt must be a text, token ids or an object with either; got {prompt!r:.80}")
    return [int(i) for i in ids], text


def in_order(loop: EngineLoop, requests: Sequence[Request]) -> Generator[tuple[Request, Stream]]:
    """The requests with their streams, in order; as many run ahead as the engine's queue takes. The first request that cannot be
    honoured raises its error. Whatever is left at the end, or when the reader leaves early, is cancelled."""
    todo, running = deque(requests), deque[tuple[Request, Stream]]()
    try:
        while todo or running:
            results = loop.submit_all(todo) if todo else []
            running.extend((r, result) for r, result in zip(todo, results, strict=True) if isinstance(result, Stream))
            errors = [result for result in results if isinstance(result, Exception)]
            wrong = next((error for error in errors if not isinstance(error, QueueFull)), None)
            if wrong is not None or (errors and not running):
                raise wrong or errors[0]
            todo = deque(r for r, result in zip(todo, results, strict=True) if not isinstance(result, Stream))
            yield running[0]
            running.popleft()
    finally:
        for _, stream in running:
            stream.cancel()


def open_tokenizer(source: Path | dict[str, Any]) -> Tokenizer | None:
    """Of a folder or of a GGUF file's metadata; None where there is none, so that prompts must be token ids."""
    if isinstance(source, dict):
        return tokenizer_from_gguf(source) if "tokenizer.ggml.model" in source else None
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    return load_tokenizer(source) if any((source / name).exists() for name in names) else None


def collect(request: Request, stream: Stream, text: str | None = None) -> RequestOutput:
    """Waits for a stream's end and puts its pieces together."""
    n = request.params.n
    deltas = [[] for _ in range(n)]
    for delta in stream:
        deltas[delta.index].append(delta)
    outputs = []
    for index, pieces in enumerate(deltas):
        wants = request.params.logprobs is not None
        outputs.append(
            CompletionOutput(
                index=index,
                text="".join(d.text for d in pieces),
                token_ids=tuple(t for d in pieces for t in d.tokens),
                finish_reason=pieces[-1].finish,
                stop_reason=pieces[-1].stop,
                logprobs=tuple(p for d in pieces for p in d.logprobs or ()) if wants else None,
                usage=pieces[-1].usage or Usage(),
            )
        )
    scored = next((d.prompt_logprobs for pieces in deltas for d in pieces if d.prompt_logprobs is not None), None)
    first = None if stream.first_token is None else stream.first_token - stream.submitted
    end = (stream.finished or time.perf_counter()) - stream.submitted
    return RequestOutput(request.id, text, request.prompt, scored, tuple(outputs), first, end)
