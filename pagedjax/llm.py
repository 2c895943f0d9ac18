"""LLM: the offline API. Names follow vLLM's, so that its users feel at home."""

import itertools
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from checkpoints.load import load_params, resolve_dtype
from checkpoints.open import open_checkpoint
from pagedjax.config import EngineConfig, resolve, with_options
from pagedjax.device.compile import set_compile_cache
from pagedjax.device.sharding import make_mesh
from pagedjax.engine import Engine, Progress
from pagedjax.errors import QueueFull, UserError, check
from pagedjax.host.request import FinishReason, Logprobs, Request, SamplingParams, Usage
from pagedjax.loop import EngineLoop, Stream
from pagedjax.text import Tokenizer, load_tokenizer, tokenizer_from_gguf

Prompt = str | Sequence[int]
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
    """A finished request. Times are seconds."""

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
    """A model with its engine. A context manager: leaving it ends the engine's thread."""

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
        set_compile_cache(config.compile_cache)
        checkpoint = open_checkpoint(os.fspath(model))
        mesh = make_mesh(config.sharding.model)
        platform = cast(Literal["cpu", "gpu", "tpu"], mesh.devices.flat[0].platform)
        config = resolve(config, checkpoint.config, platform, resolve_dtype(checkpoint, config.dtype, mesh))
        self.tokenizer: Tokenizer | None = open_tokenizer(checkpoint.tokenizer_source)
        self.defaults = checkpoint.defaults
        start = time.perf_counter()
        params, layout = load_params(
            checkpoint,
            dtype=config.dtype,
            mesh=mesh,
            stacked=platform != "cpu",
            progress=lambda done, total: progress("load", done, total),
        )
        self.load_seconds = time.perf_counter() - start
        self.engine = Engine(checkpoint.config, layout, params, config, mesh, progress=progress)
        self.loop = EngineLoop(self.engine, self.tokenizer)
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
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        given = {name: getattr(self.defaults, name) for name in names}
        return SamplingParams(**{name: value for name, value in given.items() if value is not None})

    def request(self, prompt: Prompt, params: SamplingParams | None = None) -> Request:
        """The engine's form of a prompt: text is tokenized (with BOS where the model wants it), token ids are taken as they are."""
        params = params or self.get_default_sampling_params()
        ids = tuple(self._tokenizer("a text prompt").encode(prompt)) if isinstance(prompt, str) else tuple(int(i) for i in prompt)
        words: tuple[tuple[int, ...], ...] = ()
        if params.bad_words:
            words = self._tokenizer("bad_words").bad_word_ids(params.bad_words)
        own = () if params.ignore_eos else self.defaults.stop_ids
        return Request(
            id=str(next(self._ids)),
            prompt=ids,
            params=params,
            stop_ids=tuple(sorted({*own, *params.stop_token_ids})),
            bad_words=words,
            seed=self.engine.new_seed() if params.seed is None else params.seed,
        )

    def _tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise UserError(f"{what} needs a tokenizer; the model has none (prompts may be token ids)")
        return self.tokenizer

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Stream:
        """Starts one request; iterate the result (or `async for` it) for its pieces."""
        return self.loop.submit(self.request(prompt, params))

    def chat_prompt(self, messages: Sequence[Message], **template_options: Any) -> tuple[int, ...]:
        """Token ids of a conversation in the model's chat template."""
        return tuple(self._tokenizer("chat").encode_chat(messages, **template_options))

    # --- batches ----------------------------------------------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """All prompts at once, batched continuously; outputs in the order of the prompts. One prompt is a text or token ids."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        batch = [cast(Prompt, prompts)] if single else list(cast(Sequence[Prompt], prompts))
        each = [params] * len(batch) if params is None or isinstance(params, SamplingParams) else list(params)
        check(
            len(each) == len(batch),
            f"there must be one SamplingParams for all prompts or one each; got {len(each)} for {len(batch)}",
        )
        requests = [self.request(prompt, p) for prompt, p in zip(batch, each, strict=True)]
        texts = [prompt if isinstance(prompt, str) else None for prompt in batch]
        return self._run(requests, texts)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, each a list of {"role": …, "content": …}."""
        single = len(messages) > 0 and isinstance(messages[0], Mapping)
        batch = [cast(Sequence[Message], messages)] if single else list(cast(Sequence[Sequence[Message]], messages))
        return self.generate([self.chat_prompt(m, **template_options) for m in batch], params)

    def score(self, texts: Prompt | Sequence[Prompt]) -> list[Score]:
        """Logprobs of every token of each text but the first, under the raw model distribution."""
        outputs = self.generate(texts, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
        return [Score(o.prompt_token_ids, tuple(p.logprob for p in o.prompt_logprobs or ())) for o in outputs]

    def _run(self, requests: Sequence[Request], texts: Sequence[str | None]) -> list[RequestOutput]:
        """Keeps the queue full, but never overfull, until every request is answered."""
        todo, running = list(range(len(requests))), deque[tuple[int, Stream]]()
        outputs: dict[int, RequestOutput] = {}
        try:
            while todo or running:
                refused = []
                for i, result in zip(todo, self.loop.submit_all([requests[i] for i in todo]) if todo else [], strict=True):
                    if isinstance(result, Stream):
                        running.append((i, result))
                    elif isinstance(result, QueueFull) and running:
                        refused.append(i)
                    else:
                        raise result
                todo = refused
                i, stream = running.popleft()
                outputs[i] = collect(requests[i], stream, texts[i])
        finally:
            for _, stream in running:
                stream.cancel()
        return [outputs[i] for i in range(len(requests))]


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
    end = time.perf_counter()
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
    return RequestOutput(request.id, text, request.prompt, scored, tuple(outputs), first, end - stream.submitted)
