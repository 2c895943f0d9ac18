"""Nothing that is taken waits for ever, and what would is refused: windows, runs, caps of tenants, deadlines."""

from dataclasses import replace
from typing import Any

import pytest
from fake_device import drive, expected, make_request, make_scheduler, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.errors import UserError
from pagedjax.host.entrance import ServiceRules
from pagedjax.host.plan import Plan
from pagedjax.host.request import Request, SamplingParams, Service
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.tenants import TenantLimits


def of_tenant(name: str, prompt: list[int], max_tokens: int, **params: Any) -> Request:
    return replace(make_request(name, prompt, max_tokens, **params), service=Service(tenant="t"))


def capped(num_blocks: int, **limits: int) -> Scheduler:
    return make_scheduler(num_blocks, service=ServiceRules(tenants={"t": TenantLimits(**limits)}))


# --- windows: a pool that holds less than the prompt ----------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.sampled_from([(9,), (3,), (9, 16), (5, 9, 9)]),
    st.integers(5, 20),
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=4),
    st.integers(0, 6),
    st.integers(0, 1),
    st.sampled_from([(0, "recompute"), (3, "swap"), (30, "swap")]),
    st.booleans(),
)
def test_prompts_longer_than_the_pool_pass_through_a_window(windows, budget, shapes, extra, delay, memory, caching) -> None:
    """The pool has as many blocks as one sequence holds at most, and a few more."""
    places, how = memory
    options: dict[str, Any] = {"token_budget": budget, "windows": windows, "host_blocks": places, "preemption": how}
    most = make_scheduler(200, **options).tables.most(63)
    scheduler = make_scheduler(1 + most + extra, prefix_caching=caching, **options)
    made = [make_request(f"r{i}", [i % 2, *range(prompt - 1)], output) for i, (prompt, output) in enumerate(shapes) if prompt < 64]
    events = drive(scheduler, {3 * i: [request] for i, request in enumerate(made)}, delay)
    for request in made:
        assert tokens_of(events[request.id, 0]) == expected(request, 64)


# --- contiguous runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "prompt", "message"),
    [
        ("oracle", 150, "need 39 blocks of 4 tokens in one piece; the pool has 32"),  # of 60 blocks: runs are powers of two
        ("pow2", 100, "need 33 blocks of 4 tokens in one piece; the pool has 32"),
        ("max", 5, "need 64 blocks of 4 tokens in one piece; the pool has 32"),
    ],
)
def test_runs_that_no_pool_this_large_has_are_refused(mode: str, prompt: int, message: str) -> None:
    scheduler = make_scheduler(61, reserve=mode, max_model_len=256)
    with pytest.raises(UserError, match=message):
        scheduler.add(make_request("a", [1] * prompt, 32 if mode == "pow2" else 4))
    assert not scheduler.has_work()


def test_without_max_tokens_the_longest_run_is_the_limit() -> None:
    scheduler = make_scheduler(61, reserve="oracle", max_model_len=256)
    own = drive(scheduler, {0: [Request("a", (1, 2, 3), SamplingParams(max_tokens=None))]}, 1)["a", 0]
    assert len(tokens_of(own)) == 32 * 4 - 3 and own[-1].finish == "length"


def test_runs_are_not_shared_by_beams_nor_made_for_several_groups() -> None:
    scheduler = make_scheduler(61, reserve="oracle")
    with pytest.raises(UserError, match="request a: beams share blocks, which needs reserve to be paged; it is oracle"):
        scheduler.add(make_request("a", [1] * 9, 4, beam_width=2))
    with pytest.raises(UserError, match="reserve must be paged where layers see differently far; got max"):
        make_scheduler(61, reserve="max", windows=(None, 9))


# --- caps of tenants ------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=5),
    st.integers(11, 20),
    st.integers(0, 1),
    st.booleans(),
)
def test_a_tenant_never_holds_more_than_its_cap(shapes, cap: int, delay: int, caching: bool) -> None:
    """Also as its sequences grow; all of them are served, and others beside them."""
    rules = ServiceRules(tenants={"t": TenantLimits(max_blocks=cap, max_rows=2)})
    scheduler = make_scheduler(60, service=rules, prefix_caching=caching)
    made = [of_tenant(f"r{i}", [i] * prompt, output, n=n) for i, (prompt, output, n) in enumerate(shapes)]
    other = make_request("other", [90] * 6, 30)

    def each_step(_: int, plan: Plan | None) -> None:
        own = [s for s in scheduler.running if s.request.service.tenant == "t"]
        assert sum(s.num_held for s in own) <= cap and len(own) <= 2

    events = drive(scheduler, {0: [other, *made]}, delay, each_step)
    for request in [other, *made]:
        for index in range(request.params.n):
            assert tokens_of(events[request.id, index]) == expected(request, 64)


def test_growing_sequences_of_a_tenant_make_room_among_themselves_alone() -> None:
    """Two of 9 + 15 tokens need 6 blocks each in the end; the tenant may hold 8 of many."""
    scheduler = capped(100, max_blocks=8)
    made = [of_tenant(f"r{i}", [i] * 9, 15) for i in range(2)]
    other = make_request("other", [90] * 6, 30)
    events = drive(scheduler, {0: [other, *made]}, 1)
    preempted = [any(d.what == "preempted" for d in scheduler.trace.of(r.id)) for r in (other, *made)]
    assert preempted == [False, False, True] and scheduler.stats.preemptions == 1
    assert all(tokens_of(events[r.id, 0]) == expected(r, 64) for r in (other, *made))


def test_what_never_fits_a_tenants_caps_is_refused() -> None:
    scheduler = capped(100, max_blocks=8, max_rows=2)
    with pytest.raises(UserError, match="request a: prompt and output need 9 blocks of 4 tokens; tenant 't' may hold 8"):
        scheduler.add(of_tenant("a", [1] * 20, 17))
    with pytest.raises(UserError, match="request a: 3 beams need as many rows; tenant 't' may run 2"):
        scheduler.add(of_tenant("a", [1] * 2, 3, beam_width=3))
    unlimited = replace(of_tenant("a", [1] * 20, 1), params=SamplingParams(max_tokens=None))
    own = drive(scheduler, {0: [unlimited]}, 1)["a", 0]
    assert len(tokens_of(own)) == 8 * 4 + 1 - 20  # the last token is never written


def test_a_search_is_as_many_rows_as_it_has_beams() -> None:
    scheduler = capped(100, max_rows=3)
    made = [of_tenant("one", [1] * 3, 30), of_tenant("beams", [2] * 3, 6, beam_width=3)]
    seen: set[int] = set()

    def each_step(_: int, plan: Plan | None) -> None:
        seen.add(scheduler.entrance.held(scheduler.running).tenants.get("t", (0, 0))[0])

    drive(scheduler, {0: made}, 1, each_step)
    assert seen == {1, 3}, "never both at once"


def test_what_is_held_back_by_its_ceiling_holds_up_nobody_else() -> None:
    """Interactive work that may not start for a minute leaves batch work all lanes."""
    rules = ServiceRules(tenants={"t": TenantLimits(tokens_per_minute=10)})
    now = [0.0]
    scheduler = make_scheduler(100, service=rules, clock=lambda: now[0])
    drive(scheduler, {0: [of_tenant("first", [1] * 30, 2)]}, 1)
    scheduler.add(of_tenant("waits", [2] * 30, 2))
    for i in range(4):
        scheduler.add(replace(make_request(f"b{i}", [10 + i], 9), service=Service(pool="batch")))
    plan = scheduler.schedule()
    assert plan is not None and sorted(row.request_id for row in plan.rows) == ["b0", "b1", "b2", "b3"]


# --- deadlines ------------------------------------------------------------------------------------------------------------------


def test_an_idle_engine_wakes_for_a_deadline() -> None:
    """And not when the tenant's ceiling lets somebody start, a long time after it."""
    now = [0.0]
    rules = ServiceRules(tenants={"t": TenantLimits(tokens_per_minute=10)})
    scheduler = make_scheduler(100, service=rules, clock=lambda: now[0])
    drive(scheduler, {0: [of_tenant("first", [1] * 30, 2)]}, 1)
    scheduler.add(of_tenant("waits", [2] * 30, 2))
    assert scheduler.schedule() is None and scheduler.seconds_idle() > 100
    urgent = replace(make_request("late", [2] * 30, 2), service=Service(tenant="t", deadline=2.0))
    scheduler.add(urgent)
    assert scheduler.schedule() is None and scheduler.seconds_idle() == 2
    now[0] += scheduler.seconds_idle()
    assert scheduler.schedule() is None
    assert [(e.request_id, e.finish) for e in scheduler.take_ended()] == [("late", "deadline")]
    assert scheduler.seconds_idle() > 100


def test_a_sample_that_is_late_does_not_take_the_rows_of_others_out_of_a_plan() -> None:
    """Three samples on two lanes: that the third cannot be in time is found when the rows of the others are planned already. They
    keep their lanes and blocks until the next plan, or one that enters in their place would share them."""
    now = [0.0]
    scheduler = make_scheduler(100, num_lanes=2, clock=lambda: now[0])
    for tokens in (8, 10, 12) * 5:
        scheduler.entrance.rates.observe(tokens, 1, 0.1)
    samples = replace(make_request("a", [*range(9)], 20, n=3), service=Service(deadline=2.5))
    other = make_request("b", [50] * 30, 20)

    def each_step(_: int, plan: Plan | None) -> None:
        now[0] += 0.1
        for row in plan.rows if plan else ():
            assert any((s.key, s.epoch, s.lane) == (row[:2], row.epoch, row.lane) for s in scheduler.running)

    events = drive(scheduler, {0: [samples], 3: [other]}, 0, each_step)
    assert [events["a", i][-1].finish for i in range(3)] == ["deadline"] * 3
    assert tokens_of(events["b", 0]) == expected(other, 64)
    assert "cannot be met" in next(d.why["because"] for d in scheduler.trace.of("a") if d.what == "dropped")
