"""Messages of pagedjax.v1: to calls, and from deltas."""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from pagedjax.errors import check
from pagedjax.host.constraint import StructuredOutputsParams
from pagedjax.host.request import FinishReason, Logprobs, SamplingParams, Usage
from pagedjax.stream import Delta
from serving.proto.pagedjax.v1 import inference_pb2 as pb

LISTS = ("allowed_token_ids", "bad_words", "stop", "stop_token_ids")
EARLY = {pb.EARLY_STOPPING_UNSPECIFIED: False, pb.EARLY_STOPPING_ALWAYS: True, pb.EARLY_STOPPING_NEVER: "never"}
POOLS = {pb.POOL_UNSPECIFIED: "interactive", pb.POOL_INTERACTIVE: "interactive", pb.POOL_BATCH: "batch"}
FINISH: dict[FinishReason, int] = {
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "cancelled": pb.FINISH_REASON_CANCELLED,
    "constraint": pb.FINISH_REASON_CONSTRAINT,
}


def sampling_params(given: Any, defaults: SamplingParams) -> SamplingParams:
    """`defaults` with what was set. UserError for a value out of its range."""
    values: dict[str, Any] = {}
    for name in (f.name for f in fields(SamplingParams)):
        if name in LISTS:
            if getattr(given, name):
                values[name] = tuple(getattr(given, name))
        elif name == "structured_outputs":
            continue  # is a message of its own
        elif name == "logit_bias":
            values[name] = dict(given.logit_bias)
        elif name == "early_stopping":
            check(given.early_stopping in EARLY, f"early_stopping must be one of its names; got {given.early_stopping}")
            values[name] = EARLY[given.early_stopping]
        elif given.HasField(name):
            values[name] = getattr(given, name)
    return replace(defaults, **values)


def prompt(given: Any) -> str | list[int]:
    kind = given.WhichOneof("kind")
    check(kind is not None, "a prompt must hold text or tokens; got neither")
    return given.text if kind == "text" else list(given.tokens.ids)


def pool(given: Any) -> Any:
    check(given in POOLS, f"pool must be one of its names; got {given}")
    return POOLS[given]


def structured_outputs(request: Any) -> StructuredOutputsParams | None:
    """What the output must match; None where there is nothing."""
    if not request.HasField("constraint"):
        return None
    given, kind = request.constraint, request.constraint.WhichOneof("kind")
    check(kind is not None, "a constraint must hold a schema, an expression, a grammar or choices; got none")
    if kind == "choice":
        return StructuredOutputsParams(choice=tuple(given.choice.texts))
    return StructuredOutputsParams(**{"json" if kind == "json_schema" else kind: getattr(given, kind)})


def logprobs(entries: Sequence[Logprobs] | None) -> list[Any]:
    return [
        pb.TokenLogprob(
            token=e.token, logprob=e.logprob, rank=e.rank, top=[pb.TopLogprob(token=t, logprob=value) for t, value in e.top]
        )
        for e in entries or ()
    ]


def usage(given: Usage) -> Any:
    return pb.Usage(
        prompt_tokens=given.prompt,
        cached_tokens=given.cached,
        generated_tokens=given.generated,
        recomputed_tokens=given.recomputed,
    )


def sample(delta: Delta) -> Any:
    """Of all of a sample's output, or of a piece of it."""
    stop: dict[str, Any] = {}
    if isinstance(delta.stop, str):
        stop = {"stop_string": delta.stop}
    elif delta.stop is not None:
        stop = {"stop_token": delta.stop}
    return pb.Sample(
        index=delta.index,
        text=delta.text,
        token_ids=delta.tokens,
        logprobs=logprobs(delta.logprobs),
        finish_reason=pb.FINISH_REASON_UNSPECIFIED if delta.finish is None else FINISH[delta.finish],  # pyright: ignore
        usage=None if delta.usage is None else usage(delta.usage),
        **stop,
    )
