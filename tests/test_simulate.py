"""The simulator: what it counts by hand, and that its steps are those of the real engine."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from pagedjax.buckets import Bucket
from pagedjax.config import CacheConfig, EngineConfig, QueueConfig, ScheduleConfig, with_options
from pagedjax.engine import Engine
from pagedjax.errors import UserError
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.plan import Plan
from pagedjax.host.request import Request, SamplingParams
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.step_time import StepTime
from pagedjax.simulate import STOP, Arrival, Clock, Report, make_scheduler, simulate, spread, summary, work_of

A_SECOND = StepTime(per_pass=1)
CONFIG = EngineConfig(
    cache=CacheConfig(block_size=4),
    schedule=ScheduleConfig(max_model_len=64, max_num_seqs=2, max_num_batched_tokens=8, max_queued=3, decode_steps=1),
)


def request(name: str, prompt: int, output: int, *, first: int = 10, **options: Any) -> Request:
    stop_ids = options.pop("stop_ids", ())
    return Request(name, tuple(range(first, first + prompt)), SamplingParams(max_tokens=output, **options), stop_ids=stop_ids)


def run(*arrivals: Arrival, config: EngineConfig = CONFIG, blocks: int = 65, time: StepTime = A_SECOND, **options: Any) -> Report:
    scheduler = make_scheduler(config, blocks)
    report = simulate(arrivals, scheduler, time, **options)
    scheduler.pool.check([])
    assert not scheduler.has_work()
    return report


def test_one_request_by_hand() -> None:
    """12 tokens of prompt take two steps of 8, three tokens are made: the first at 2 s, then one a second."""
    report = run(Arrival(5, request("a", 12, 3)))
    (life,) = report.lives
    assert (life.arrival, life.entered, life.first, life.last, life.finish) == (5, 5, 7, 9, "length")
    assert life.usage is not None and (life.usage.prompt, life.usage.generated) == (12, 3)
    assert [(s.at, s.seconds, s.rows, s.tokens, s.decode) for s in report.steps] == [
        *((5, 1, 1, 8, 0), (6, 1, 1, 4, 0), (7, 1, 1, 1, 1), (8, 1, 1, 1, 1)),
    ]
    assert [s.slots for s in report.steps] == [
        *((8, 0, 0, 248), (12, 0, 0, 244), (13, 2, 1, 240), (14, 1, 1, 240)),
    ]
    assert list(report.gaps) == [1, 1] and report.seconds == 4


def test_who_comes_during_a_step_waits_for_those_in_flight() -> None:
    """The host is one step ahead: at 10.5 the step from 11 to 12 is already dispatched. With async_steps=0 it is not."""
    made = Arrival(10, request("a", 4, 9)), Arrival(10.5, request("b", 4, 2, first=30))
    for ahead, entered, first in ((1, 11, 13), (0, 11, 12)):
        late = run(*made, async_steps=ahead).lives[1]
        assert (late.entered, late.first) == (entered, first)


def test_time_jumps_to_the_next_arrival() -> None:
    report = run(Arrival(0, request("a", 4, 1)), Arrival(1000, request("b", 4, 1, first=30)))
    assert [life.first for life in report.lives] == [1, 1001] and len(report.steps) == 2
    assert summary(report)["steps"]["busy"] == pytest.approx(2 / 1001)


def test_lanes_are_waited_for() -> None:
    report = run(*(Arrival(0, request(name, 2, 4, first=10 * i)) for i, name in enumerate("abc", 1)))
    assert [life.entered for life in report.lives] == [0, 0, 4]
    assert summary(report)["queued"]["max"] == 4


def test_a_plan_costs_what_its_bucket_does() -> None:
    """12 tokens of prompt in steps of 8 and 4, whose last gives a token; then five in a dispatch of 4 steps and one of 1."""
    config = with_options(CONFIG, {"schedule.decode_steps": 4})
    plans: list[Plan] = []
    run(Arrival(0, request("a", 12, 6)), config=config, each_step=lambda plan, at: plans.append(plan))
    buckets = (Bucket(2, 2), Bucket(8, 2), Bucket(16, 2))
    assert [work_of(plan, (), 4)[:5] for plan in plans] == [
        (1, 8, 1, 8, 8 * 9 // 2),
        (1, 4, 1, 12, 9 + 10 + 11 + 12),
        (4, 4, 4, 13 + 14 + 15 + 16, 13 + 14 + 15 + 16),
        (1, 1, 1, 17, 17),
    ]
    assert [work_of(plan, buckets, 4)[:3] for plan in plans] == [(1, 8, 2), (1, 8, 2), (4, 8, 8), (1, 2, 2)]
    report = run(Arrival(0, request("a", 12, 6)), config=config, time=StepTime(per_token=1), buckets=buckets)
    assert [s.seconds for s in report.steps] == [8, 8, 8, 2]


def test_swapping_takes_the_time_of_the_bus() -> None:
    """Two sequences that do not fit side by side. One goes to host memory and comes back, block by block, and no token is computed
    again; where that takes longer than computing, as the first steps show, it is not done."""
    config = with_options(CONFIG, {"cache.prefix_caching": False, "max_num_batched_tokens": 16})
    made = [Arrival(0, request(name, 8, 30, first=40 * i)) for i, name in enumerate("ab", 1)]
    size = config.cache.block_size

    def with_bus(per_moved: float) -> tuple[Report, list[Plan]]:
        plans: list[Plan] = []
        scheduler = make_scheduler(config, 15, host_blocks=15, per_moved=per_moved)
        time = StepTime(per_token=1, per_moved=per_moved)
        return simulate(made, scheduler, time, async_steps=0, each_step=lambda plan, at: plans.append(plan)), plans

    fast, plans = with_bus(0.25)
    moved = sum(len(plan.swap_out) + len(plan.swap_in) for plan in plans)
    assert fast.stats.swaps == fast.stats.preemptions > 0 == fast.stats.recomputed_tokens and moved > 0
    assert fast.seconds == fast.stats.scheduled_tokens + 0.25 * size * moved
    slow, plans = with_bus(4.0)
    assert slow.stats.preemptions > slow.stats.swaps == 0 < slow.stats.recomputed_tokens
    assert not any(plan.swap_out for plan in plans) and slow.seconds == slow.stats.scheduled_tokens


@pytest.mark.parametrize("steps", [1, 4])
def test_a_model_that_stops_early(steps: int) -> None:
    config = with_options(CONFIG, {"schedule.decode_steps": steps})
    made = [Arrival(0, request("a", 4, 20, stop_ids=(STOP,)), output=6), Arrival(0, request("b", 4, 9, first=30))]
    stopped, other = run(*made, config=config).lives
    assert (stopped.finish, other.finish) == ("stop", "length")
    assert stopped.usage is not None and stopped.usage.generated == 6
    assert other.usage is not None and other.usage.generated == 9


def test_an_early_stop_needs_a_stop_id() -> None:
    with pytest.raises(UserError, match=r"request a must have 1 among its stop_ids; got \(\)"):
        run(Arrival(0, request("a", 4, 20), output=6))


def test_who_is_refused_and_why() -> None:
    many = [Arrival(0, request(f"{i}", 4, 1, first=10 * i)) for i in range(1, 5)]
    report = run(Arrival(0, request("long", 64, 1)), *many)
    assert [(r.id, r.kind) for r in report.refusals] == [("long", "UserError"), ("4", "QueueFull")]
    assert "must be shorter than max_model_len 64; got 64 tokens" in report.refusals[0].reason
    assert len(report.lives) == 3 and all(life.finish == "length" for life in report.lives)
    assert summary(report)["requests"] == {"finished": 3, "refused": 2, "ended": {"length": 3}}


def test_samples_and_shared_prompts() -> None:
    report = run(Arrival(0, request("a", 9, 2, n=2)), Arrival(9, request("a", 9, 2)))
    assert [life.usage and life.usage.cached for life in report.lives] == [0, 8, 8]
    assert summary(report)["cached"]["share"] == pytest.approx(16 / 27)


def test_arrivals_in_no_order() -> None:
    with pytest.raises(UserError, match="arrivals must be in order of time; got 3"):
        run(Arrival(4, request("a", 4, 1)), Arrival(3, request("b", 4, 1)))


@pytest.mark.parametrize("target", [0.02, 0.04, 0.0])
def test_the_budget_follows_the_time_between_tokens(target: float) -> None:
    """Four sequences decode while prompts of 2,000 tokens come; steps take 5 ms and 0.1 ms a token, so that the whole budget of 512
    makes a gap of 56 ms. With a target the scheduler, which knows only what steps took, keeps it once it has seen a few; and
    prompts still get what it leaves, so that they take as many more steps as it is smaller."""
    schedule = ScheduleConfig(max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=512, decode_steps=1)
    config = replace(CONFIG, schedule=schedule, queue=QueueConfig(token_seconds=target))
    decoding = [Arrival(0, request(f"d{i}", 4, 400)) for i in range(4)]
    prompts = [Arrival(0.3 + 0.3 * i, request(f"p{i}", 2000, 1, first=5000 * (i + 1))) for i in range(4)]
    report = run(*decoding, *prompts, config=config, blocks=4000, time=StepTime(per_pass=0.005, per_token=1e-4))
    during = [step.seconds for step in report.steps if step.decode and step.tokens > step.decode and step.at > 0.3]
    limit = target or 0.0562
    assert 0.8 * limit < max(during) <= 1.02 * limit
    assert len(during) == pytest.approx(4 * 2000 / ((limit - 0.005) / 1e-4 - 4), rel=0.1)


class Sleepy(Scheduler):
    """Schedules nothing before a time of its clock."""

    def __init__(self, clock: Clock, until: float):
        sizes = {"block_size": 4, "max_model_len": 64, "num_lanes": 2, "token_budget": 8, "max_queued": 9, "decode_steps": 1}
        super().__init__(BlockPool(9), **sizes, clock=clock)
        self.until = until

    def schedule(self) -> Plan | None:
        return super().schedule() if self.clock() >= self.until else None


def test_a_scheduler_may_wait_for_time_to_pass() -> None:
    clock = Clock()
    report = simulate([Arrival(1, request("a", 4, 1))], Sleepy(clock, 3), A_SECOND)
    assert report.lives[0].entered == pytest.approx(3, abs=0.02)


def test_a_scheduler_that_never_does_is_found_out() -> None:
    clock = Clock()
    with pytest.raises(RuntimeError, match="has work, and scheduled nothing for 3600 s of virtual time"):
        simulate([Arrival(1, request("a", 4, 1))], Sleepy(clock, 1e9), A_SECOND)


def test_summary_by_hand() -> None:
    """Two requests that each take a step for the prompt and then three more tokens; the second comes 2 s later."""
    said = summary(run(Arrival(0, request("a", 4, 4)), Arrival(2, request("b", 4, 4, first=30)), async_steps=0))
    assert said["seconds"] == 6 and said["rates"] == {"requests": 2 / 6, "prompt_tokens": 8 / 6, "output_tokens": 8 / 6}
    assert said["first_token"] == {"mean": 1, "p50": 1, "p90": 1, "p99": 1, "max": 1} == said["per_token"] == said["gap"]
    assert said["whole"]["mean"] == 4 and said["normalized"]["mean"] == 1
    steps = said["steps"]
    assert (steps["count"], steps["passes"], steps["tokens"], steps["busy"]) == (6, 6, 14, 1)
    assert steps["running"] == pytest.approx((1 + 1 + 2 + 2 + 1 + 1) / 6)
    tokens, held = 4 + 5 + 10 + 12 + 6 + 7, 4 + 8 + 12 + 16 + 8 + 8
    shares = {"tokens": tokens, "reserved": held - tokens, "internal": 0, "external": 6 * 256 - held}
    assert steps["pool"] == pytest.approx({name: count / 6 / 256 for name, count in shares.items()})
    assert steps["token_share_of_held"] == pytest.approx(tokens / held)


@pytest.mark.parametrize(
    ("mode", "slots"),
    [
        ("paged", [(4, 0, 0, 60), (5, 1, 2, 56), (6, 0, 2, 56)]),
        ("oracle", [(4, 2, 10, 48), (5, 1, 10, 48), (6, 0, 10, 48)]),  # max_tokens is what it goes by
        ("pow2", [(4, 2, 14, 44), (5, 1, 14, 44), (6, 0, 14, 44)]),
        ("max", [(4, 2, 26, 32), (5, 1, 26, 32), (6, 0, 26, 32)]),
    ],
)
def test_slots_by_what_they_are_good_for(mode: Any, slots: list) -> None:
    """A prompt of 4 that may get 9 more tokens, but whose model stops after 2 and so leaves its last step unused: 6 in all."""
    config = with_options(CONFIG, {"cache.reserve": mode, "schedule.max_model_len": 32})
    report = run(Arrival(0, request("a", 4, 9, stop_ids=(STOP,)), 2), config=config, blocks=17)
    assert [tuple(s.slots) for s in report.steps] == slots
    waste = report.stats.slot_steps
    assert (waste.tokens, waste.reserved, waste.internal, waste.external) == tuple(map(sum, zip(*slots, strict=True)))


def test_spread() -> None:
    assert spread([]) is None
    found = spread(list(range(101)))
    assert found == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100})


# --- against the engine -------------------------------------------------------------------------------------------------------

Shape = tuple[int, int, int, int]  # rows, tokens, passes, preemptions so far


def shape_of(plan: Plan, scheduler: Scheduler) -> Shape:
    return len(plan.rows), plan.num_tokens, plan.steps, scheduler.stats.preemptions


def requests() -> list[Request]:
    """More than there are lanes; some share a prefix, and the pool is too small for four of them at their longest."""
    shared = tuple(range(200, 235))
    shapes = [(20, 40), (45, 30), (33, 9), (3, 50), (20, 25), (60, 12), (5, 1), (18, 33)]
    made = [
        Request(f"{i}", tuple(range(300 + 20 * i, 300 + 20 * i + p)), SamplingParams(max_tokens=o))
        for i, (p, o) in enumerate(shapes)
    ]
    more = [Request(f"s{i}", (*shared, 290 + i), SamplingParams(max_tokens=10 + i)) for i in range(3)]
    return [replace(r, params=replace(r.params, temperature=0), prompt=tuple(t % 512 for t in r.prompt)) for r in made + more]


def plain(scheduler: Scheduler) -> dict[str, Any]:
    """Its settings: all that is a number, a text or a switch."""
    return {name: value for name, value in vars(scheduler).items() if isinstance(value, int | float | str | bool)}


def steps_of_engine(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Shape]:
    made: list[Shape] = []
    schedule = engine.scheduler.schedule

    def watched() -> Plan | None:
        plan = schedule()
        if plan is not None:
            made.append(shape_of(plan, engine.scheduler))
        return plan

    monkeypatch.setattr(engine.scheduler, "schedule", watched)
    for own in requests():
        engine.add(own)
    while engine.has_work():
        engine.step()
    return made


def steps_of_simulator(config: EngineConfig, blocks: int, buckets: tuple[Bucket, ...]) -> list[Shape]:
    made: list[Shape] = []
    scheduler = make_scheduler(config, blocks)
    simulate(
        [Arrival(0, own) for own in requests()],
        scheduler,
        StepTime(per_pass=3e-3, per_token=1e-4),
        buckets=buckets,
        async_steps=config.schedule.async_steps,
        each_step=lambda plan, at: made.append(shape_of(plan, scheduler)),
    )
    return made


def test_its_steps_are_those_of_the_engine(stories_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, tokens, passes and preemptions of every step; and of none of three schedules that differ in one number."""
    engine, blocks = stories_engine(**{"schedule.decode_steps": 16}), 9
    same = make_scheduler(engine.config, engine.scheduler.pool.num_blocks)
    assert plain(same) == plain(engine.scheduler)
    monkeypatch.setattr(engine, "scheduler", make_scheduler(engine.config, blocks))  # no array of the device gets smaller
    real = steps_of_engine(engine, monkeypatch)
    assert real[-1][-1] > 0, "there are preemptions"
    assert len({passes for _, _, passes, _ in real}) > 2
    assert engine.scheduler.stats.cached_tokens > 0
    assert steps_of_simulator(engine.config, blocks, engine.buckets) == real
    for name, value in (("max_num_batched_tokens", 31), ("async_steps", 0), ("decode_steps", 1)):
        other = with_options(engine.config, {f"schedule.{name}": value})
        assert steps_of_simulator(other, blocks, engine.buckets) != real, name
    assert steps_of_simulator(engine.config, blocks + 1, engine.buckets) != real, "one block more"
