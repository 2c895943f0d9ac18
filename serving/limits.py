"""What one request may ask for. Each limit has an error of its own; the engine's own bounds come after these."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from pagedjax.errors import check
from pagedjax.host.constraint import StructuredOutputsParams
from pagedjax.host.request import SamplingParams
from serving.errors import Refusal, check_limit


@dataclass(frozen=True)
class Limits:
    """Zero means: no limit beyond the engine's own."""

    max_message_bytes: int = 32 << 20  # of one gRPC message or HTTP body that comes in
    max_reply_bytes: int = 64 << 20  # of one gRPC message that goes out
    max_prompt_chars: int = 4 << 20  # of a prompt that is text, before it is tokenized
    max_prompt_tokens: int = 0  # of a prompt; the model's context is the other bound
    max_output_tokens: int = 0  # of one sample
    max_samples: int = 16  # n, best_of or beams of a request
    max_logprobs: int = 20  # best tokens to report at each position
    max_stops: int = 16  # stop strings
    max_form_bytes: int = 64 << 10  # of a JSON schema, regular expression, grammar or list of choices
    max_form_depth: int = 64  # of its brackets
    max_batch: int = 64  # prompts of one call
    max_streams: int = 1024  # requests that are open at once, those of a batch counted one by one
    max_unread: int = 1 << 16  # tokens and logprob entries of one request that wait for its reader; it is ended beyond that

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            check(isinstance(value, int) and value >= 0, f"{field.name} must not be negative; got {value}")
        for name in ("max_message_bytes", "max_reply_bytes", "max_unread"):
            check(getattr(self, name) > 0, f"{name} must be positive; got {getattr(self, name)}")


def check_text(limits: Limits, text: str) -> None:
    check_chars(limits, len(text))


def check_chars(limits: Limits, count: int) -> None:
    """`count`: characters of a prompt, in all its parts."""
    most = limits.max_prompt_chars
    check_limit(not most or count <= most, "prompt_too_long", f"a prompt may have {most} characters; got {count}", "prompt")


def check_batch(limits: Limits, count: int) -> None:
    check_limit(count > 0, "invalid_argument", "a call must hold at least one prompt; got 0", "prompt")
    most = limits.max_batch
    check_limit(not most or count <= most, "batch_too_large", f"a call may hold {most} prompts; got {count}", "prompt")


def check_params(limits: Limits, params: SamplingParams) -> None:
    """What a request asks for beside its prompt."""
    most, count = limits.max_samples, params.num_sequences
    check_limit(not most or count <= most, "too_many_samples", f"n, best_of and beams may be {most}; got {count}", "n")
    most = limits.max_logprobs
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name) or 0
        check_limit(not most or asked <= most, "too_many_logprobs", f"{name} may be {most}; got {asked}", name)
    most = limits.max_stops
    stops = len(params.stop)
    check_limit(not most or stops <= most, "too_many_stops", f"stop may hold {most} strings; got {stops}", "stop")
    if params.structured_outputs is not None:
        check_form(limits, params.structured_outputs)
    most, asked = limits.max_output_tokens, params.max_tokens or 0
    check_limit(not most or asked <= most, "output_too_long", f"max_tokens may be {most}; got {asked}", "max_tokens")


def check_form(limits: Limits, form: StructuredOutputsParams) -> None:
    """What the output must look like is compiled on the host, whose time and stack it must not use up."""
    _, said = form.form
    try:
        text = said if isinstance(said, str) else json.dumps(said) if isinstance(said, Mapping) else "\n".join(said)
    except RecursionError:
        raise Refusal("form_too_deep", "a form is nested deeper than Python can go", param="structured_outputs") from None
    most, size = limits.max_form_bytes, len(text.encode("utf-8", "surrogatepass"))
    check_limit(not most or size <= most, "form_too_large", f"a form may have {most} bytes; got {size}", "structured_outputs")
    most, levels = limits.max_form_depth, depth(text)
    check_limit(
        not most or levels <= most, "form_too_deep", f"a form may be nested {most} levels; got {levels}", "structured_outputs"
    )


def depth(text: str) -> int:
    """How deep brackets of any kind are nested; those in strings count as well, so that it is an upper bound."""
    level = deepest = 0
    for char in text:
        if char in "([{":
            level += 1
            deepest = max(deepest, level)
        elif char in ")]}":
            level = max(0, level - 1)
    return deepest


def check_prompt(limits: Limits, ids: Sequence[int], context: int) -> None:
    """`context`: the engine's max_model_len; a prompt must leave room for one token of output."""
    most = min(limits.max_prompt_tokens or context - 1, context - 1)
    check_limit(
        len(ids) <= most,
        "prompt_too_long",
        f"a prompt may have {most} tokens where the context is {context}; got {len(ids)}",
        "prompt",
    )
