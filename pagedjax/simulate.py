"""The scheduler in virtual time, without a device: what requests wait for, and what a pool and a policy make of them.

The Scheduler and the BlockPool are the engine's own. A step takes the time that a StepTime gives the bucket it is rounded up to,
and the host runs ahead as Engine.step does, so that the steps are those of the engine.
"""

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from pagedjax import service
from pagedjax.buckets import Bucket, pick
from pagedjax.config import EngineConfig
from pagedjax.errors import UserError, check
from pagedjax.host.plan import Plan, RowResult
from pagedjax.host.request import FinishReason, Request, Service, TokenEvent, Usage
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.sequence import Stats
from pagedjax.host.step_time import StepTime, Work

OUTPUT, STOP = 0, 1  # the tokens that all outputs are made of; a prompt has none of them
TICK = 0.01  # seconds: how often a scheduler is asked again that has work and schedules none
PATIENCE = 3600.0  # seconds of that until it counts as an error


@dataclass
class Clock:
    """Virtual time in seconds: what a simulated scheduler takes for the clock."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


class Arrival(NamedTuple):
    """A request and when it comes. `output`: the tokens after which its model stops, if that is before max_tokens; the request
    then has STOP among its stop ids."""

    at: float  # seconds
    request: Request
    output: int | None = None


@dataclass(slots=True)
class Life:
    """What became of one sequence. Times in seconds of the clock; None: did not happen. Prompts are not kept: an hour has a GB."""

    id: str
    index: int
    service: Service
    arrival: float
    entered: float | None = None  # first took a lane
    first: float | None = None  # first token
    last: float | None = None  # newest token
    finish: FinishReason | None = None
    usage: Usage | None = None


class Refusal(NamedTuple):
    """A request that the scheduler did not take."""

    id: str
    service: Service
    at: float
    kind: str  # of the error
    reason: str


class Slots(NamedTuple):
    """The pool's slots by what they are good for, the classes of sequence.Waste. One that several sequences share counts once."""

    tokens: int  # hold keys and values, or will when the steps in flight are done
    reserved: int  # held for tokens that come later
    internal: int  # held for tokens that never come
    external: int  # nobody holds: too small, between reservations, or not wanted


class Step(NamedTuple):
    """One dispatch, and the state of the scheduler once it was planned."""

    at: float  # when it starts on the device
    seconds: float
    passes: int
    rows: int
    tokens: int
    decode: int  # rows with one token
    running: int
    waiting: int
    slots: Slots


@dataclass(frozen=True)
class Report:
    """All that happened."""

    lives: tuple[Life, ...]  # one for each sequence that was taken, in order of arrival
    refusals: tuple[Refusal, ...]
    steps: tuple[Step, ...]
    gaps: Sequence[float]  # seconds between tokens of one sequence; tokens of one dispatch come together and have no gap
    seconds: float  # from the first arrival to the last commit
    stats: Stats
    slots: int  # of the pool


def make_scheduler(config: EngineConfig, num_blocks: int, *, host_blocks: int = 0, per_moved: float | None = None) -> Scheduler:
    """As the engine of this configuration (without zeros) makes it, with a Clock. host_blocks: places in host memory; per_moved:
    seconds in which a token of a block gets there, as in StepTime."""
    seconds = None if per_moved is None else per_moved * config.cache.block_size
    return service.make_scheduler(config, num_blocks, host_blocks=host_blocks, swap_seconds=seconds, clock=Clock())


def work_of(plan: Plan, buckets: Sequence[Bucket], block_size: int) -> Work:
    """What a plan costs by, rounded up to its bucket; as it stands where there are no buckets."""
    tokens, rows, passes = plan.num_tokens, len(plan.rows), plan.steps
    context = pairs = 0
    for row in plan.rows:
        count = max(row.count, row.steps)  # a row has several tokens or several steps, never both
        seen = count * row.start + count * (count + 1) // 2
        pairs += seen
        context += seen if row.count == 1 else row.start + row.count
    if buckets:
        bucket = pick(buckets, tokens, rows, steps=passes)
        tokens, rows = bucket.tokens, bucket.rows
    moved = block_size * (len(plan.swap_out) + len(plan.swap_in))
    return Work(passes, passes * tokens, passes * rows, context, pairs, moved)


def simulate(
    arrivals: Iterable[Arrival],
    scheduler: Scheduler,
    step_time: StepTime,
    *,
    buckets: Sequence[Bucket] = (),
    async_steps: int = 1,
    each_step: Callable[[Plan, float], None] = lambda plan, at: None,
) -> Report:
    """Runs all arrivals (in order of time) to their end, and moves on the scheduler's clock, which is a Clock; `each_step` sees
    every plan when it is made, and the time. UserError where arrivals are not in order."""
    clock = scheduler.clock
    assert isinstance(clock, Clock), f"a simulated scheduler needs a Clock; got {clock}"
    run = _Run(scheduler, clock)
    flight: deque[tuple[Plan, float, float]] = deque()  # a step that is not committed, when the device begins and ends it
    steps: list[Step] = []
    coming = iter(arrivals)
    upcoming = next(coming, None)
    start = clock.now if upcoming is None else max(clock.now, upcoming.at)
    free, idle_since = clock.now, clock.now  # when the device is done with all it has; the last time something went on
    while True:
        while upcoming is not None and upcoming.at <= clock.now:
            run.add(upcoming)
            before, upcoming = upcoming.at, next(coming, None)
            check(upcoming is None or upcoming.at >= before, f"arrivals must be in order of time; got {upcoming and upcoming.at}")
        plan = scheduler.schedule()
        run.take(scheduler.take_ended())
        if plan is not None:
            each_step(plan, clock.now)
            for entry in plan.entries:
                run.enter(entry.request.id, entry.index)
            begin, seconds = max(clock.now, free), step_time.seconds(work_of(plan, buckets, scheduler.block_size))
            free = begin + seconds
            flight.append((plan, begin, free))
            steps.append(_step(plan, begin, seconds, scheduler.stats, run.slots()))
        keep = async_steps if plan is not None else 0
        if plan is not None or flight:
            while len(flight) > keep:
                done, begin, at = flight.popleft()
                clock.now = max(clock.now, at)
                run.take(scheduler.commit(done, run.results(done), at - begin))
            idle_since = clock.now
        elif scheduler.has_work():  # it waits for time to pass
            check_progress(clock.now - idle_since)
            clock.now = min(clock.now + TICK, math.inf if upcoming is None else upcoming.at)
        elif upcoming is not None:
            clock.now = idle_since = max(clock.now, upcoming.at)
        else:
            break
    slots = scheduler.pool.capacity * scheduler.block_size
    lives = tuple(run.lives.values())
    return Report(lives, tuple(run.refusals), tuple(steps), run.gaps, clock.now - start, scheduler.stats, slots)


def check_progress(seconds: float) -> None:
    """RuntimeError for a scheduler that has had work for so long and scheduled none."""
    if seconds > PATIENCE:
        raise RuntimeError(f"the scheduler has work, and scheduled nothing for {PATIENCE:.0f} s of virtual time")


@dataclass
class _Run:
    """What is known of each sequence while a simulation goes on."""

    scheduler: Scheduler
    clock: Clock
    lives: dict[int, Life] = field(default_factory=dict)  # by number: ids may come again
    live: dict[tuple[str, int], int] = field(default_factory=dict)
    ends: dict[tuple[str, int], int] = field(default_factory=dict)  # the lengths at which models stop, if that is before max_len
    refusals: list[Refusal] = field(default_factory=list)
    gaps: array = field(default_factory=lambda: array("d"))

    def add(self, arrival: Arrival) -> None:
        request = arrival.request
        may_stop = arrival.output is None or STOP in request.stop_ids
        check(may_stop, f"request {request.id} must have {STOP} among its stop_ids; got {request.stop_ids}")
        try:
            self.scheduler.add(request)
        except UserError as error:
            self.refusals.append(Refusal(request.id, request.service, arrival.at, type(error).__name__, str(error)))
            return
        for index in range(request.params.n):
            self.live[request.id, index] = len(self.lives)
            self.lives[len(self.lives)] = Life(request.id, index, request.service, arrival.at)
            if arrival.output is not None:
                self.ends[request.id, index] = len(request.prompt) + arrival.output

    def enter(self, name: str, index: int) -> None:
        life = self.lives[self.live[name, index]]
        if life.entered is None:
            life.entered = self.clock.now

    def slots(self) -> Slots:
        """As of the last schedule. How long each sequence will get is known here, so no slot is guessed at."""
        scheduler, stats, ends = self.scheduler, self.scheduler.stats, self.ends
        internal = 0
        for s in scheduler.running:
            final = min(s.max_len, ends.get(s.key, s.max_len))
            internal += sum(max(0, len(blocks) * scheduler.block_size - final) for blocks in s.blocks)
        free = scheduler.pool.num_free * scheduler.block_size
        return Slots(stats.slots_held - stats.waste, stats.waste - internal, internal, free)

    def results(self, plan: Plan) -> list[RowResult]:
        """What a device would answer: OUTPUT, and STOP where a model stops."""
        if not self.ends:
            return [_outputs(row.steps) for row in plan.rows]
        made = []
        for row in plan.rows:
            left = (
                self.ends.get((row.request_id, row.index), 0) - row.start - row.count
            )  # tokens from the first sampled one to STOP
            made.append(RowResult((OUTPUT,) * (left - 1) + (STOP,)) if 0 < left <= row.steps else _outputs(row.steps))
        return made

    def take(self, events: Iterable[TokenEvent]) -> None:
        now = self.clock.now
        for event in events:
            life = self.lives[self.live[event.request_id, event.index]]
            if event.tokens:
                if life.last is None:
                    life.first = now
                else:
                    self.gaps.append(now - life.last)
                life.last = now
            if event.finish is not None:
                life.finish, life.usage = event.finish, event.usage
                del self.live[event.request_id, event.index]
                self.ends.pop((event.request_id, event.index), None)


@cache
def _outputs(count: int) -> RowResult:
    return RowResult((OUTPUT,) * count)


def _step(plan: Plan, at: float, seconds: float, stats: Stats, slots: Slots) -> Step:
    return Step(at, seconds, plan.steps, len(plan.rows), plan.num_tokens, plan.num_decode, stats.running, stats.waiting, slots)


# --- what a report says in short ----------------------------------------------------------------------------------------------


def summary(report: Report) -> dict[str, Any]:
    """The figures of a report, ready for JSON. Times in seconds; shares of the pool are means over time, weighted by steps."""
    done = [life for life in report.lives if life.usage is not None and life.first is not None and life.last is not None]
    spans = [(life, life.first or 0.0, life.last or 0.0, life.usage or Usage()) for life in done]
    prompt, output = sum(u.prompt for *_, u in spans), sum(u.generated for *_, u in spans)
    seconds = max(report.seconds, 1e-9)
    return {
        "requests": {
            "finished": len(done),
            "refused": len(report.refusals),
            "ended": dict(Counter(str(v.finish) for v in report.lives)),
        },
        "seconds": report.seconds,
        "rates": {"requests": len(done) / seconds, "prompt_tokens": prompt / seconds, "output_tokens": output / seconds},
        "queued": spread([life.entered - life.arrival for life in report.lives if life.entered is not None]),
        "first_token": spread([first - life.arrival for life, first, *_ in spans]),
        "gap": spread(report.gaps),
        "per_token": spread([(last - first) / (u.generated - 1) for _, first, last, u in spans if u.generated > 1]),
        "whole": spread([last - life.arrival for life, _, last, _ in spans]),
        "normalized": spread([(last - life.arrival) / u.generated for life, _, last, u in spans]),
        "steps": _steps(report),
        "cached": {"tokens": report.stats.cached_tokens, "share": sum(u.cached for *_, u in spans) / max(1, prompt)},
        "preemptions": report.stats.preemptions,
        "swaps": report.stats.swaps,
        "recomputed_tokens": report.stats.recomputed_tokens,
    }


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, percentiles (linear between two values) and maximum; None of nothing."""
    if not len(values):
        return None
    array_ = np.asarray(values, np.float64)
    p50, p90, p99 = np.percentile(array_, [50, 90, 99])
    return {"mean": float(array_.mean()), "p50": float(p50), "p90": float(p90), "p99": float(p99), "max": float(array_.max())}


def _steps(report: Report) -> dict[str, Any]:
    """How many, how full, and what the pool held while they ran."""
    steps = report.steps
    weights = np.asarray([step.seconds for step in steps] or [1.0])
    columns = np.asarray([(step.running, step.waiting, *step.slots) for step in steps] or [(0,) * 6], np.float64)
    running, waiting, *slots = (weights @ columns / weights.sum()).tolist()
    return {
        "count": len(steps),
        "passes": sum(step.passes for step in steps),
        "tokens": report.stats.scheduled_tokens,
        "busy": float(sum(step.seconds for step in steps)) / max(report.seconds, 1e-9),
        "running": running,
        "waiting": waiting,
        "pool": {name: count / report.slots for name, count in zip(Slots._fields, slots, strict=True)},
        "token_share_of_held": slots[0] / max(1.0, sum(slots[:3])),
    }
