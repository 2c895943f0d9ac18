"""What a user asks for and what the engine answers: plain values, no behaviour beyond their own checks."""

import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, NamedTuple

from pagedjax.errors import UserError, check
from pagedjax.host.constraint import Constraint, StructuredOutputsParams
from pagedjax.limits import NUM_BAD_STRINGS, NUM_BIASES, NUM_LOGPROBS, NUM_STOP_IDS

FinishReason = Literal["stop", "length", "cancelled", "deadline", "constraint"]  # the last: no token was left that it allows

LARGEST = 3.4e38  # the device computes in single precision,
LARGEST_INTEGER = 2**30 - 1  # and counts in 32 bits, a prompt and its answer together
# Fields of SamplingParams.
INTEGERS = ("n", "min_tokens", "top_k", "beam_width")
INTEGERS_OR_NONE = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of")
NUMBERS = (
    *("temperature", "top_p", "min_p", "typical_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"),
)
# What changes the distribution, or ends a text, has no place in beam search; these values say that there is none.
NOT_WITH_BEAMS = {
    "top_k": 0,
    "top_p": 1,
    "min_p": 0,
    "typical_p": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "seed": None,
    "logit_bias": {},
    "allowed_token_ids": None,
    "bad_words": (),
    "stop": (),
    "structured_outputs": None,
}
ONLY_WITH_BEAMS = {"length_penalty": 1, "early_stopping": False}


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Names and meanings are those of vLLM's offline API.

    Logprobs are of the raw model distribution: before temperature, penalties, biases and filters.
    """

    n: int = 1  # independent samples; at temperature 0 they are all the same
    max_tokens: int | None = 16  # None: up to the longest the engine and its pool allow
    min_tokens: int = 0  # stop ids are not sampled before this many tokens
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # None: drawn from the engine's generator
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()  # turned into token ids where the tokenizer is
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # best tokens to report at each position, beside the sampled one
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None  # the form that the output must have
    best_of: int | None = None  # samples to draw, of which the n with the highest mean logprob are returned; None: n
    beam_width: int = 0  # beam search with this many beams, on the model's own distribution; 0: sampling
    length_penalty: float = 1.0  # a beam's score is the sum of its logprobs / (its tokens, the stop token too) ** this
    early_stopping: bool | Literal["never"] = False  # of beam search, as in transformers (see host/beam.py)

    def __post_init__(self):
        self._check_types()
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name in ("max_tokens", "min_tokens", "top_k"):
            value = getattr(self, name)
            check(value is None or value <= LARGEST_INTEGER, f"{name} must be below 2^30; got {value}")
        check(1 <= self.n <= 128, f"n must be between 1 and 128; got {self.n}")
        check(self.max_tokens is None or self.max_tokens >= 1, f"max_tokens must be at least 1; got {self.max_tokens}")
        check(self.min_tokens >= 0, f"min_tokens must not be negative; got {self.min_tokens}")
        check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            f"min_tokens must be at most max_tokens; got {self.min_tokens} and {self.max_tokens}",
        )
        check(0 <= self.temperature <= LARGEST, f"temperature must be 0 or more, and finite; got {self.temperature}")
        check(self.top_k >= 0, f"top_k must be positive, or 0 or -1 for off; got {self.top_k}")
        check(0 < self.top_p <= 1, f"top_p must be in (0, 1]; got {self.top_p}")
        check(0 <= self.min_p <= 1, f"min_p must be in [0, 1]; got {self.min_p}")
        check(0 < self.typical_p <= 1, f"typical_p must be in (0, 1]; got {self.typical_p}")
        for name in ("presence_penalty", "frequency_penalty"):
            check(-2 <= getattr(self, name) <= 2, f"{name} must be in [-2, 2]; got {getattr(self, name)}")
        check(
            0 < self.repetition_penalty <= LARGEST,
            f"repetition_penalty must be positive, and finite; got {self.repetition_penalty}",
        )
        check(self.seed is None or 0 <= self.seed < 2**64, f"seed must be in [0, 2^64); got {self.seed}")
        check(len(self.logit_bias) <= NUM_BIASES, f"logit_bias may hold {NUM_BIASES} tokens; got {len(self.logit_bias)}")
        check(self.allowed_token_ids is None or len(self.allowed_token_ids) > 0, "allowed_token_ids must not be empty; got ()")
        check(len(self.bad_words) <= NUM_BAD_STRINGS, f"bad_words may hold {NUM_BAD_STRINGS} words; got {len(self.bad_words)}")
        check(all(self.bad_words), "bad_words must not hold an empty string")
        check(all(self.stop), "stop must not hold an empty string")
        check(len(self.stop) <= 16, f"stop may hold 16 strings; got {len(self.stop)}")
        check(
            len(self.stop_token_ids) <= NUM_STOP_IDS, f"stop_token_ids may hold {NUM_STOP_IDS} ids; got {len(self.stop_token_ids)}"
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            check(value is None or 0 <= value <= NUM_LOGPROBS, f"{name} must be between 0 and {NUM_LOGPROBS}; got {value}")
        self._check_best_of()
        self._check_beams()

    @property
    def num_sequences(self) -> int:
        """Sequences that may run at once for this request; n of them, or of their descendants, are returned."""
        return self.beam_width or self.best_of or self.n

    @property
    def logprobs_needed(self) -> int | None:
        """How many of the best tokens the engine must know at each position: for the user, to rank samples, or to search; None: it
        needs no logprobs."""
        if self.beam_width:
            return NUM_LOGPROBS
        return 0 if self.logprobs is None and self.num_sequences > self.n else self.logprobs

    def _check_best_of(self) -> None:
        best_of = self.best_of
        if best_of is None:
            return
        check(not self.beam_width, f"best_of must not go with beam_width; got best_of={best_of} and beam_width={self.beam_width}")
        check(self.n <= best_of <= 128, f"best_of must be between n, which is {self.n}, and 128; got {best_of}")
        check(
            best_of == self.n or self.temperature > 0,
            f"best_of must be n at temperature 0, where all samples are the same; got best_of={best_of} and n={self.n}",
        )

    def _check_beams(self) -> None:
        """Beam search ranks (token, logprob) pairs of the model's own distribution: what would change that cannot be honoured.
        Temperature 1 is that distribution; it becomes 0, since nothing is drawn."""
        width, most = self.beam_width, NUM_LOGPROBS // 2
        check(0 <= width <= most, f"beam_width must be between 1 and {most}, or 0 for sampling; got {width}")
        check(-10 <= self.length_penalty <= 10, f"length_penalty must be in [-10, 10]; got {self.length_penalty}")
        if not width:
            given = self._given(ONLY_WITH_BEAMS)
            check(not given, f"length_penalty and early_stopping must go with a beam_width; got {given}")
            return
        check(self.n <= width, f"n must be at most beam_width {width}; got {self.n}")
        given = self._given(NOT_WITH_BEAMS if self.temperature in (0, 1) else {"temperature": 1, **NOT_WITH_BEAMS})
        check(not given, f"beam search goes by the model's own distribution, to a stop id or max_tokens; it cannot honour {given}")
        object.__setattr__(self, "temperature", 0.0)

    def _given(self, neutral: Mapping[str, Any]) -> str:
        """Those of these fields that have another value, with it."""
        return ", ".join(f"{name}={getattr(self, name)!r}" for name, value in neutral.items() if getattr(self, name) != value)

    def _check_types(self) -> None:
        """Fields become plain integers, tuples of them, tuples of strings, and a dict; UserError for what is none."""
        for name in (*INTEGERS, *INTEGERS_OR_NONE):
            value = getattr(self, name)
            if value is not None or name in INTEGERS:
                object.__setattr__(self, name, integer(name, value))
        for name in NUMBERS:
            value = getattr(self, name)
            check(_is_number(value), f"{name} must be a number; got {value!r}")
        form = self.structured_outputs
        right = form is None or isinstance(form, StructuredOutputsParams)
        check(right, f"structured_outputs must be a StructuredOutputsParams; got {type(form).__name__}")
        early = self.early_stopping
        check(isinstance(early, bool) or early == "never", f"early_stopping must be True, False or 'never'; got {early!r}")
        for name in ("allowed_token_ids", "stop_token_ids"):
            ids = () if getattr(self, name) is None and name == "stop_token_ids" else getattr(self, name)
            if ids is not None:
                object.__setattr__(self, name, _integers(name, ids))
        for name in ("stop", "bad_words"):
            texts = getattr(self, name)
            texts = (texts,) if isinstance(texts, str) else () if texts is None else texts
            check(isinstance(texts, Iterable), f"{name} must be strings; got {texts!r}")
            texts = tuple(texts)
            wrong = [text for text in texts if not isinstance(text, str)]
            check(not wrong, f"each of {name} must be a string; got {wrong[:1]}")
            object.__setattr__(self, name, texts)
        bias = {} if self.logit_bias is None else self.logit_bias
        check(isinstance(bias, Mapping), f"logit_bias must map token ids to numbers; got {bias!r}")
        for value in bias.values():
            check(_is_number(value) and value == value, f"logit_bias values must be numbers; got {value!r}")
            check(abs(value) <= 100, f"logit_bias values must be in [-100, 100]; got {value}")
        object.__setattr__(self, "logit_bias", {integer("each token of logit_bias", k): float(v) for k, v in bias.items()})


def integer(name: str, value: Any) -> int:
    """A plain int of any kind of integer; UserError for all else, 2.0 and True included."""
    try:
        check(not isinstance(value, bool), f"{name} must be an integer; got {value}")
        return operator.index(value)
    except TypeError:
        raise UserError(f"{name} must be an integer; got {value!r}") from None


def _integers(name: str, values: Any) -> tuple[int, ...]:
    check(isinstance(values, Iterable), f"{name} must be token ids; got {values!r}")
    return tuple(integer(f"each of {name}", value) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


@dataclass(frozen=True)
class Logprobs:
    """Of one position: the token that stands there, and the best tokens. Raw model distribution."""

    token: int
    logprob: float
    rank: int  # 1: the most likely
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first


@dataclass(frozen=True)
class Usage:
    """Tokens of one sequence. `recomputed`: computed again after a preemption. `cached`: found in the prefix cache. `waited`:
    seconds from its arrival until it first ran; usages that differ in it alone are equal."""

    prompt: int = 0
    cached: int = 0
    generated: int = 0
    recomputed: int = 0
    waited: float = field(default=0.0, compare=False)


class TokenEvent(NamedTuple):
    """New tokens of one sequence, in order, and why it ended if it did. `prompt_logprobs` come once, with the first tokens:
    one entry for each prompt token but the first."""

    request_id: str
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs, ...] | None = None
    finish: FinishReason | None = None
    stop_id: int | None = None  # the stop token that ended it
    usage: Usage | None = None  # with the last event


@dataclass(frozen=True)
class Service:
    """How a request is to be served: what the scheduler goes by, and no token depends on."""

    tenant: str = ""
    priority: int = 0  # the smaller, the more urgent, as in vLLM
    pool: Literal["interactive", "batch"] = "interactive"
    deadline: float | None = None  # seconds from arrival until its last token
    expected_tokens: int | None = None  # of output, as the sender guesses; None: max_tokens
    retention: int = 0  # 0 to 10: how hard the cache holds on to its prompt's blocks when nobody uses them
    retention_seconds: float = 60.0  # until that has faded to nothing, counted from the last use

    def __post_init__(self):
        check(isinstance(self.tenant, str), f"tenant must be a string; got {self.tenant!r}")
        object.__setattr__(self, "priority", integer("priority", self.priority))
        check(self.pool in ("interactive", "batch"), f"pool must be interactive or batch; got {self.pool!r}")
        check(self.deadline is None or _is_number(self.deadline), f"deadline must be seconds; got {self.deadline!r}")
        check(self.deadline is None or self.deadline > 0, f"deadline must be positive seconds; got {self.deadline}")
        if self.expected_tokens is not None:
            object.__setattr__(self, "expected_tokens", integer("expected_tokens", self.expected_tokens))
            check(self.expected_tokens > 0, f"expected_tokens must be positive; got {self.expected_tokens}")
        object.__setattr__(self, "retention", integer("retention", self.retention))
        check(0 <= self.retention <= 10, f"retention must be between 0 and 10; got {self.retention}")
        check(_is_number(self.retention_seconds), f"retention_seconds must be a number; got {self.retention_seconds!r}")
        check(self.retention_seconds > 0, f"retention_seconds must be positive; got {self.retention_seconds}")


@dataclass(frozen=True)
class Request:
    """One prompt and all that is decided about it before it reaches the scheduler."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    stop_ids: tuple[int, ...] = ()  # that end a sequence: of the model, unless they are ignored, and of the user
    bad_words: tuple[tuple[int, ...], ...] = ()  # token sequences that must not be completed
    seed: int = 0  # 64 bits
    constraint: Constraint | None = None  # at the start of an output
    shown: tuple[int, ...] = ()  # special tokens whose text is part of the output's, though others' is not
    salt: str = ""  # only requests of the same salt share cached blocks
    service: Service = Service()
