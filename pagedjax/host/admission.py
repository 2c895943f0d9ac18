"""Saying no in time: bounds on what waits, the time to the first token as it can be foreseen, and deadlines that cannot be met.

All predictions come from steps that were measured. Before there are enough of them nothing is known, and nothing is refused for
what is predicted.
"""

import heapq
import math
from dataclasses import dataclass
from typing import NamedTuple

from pagedjax.errors import QueueFull, check
from pagedjax.host.policy import Waiting
from pagedjax.host.waiting import Ahead

MEMORY = 100  # steps after which a measurement counts for 1/e
ENOUGH = 8  # steps before anything is known
IN_FLIGHT = 1.5  # steps, on average, of which one is dispatched and one begun when a request comes
MARGIN = 1.2  # of the wait that is predicted from what is expected: what is taken up to a bound must be in time more often than not
MOST = 256  # sequences ahead that are followed one by one; of more each stands for several


class Rates:
    """What steps take, as a line in their tokens: seconds = fixed + slope * tokens, by least squares with old steps fading out."""

    def __init__(self, token_budget: int):
        """token_budget: the most tokens of a step; prompts are taken to be computed in steps that are full."""
        self.token_budget = token_budget
        self._steps = 0
        self._sums = (0.0,) * 6  # of 1, tokens, seconds, tokens ** 2, tokens * seconds, decode tokens
        self._prefilled = False

    def observe(self, prefill: int, decode: int, seconds: float, steps: int = 1) -> None:
        """A dispatch of so many steps computed so many tokens of prompts, and of answers, and took so long. No time and no
        tokens say nothing."""
        if seconds <= 0 or prefill + decode == 0:
            return
        tokens, seconds, decode_tokens = (prefill + decode) / steps, seconds / steps, decode / steps
        fade = math.exp(-1 / MEMORY)
        new = (1.0, tokens, seconds, tokens * tokens, tokens * seconds, decode_tokens)
        self._sums = tuple(fade * old + value for old, value in zip(self._sums, new, strict=True))
        self._steps += 1
        self._prefilled |= prefill > 0

    @property
    def known(self) -> bool:
        return self._steps >= ENOUGH and self._prefilled

    @property
    def step_seconds(self) -> float | None:
        """Of a step, on average: the time between two tokens of a running sequence."""
        return self._sums[2] / self._sums[0] if self.known else None

    @property
    def prefill_rate(self) -> float | None:
        """Tokens of prompts per second while steps are full: what decode leaves of the budget, in the time of a full step."""
        if not self.known:
            return None
        count, decode = self._sums[0], self._sums[5]
        return max(1.0, self.token_budget - decode / count) / self.seconds_of(self.token_budget)

    def seconds_of(self, tokens: int) -> float:
        """Of one step of so many tokens, once anything is known. No step is faster for having more tokens, or takes less than none
        at no tokens: where the line says so, it is laid through the mean flat, or through zero."""
        count, x, t, xx, xt, _ = self._sums
        spread = xx - x * x / count
        slope = max(0.0, (xt - x * t / count) / spread) if spread > 1e-6 * xx else 0.0
        fixed = (t - slope * x) / count
        return fixed + slope * tokens if fixed >= 0 else xt / xx * tokens

    def finish(self, prompt: int, output: int) -> float | None:
        """Seconds from now until a sequence that starts now has computed its prompt and so many tokens of output."""
        rate, step = self.prefill_rate, self.step_seconds
        return None if rate is None or step is None else prompt / rate + output * step


class Left(NamedTuple):
    """Of a running sequence."""

    output: float  # tokens that it is expected to get still
    blocks: float = 0.0  # that are free when it ends


class Load(NamedTuple):
    """What a request that comes now finds, in its pool where the pools are bounded apart."""

    waiting: int  # sequences
    tokens: int  # that they have to compute before each of them samples
    ahead: Ahead  # of it
    lanes: int
    running: tuple[Left, ...] = ()  # those that nobody would make leave for it
    free: float = math.inf  # blocks, beside what those will still take on average
    need: float = 0.0  # blocks that it takes, on average over its life
    need_ahead: float = 0.0  # and all together that are ahead of it
    barred: float = 0.0  # seconds until its tenant may start anything


@dataclass(frozen=True)
class AdmissionLimits:
    """Beyond these a request is refused. None: no limit."""

    max_queued: int | None = 1024  # sequences
    max_queued_tokens: int | None = None  # of prompts; one request may always wait alone
    max_first_token: float | None = None  # seconds to the first token, as predicted

    def __post_init__(self):
        for name in ("max_queued", "max_queued_tokens"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"{name} must be at least 1; got {value}")
        check(
            self.max_first_token is None or self.max_first_token > 0,
            f"max_first_token must be positive seconds; got {self.max_first_token}",
        )


def steps_to_start(load: Load) -> float:
    """Steps until the request finds a lane and blocks: the running sequences end one after the other, those ahead of it take their
    places, all alike, and end in their turn."""
    ends = sorted(load.running)  # a heap
    lanes, free, now = load.lanes - len(ends), load.free, 0.0
    ahead = math.ceil(load.ahead.sequences)
    count = min(ahead, MOST)
    steps, blocks = 1 + load.ahead.output / max(1, count), load.need_ahead / max(1, ahead)
    for need in (*[blocks] * count, load.need):
        while ends and (lanes < 1 or free < need):
            now, given = heapq.heappop(ends)
            lanes, free = lanes + 1, free + given
        lanes, free = lanes - 1, free - need
        heapq.heappush(ends, Left(now + steps, need))
    return now


def first_token(prompt: int, load: Load, rates: Rates) -> float | None:
    """Seconds until a request of so many tokens that are not cached has its first token; None where nothing is known.

    Prompts are computed while running sequences decode, so waiting for those ahead and waiting for a lane and blocks go on at once:
    the longer of the two counts, and then its own prompt, and the steps that are on their way already.
    """
    rate, step = rates.prefill_rate, rates.step_seconds
    if rate is None or step is None:
        return None
    wait = max(load.barred, MARGIN * max(load.ahead.tokens / rate, steps_to_start(load) * step))
    return wait + prompt / rate + IN_FLIGHT * step


def admit(request_id: str, sequences: int, prompt: int, load: Load, limits: AdmissionLimits, rates: Rates) -> None:
    """Raises QueueFull, with the numbers, unless a request of so many sequences that have `prompt` tokens to compute, all together,
    may wait. Its retry_after is the time until enough of what waits has gone, at the rates that were measured."""
    rate, name = rates.prefill_rate, f"request {request_id}"
    if limits.max_queued is not None and load.waiting + sequences > limits.max_queued:
        excess = load.waiting + sequences - limits.max_queued
        raise QueueFull(
            f"{name}: the queue may hold {limits.max_queued} sequences; {load.waiting} wait, {sequences} more came",
            _seconds_to_enter(excess, load, rates),
        )
    most = limits.max_queued_tokens
    if most is not None and load.waiting and load.tokens + prompt > most:
        excess = min(load.tokens, load.tokens + prompt - most)
        raise QueueFull(
            f"{name}: the queue may hold {most} tokens; {load.tokens} wait, {prompt} more came",
            None if rate is None else excess / rate,
        )
    seconds = first_token(prompt, load, rates)
    if limits.max_first_token is not None and seconds is not None and seconds > limits.max_first_token:
        own = first_token(prompt, Load(0, 0, Ahead(), 1), rates)
        if load.ahead.sequences == 0 and seconds == own:
            return  # nothing is in its way, and it would never do better
        raise QueueFull(
            f"{name}: the first token may take {limits.max_first_token:.3g} s; {seconds:.3g} s are predicted,"
            f" {load.ahead.tokens:.0f} tokens wait before its own {prompt}",
            seconds - max(limits.max_first_token, own or 0.0),
        )


def missed(waiting: Waiting, now: float) -> str | None:
    """Why the deadline of a sequence that has not started can no longer be met; None where it can, or where nothing is known
    beyond its being over (view has no prediction then)."""
    if waiting.deadline is None or now + waiting.seconds <= waiting.deadline:
        return None
    left = waiting.deadline - now
    if left <= 0:
        return f"the deadline, {waiting.deadline - waiting.arrival:.3g} s after arrival, was over {-left:.3g} s ago"
    return (
        f"the deadline, {waiting.deadline - waiting.arrival:.3g} s after arrival, cannot be met: {left:.3g} s are left, and"
        f" {waiting.prompt_left} tokens of prompt and {waiting.output_left} of output take {waiting.seconds:.3g} s"
    )


def _seconds_to_enter(sequences: int, load: Load, rates: Rates) -> float | None:
    """Until so many of those that wait have entered."""
    share = min(1.0, sequences / max(1, load.waiting))
    ahead = Ahead(sequences - 1, share * load.tokens, share * load.ahead.output)
    return first_token(0, load._replace(ahead=ahead, need_ahead=share * load.need_ahead), rates)
