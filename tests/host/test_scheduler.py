"""The scheduler without a device (fake_device.py): every request gets its tokens, and what that takes is counted."""

import random
from dataclasses import replace

import pytest
from fake_device import Device, drive, expected, make_request, make_scheduler, tokens_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedjax.errors import QueueFull, UserError
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.entrance import ServiceRules
from pagedjax.host.plan import Plan, RowResult
from pagedjax.host.policy import POLICIES, PolicyOptions
from pagedjax.host.pools import PoolShares
from pagedjax.host.request import Request, SamplingParams, Service
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.tenants import TenantLimits

OWN = st.lists(st.integers(0, 2), min_size=1, max_size=4)
PROMPTS = st.one_of(  # of the second kind many have a prefix in common
    st.lists(st.integers(0, 96), min_size=1, max_size=30),
    st.builds(lambda shared, own: [*range(shared), *own], st.integers(0, 26), OWN),
)
REQUESTS = st.lists(
    st.tuples(
        PROMPTS,
        st.integers(1, 30),  # max_tokens
        st.integers(0, 12),  # arrival step
        st.integers(1, 3),  # n
        st.lists(st.integers(0, 96), max_size=8),  # stop ids
        st.integers(0, 5),  # min_tokens
    ),
    min_size=1,
    max_size=8,
)


MEMORY = st.fixed_dictionaries(
    {
        "prefix_caching": st.booleans(),
        "windows": st.sampled_from([(None,), (9,), (None, 9, 16), (3, 8)]),
        "host_blocks": st.sampled_from([0, 3, 100]),
        "preemption": st.sampled_from(["recompute", "swap"]),
    }
)


@settings(max_examples=300, deadline=None)
@given(
    REQUESTS,
    st.integers(17, 40),
    st.integers(5, 20),
    st.integers(0, 1),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([2, 4, 8]),
    MEMORY,
)
@example(  # samples wait while the first one, which was preempted, computes the prompt again: not in the plan of its last chunk
    requests=[
        ([*range(14), 0, 0], 10, 0, 1, [], 0),
        ([0, 0, 0, 0], 1, 2, 1, [], 5),
        ([*range(24), 1, 1, 0, 1], 1, 1, 3, [3], 5),
        ([5], 2, 12, 3, [], 5),
        ([10], 9, 0, 1, [], 3),
    ],
    num_blocks=17,
    budget=5,
    delay=1,
    decode_steps=1,
    block_size=4,
    memory={"prefix_caching": False, "windows": (None,), "preemption": "recompute", "host_blocks": 0},
)
def test_every_request_gets_its_tokens(requests, num_blocks, budget, delay, decode_steps, block_size, memory) -> None:
    """Whatever arrives, however small the pool and whatever it does about that: the tokens are those of the request alone."""
    num_blocks = max(num_blocks, 64 // block_size + 1) * len(memory["windows"])
    scheduler = make_scheduler(num_blocks, token_budget=budget, decode_steps=decode_steps, block_size=block_size, **memory)
    arrivals: dict[int, list[Request]] = {}
    made = []
    for i, (prompt, max_tokens, at, n, stop_ids, min_tokens) in enumerate(requests):
        request = make_request(f"r{i}", prompt, max_tokens, n=n, stop_ids=stop_ids, min_tokens=min(min_tokens, max_tokens))
        arrivals.setdefault(at, []).append(request)
        made.append(request)
    events = drive(scheduler, arrivals, delay)
    for request in made:
        for index in range(request.params.n):
            own = events[request.id, index]
            assert tokens_of(own) == expected(request, 64)
            assert [e.finish is not None for e in own] == [False] * (len(own) - 1) + [True]
            assert own[-1].usage.generated == len(tokens_of(own)) and own[-1].usage.prompt == len(request.prompt)
    assert scheduler.stats.worst_waste <= block_size - 1


SERVICE = st.builds(
    Service,
    tenant=st.sampled_from(["", "a", "b"]),
    priority=st.integers(-2, 2),
    pool=st.sampled_from(["interactive", "batch"]),
    expected_tokens=st.sampled_from([None, 3, 30]),
    retention=st.integers(0, 10),
)
RULES = st.builds(
    ServiceRules,
    policy=st.sampled_from(list(POLICIES)),
    options=st.builds(PolicyOptions, aging=st.sampled_from([0.5, 5.0, 100.0])),
    shares=st.builds(PoolShares, batch=st.sampled_from([0.1, 0.3, 0.6])),
    tenants=st.sampled_from([{}, {"a": TenantLimits(weight=2.0, max_rows=1)}, {"b": TenantLimits(max_blocks=40)}]),
    token_seconds=st.sampled_from([None, 0.01]),
)


@settings(max_examples=200, deadline=None)
@given(
    REQUESTS, st.lists(SERVICE, min_size=8, max_size=8), RULES, st.integers(0, 12), st.integers(5, 20), st.integers(0, 1), MEMORY
)
def test_everybody_is_served_whatever_the_rules(requests, services, rules, extra, budget, delay, memory) -> None:
    """Any policy, tenants, pools, priorities and retention: all requests end with their own tokens, and nothing is left behind."""
    now = [0.0]
    blocks = (17 + extra) * len(memory["windows"])
    scheduler = make_scheduler(blocks, token_budget=budget, service=rules, clock=lambda: now[0], **memory)
    arrivals: dict[int, list[Request]] = {}
    made = []
    for i, ((prompt, max_tokens, at, n, stop_ids, min_tokens), service) in enumerate(zip(requests, services, strict=False)):
        request = make_request(f"r{i}", prompt, max_tokens, n=n, stop_ids=stop_ids, min_tokens=min(min_tokens, max_tokens))
        arrivals.setdefault(at, []).append(replace(request, service=service))
        made.append(request)

    def tick(*_: object) -> None:
        now[0] += 0.1

    events = drive(scheduler, arrivals, delay, tick)
    for request in made:
        for index in range(request.params.n):
            assert tokens_of(events[request.id, index]) == expected(request, 64)
    assert scheduler.num_waiting == 0 and len(scheduler._runs.lanes) == 4
    assert {d.what for request in made for d in scheduler.trace.of(request.id)} >= {"queued", "admitted", "finished"}


def test_a_small_pool_preempts_and_counts_what_is_recomputed() -> None:
    scheduler = make_scheduler(num_blocks=17)
    requests = [make_request(f"r{i}", [i, 2, 3], 40) for i in range(4)]
    events = drive(scheduler, {0: requests}, delay=1)
    assert scheduler.stats.preemptions > 0
    assert sum(own[-1].usage.recomputed for own in events.values()) == scheduler.stats.recomputed_tokens > 0
    assert events["r0", 0][-1].usage.recomputed == 0, "the oldest request is never preempted"
    for request in requests:
        assert tokens_of(events[request.id, 0]) == expected(request, 64)


def test_hysteresis_keeps_preemptions_rare() -> None:
    """A preempted request waits until it fits with room for the others to grow: about one preemption for each that has to
    wait, not one for each block that the others take."""
    scheduler = make_scheduler(num_blocks=33, num_lanes=8, token_budget=32)
    drive(scheduler, {0: [make_request(f"r{i}", [i] * 4, 50) for i in range(8)]}, delay=1)
    assert 0 < scheduler.stats.preemptions <= 16


def test_a_sequence_never_waits_while_it_could_run() -> None:
    """With free lanes, blocks and budget a request joins the next step, and a finished one leaves at once."""
    scheduler = make_scheduler()
    joined = {}

    def note(step: int, plan: Plan | None) -> None:
        for row in plan.rows if plan else ():
            joined.setdefault(row.request_id, step)

    arrivals = {at: [make_request(f"r{at}", [1, 2], 5)] for at in (0, 3, 4, 9)}
    drive(scheduler, arrivals, delay=1, each_step=note)
    assert joined == {"r0": 0, "r3": 3, "r4": 4, "r9": 9}


def test_decodes_never_skip_a_step_for_lack_of_budget() -> None:
    scheduler = make_scheduler(num_blocks=200, token_budget=6, num_lanes=4)
    seen = {"short": []}

    def note(step: int, plan: Plan | None) -> None:
        if plan and any(row.request_id == "short" and row.start >= 2 for row in plan.rows):
            seen["short"].append(step)

    arrivals = {0: [make_request("short", [1, 2], 20)], 1: [make_request(f"long{i}", [i] * 40, 3) for i in range(3)]}
    drive(scheduler, arrivals, delay=0, each_step=note)
    assert seen["short"] == list(range(seen["short"][0], seen["short"][0] + 19))


def test_prefill_is_cut_to_the_budget_and_mixed_with_decode() -> None:
    scheduler = make_scheduler(token_budget=8)
    kinds = set()

    def note(_: int, plan: Plan | None) -> None:
        if plan:
            kinds.add((any(r.count == 1 for r in plan.rows), any(r.count > 1 for r in plan.rows)))

    drive(scheduler, {0: [make_request("a", [1], 20)], 2: [make_request("b", [5] * 30, 3)]}, delay=1, each_step=note)
    assert (True, True) in kinds


def test_first_come_first_served() -> None:
    """Nobody passes the head of the queue, even where a later one would fit."""
    scheduler = make_scheduler(num_blocks=17)
    order = []

    def note(_: int, plan: Plan | None) -> None:
        order.extend(e.request.id for e in plan.entries if plan) if plan else None

    sizes = {"a": 40, "big": 50, "small": 1}
    drive(scheduler, {0: [make_request(k, [1] * n, 8) for k, n in sizes.items()]}, delay=0, each_step=note)
    assert list(dict.fromkeys(order)) == ["a", "big", "small"]


def test_several_decode_steps_only_when_nothing_waits() -> None:
    scheduler = make_scheduler(num_lanes=1, decode_steps=8)
    steps = []
    arrivals = {0: [make_request("a", [1, 2], 12), make_request("b", [3], 20)]}
    drive(scheduler, arrivals, delay=1, each_step=lambda _, plan: steps.append(plan.steps if plan else 0))
    first = next(i for i, s in enumerate(steps) if s > 1)
    assert all(s <= 1 for s in steps[:first]) and max(steps) == 8


def test_cancel_frees_everything_and_late_results_are_dropped() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], 20, n=2))
    scheduler.add(make_request("b", [1, 2, 3], 20))
    device = Device(scheduler)
    plan = scheduler.schedule()
    results = device.run(plan)
    events = scheduler.cancel("a")
    assert [(e.index, e.finish) for e in events] == [(0, "cancelled"), (1, "cancelled")]
    assert {e.request_id for e in scheduler.commit(plan, results)} == {"b"}, "b passes a sample that waits for a step"
    scheduler.check()
    assert scheduler.cancel("a") == []
    scheduler.cancel("b")
    assert not scheduler.has_work() and scheduler.pool.num_free == scheduler.pool.capacity


def test_finish_cuts_the_output() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], 20))
    device = Device(scheduler)
    for _ in range(5):
        plan = scheduler.schedule()
        scheduler.commit(plan, device.run(plan))
    usage = scheduler.finish("a", 0, 3)
    assert usage.generated == 3 and not scheduler.has_work()
    assert scheduler.finish("a", 0, 3) is None


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request("x", [], 5), "must hold at least one token; got 0"),
        (make_request("x", [1] * 64, 5), "shorter than max_model_len 64; got 64 tokens"),
        (make_request("x", [1] * 30, 30), "need 15 blocks of 4 tokens; the pool has 9"),
    ],
)
def test_what_can_never_fit_is_refused(request_: Request, message: str) -> None:
    scheduler = make_scheduler(num_blocks=10)
    with pytest.raises(UserError, match=message):
        scheduler.add(request_)
    assert not scheduler.has_work()


def test_the_queue_is_bounded() -> None:
    scheduler = make_scheduler(max_queued=2)
    scheduler.add(make_request("a", [1], 5, n=2))
    with pytest.raises(QueueFull, match="the queue may hold 2 sequences; 2 wait, 1 more came"):
        scheduler.add(make_request("b", [1], 5))


def test_an_id_cannot_be_used_twice_at_once() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], 5))
    with pytest.raises(UserError, match="request id a is already in use"):
        scheduler.add(make_request("a", [1], 5))


def test_an_id_is_taken_while_any_of_its_samples_lives() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1], 5, n=3))
    scheduler.finish("a", 0, 0)
    scheduler.finish("a", 2, 0)
    with pytest.raises(UserError, match="request id a is already in use"):
        scheduler.add(make_request("a", [1], 5))
    scheduler.finish("a", 1, 0)
    assert not scheduler.has_work()
    scheduler.add(make_request("a", [1], 5))
    scheduler.cancel("a")
    scheduler.add(make_request("a", [1], 5))


def test_results_of_a_dead_request_are_not_those_of_a_new_one_with_its_id() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", [1, 2, 3], 20))
    plan = scheduler.schedule()
    assert plan is not None
    results = Device(scheduler).run(plan)
    scheduler.cancel("a")
    again = make_request("a", [7, 8, 9], 5)
    scheduler.add(again)
    fresh = scheduler.schedule()
    assert fresh is not None and fresh.rows[0].epoch != plan.rows[0].epoch
    assert scheduler.commit(plan, results) == []
    (event,) = scheduler.commit(fresh, Device(scheduler).run(fresh))
    assert list(event.tokens) == expected(again, 64)[:1]


def test_epochs_are_those_of_one_life() -> None:
    """Over preemptions, too: (id, index, epoch) names the same prompt and one life of it."""
    scheduler = make_scheduler(num_blocks=17)
    lives: dict[int, tuple[str, int]] = {}

    def note(_: int, plan: Plan | None) -> None:
        for row in plan.rows if plan else ():
            assert lives.setdefault(row.epoch, (row.request_id, row.index)) == (row.request_id, row.index)

    drive(scheduler, {0: [make_request(f"r{i}", [i, 2, 3], 40) for i in range(4)]}, delay=1, each_step=note)
    assert len(lives) == 4 + scheduler.stats.preemptions > 4


@pytest.mark.parametrize(("prompt", "generated"), [(3, 18), (20, 1)])
def test_without_max_tokens_the_pool_is_the_limit(prompt: int, generated: int) -> None:
    """Five blocks of four tokens, and a last token that is never written."""
    scheduler = make_scheduler(num_blocks=6)
    request = Request("a", (1,) * prompt, SamplingParams(max_tokens=None))
    own = drive(scheduler, {0: [request]}, delay=1)["a", 0]
    assert len(tokens_of(own)) == generated and own[-1].finish == "length"


def test_without_max_tokens_the_prompt_must_fit() -> None:
    scheduler = make_scheduler(num_blocks=6)
    with pytest.raises(UserError, match="prompt and output need 6 blocks of 4 tokens; the pool has 5"):
        scheduler.add(Request("a", (1,) * 21, SamplingParams(max_tokens=None)))


@pytest.mark.parametrize(("max_tokens", "joined"), [(3, ["a", "b"]), (5, ["a"])])
def test_no_block_is_kept_for_one_that_will_not_grow(max_tokens: int, joined: list[str]) -> None:
    """Three blocks of four: `a` holds two. With 5 + 3 tokens it never needs another, with 5 + 5 it will."""
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("a", [1] * 5, max_tokens))
    scheduler.add(make_request("b", [1] * 4, 1))
    plan = scheduler.schedule()
    assert plan is not None and sorted(row.request_id for row in plan.rows) == joined


@pytest.mark.parametrize(("rows", "ratio"), [(8, 1.77), (32, 1.93)])
def test_orcas_count(rows: int, ratio: float) -> None:
    """Iterations of request-level batching over those of iteration-level scheduling, output lengths uniform in 1..128, the
    backlog kept full. Request-level: a batch takes as long as its longest. Formula: E[max of b] / E[length]."""
    rng = random.Random(rows)
    count = 400 * rows
    lengths = [rng.randint(1, 128) for _ in range(count)]
    request_level = sum(max(lengths[i : i + rows]) for i in range(0, count, rows))
    scheduler = Scheduler(
        BlockPool(1 + rows * 33), block_size=4, max_model_len=132, num_lanes=rows, token_budget=64, max_queued=count, decode_steps=1
    )
    for i, length in enumerate(lengths):
        scheduler.add(make_request(f"r{i}", [1], length))
    iterations = full = 0
    while scheduler.has_work():
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, [RowResult((5,)) for _ in plan.rows])
        iterations += 1
        full += len(plan.rows) == rows
    assert full > 0.97 * iterations
    assert request_level / iterations == pytest.approx(ratio, rel=0.02)
