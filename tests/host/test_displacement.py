"""Who leaves for whom, through the scheduler: nobody waits for what is less urgent, whatever is full, and batch work keeps what it
owns."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fake_device import Device, drive, expected, make_request, make_scheduler, tokens_of

from pagedjax.errors import QueueFull
from pagedjax.host.admission import MARGIN
from pagedjax.host.entrance import ServiceRules
from pagedjax.host.plan import Plan
from pagedjax.host.policy import PolicyOptions
from pagedjax.host.request import Request, Service
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.tenants import TenantLimits

NEVER = PolicyOptions(aging=1e6)


def served(name: str, prompt: int, max_tokens: int, **service: Any) -> Request:
    tokens = [(7 * i + prompt + sum(map(ord, name))) % 97 for i in range(prompt)]
    return replace(make_request(name, tokens, max_tokens), service=Service(**service))


def run(
    scheduler: Scheduler, arrivals: dict[int, list[Request]], look: Callable[[Plan], None] = lambda plan: None, delay: int = 0
) -> dict[str, int]:
    """The step in which each request first has a row; every request gets its own tokens."""
    first: dict[str, int] = {}

    def each_step(step: int, plan: Plan | None) -> None:
        for row in plan.rows if plan else ():
            first.setdefault(row.request_id, step)
        if plan is not None:
            look(plan)

    events = drive(scheduler, arrivals, delay, each_step)
    for request in (request for requests in arrivals.values() for request in requests):
        assert tokens_of(events[request.id, 0]) == expected(request, scheduler.max_model_len)
    return first


def preempted(scheduler: Scheduler, *names: str) -> list[int]:
    return [sum(d.what == "preempted" for d in scheduler.trace.of(name)) for name in names]


@pytest.mark.parametrize(
    ("limits", "low", "prompt"),
    [({"max_rows": 2}, 2, 4), ({"max_blocks": 16}, 1, 44), ({"tokens_per_minute": 10**6}, 4, 4)],
    ids=str,
)
def test_no_inversion_at_the_caps_of_a_tenant(limits: dict[str, int], low: int, prompt: int) -> None:
    """Urgent work of the tenant takes the place of its own that is not, also where others of its tenant fill its caps."""
    rules = ServiceRules("priority", NEVER, tenants={"t": TenantLimits(**limits)})
    scheduler = make_scheduler(100, service=rules)
    lows = [served(f"low{i}", prompt, 16, tenant="t", priority=5) for i in range(low)]
    first = run(scheduler, {0: [*lows, served("other", 4, 30)], 3: [served("urgent", 20, 4, tenant="t", priority=0)]})
    assert first["urgent"] == 3
    assert sum(preempted(scheduler, *(r.id for r in lows))) >= 1 and preempted(scheduler, "other", "urgent") == [0, 0]


def test_a_cap_that_nobody_less_urgent_fills_is_waited_for() -> None:
    rules = ServiceRules("priority", NEVER, tenants={"t": TenantLimits(max_rows=1)})
    scheduler = make_scheduler(100, service=rules)
    made = [served("same", 4, 20, tenant="t", priority=3), served("later", 4, 4, tenant="t", priority=3)]
    first = run(scheduler, {0: made[:1], 2: made[1:], 3: [served("other", 4, 9, priority=9)]})
    assert first["later"] >= 20 and first["other"] == 3 and scheduler.stats.preemptions == 0


def test_no_inversion_at_the_share_of_a_pool() -> None:
    """Batch work waits, so interactive work may have 3 of 4 lanes; it has them, and something urgent comes."""
    scheduler = make_scheduler(100, service=ServiceRules("priority", NEVER))
    lows = [served(f"low{i}", 4, 40, priority=5) for i in range(3)]
    batch = [served(f"batch{i}", 4, 40, pool="batch") for i in range(2)]
    first = run(scheduler, {0: lows + batch, 3: [served("urgent", 4, 4, priority=0)]})
    assert first["urgent"] == 3 and preempted(scheduler, "low0", "low1", "batch0", "urgent") == [0, 0, 0, 0]
    assert preempted(scheduler, "low2") == [1]


@pytest.mark.parametrize("policy", ["first_come", "priority"])
@pytest.mark.parametrize("blocks", [18, 19, 20, 23])
def test_where_blocks_are_short_the_last_by_the_policy_leaves(policy: str, blocks: int) -> None:
    """Also where it was admitted before others, and all others have their rows when somebody needs a block."""
    scheduler = make_scheduler(blocks, service=ServiceRules(policy, NEVER))
    made = [served(name, 4 + i, 40, priority=3 * i % 4) for i, name in enumerate("abcd")]
    before: dict[str, int] = {}

    def look(plan: Plan) -> None:
        for r in made:
            (times,) = preempted(scheduler, r.id)
            if times > before.get(r.id, 0):
                mine, *others = [
                    (q.service.priority if policy == "priority" else 0, made.index(q))
                    for q in (r, *(s.request for s in scheduler.running if s.request is not r))
                ]
                assert all(other < mine for other in others)
            before[r.id] = times

    run(scheduler, {3 * i: [request] for i, request in enumerate(made)}, look, delay=1)
    assert scheduler.stats.preemptions > 0


@pytest.mark.parametrize(("prompt", "gone"), [(34, 3), (54, 0)])
def test_batch_work_keeps_what_it_owns(prompt: int, gone: int) -> None:
    """It has all of 16 blocks, 4 for each of 4 requests, and owns 4. Interactive work that needs 10 gets 12 of them; for what needs
    14 nobody leaves, as that would not be enough without what batch work owns."""
    scheduler = make_scheduler(17, token_budget=60)
    batch = [served(f"b{i}", 13, 4, pool="batch") for i in range(4)]
    run(scheduler, {0: batch, 1: [served("large", prompt, 2)]})
    assert scheduler.stats.preemptions == gone


@pytest.mark.parametrize(("pool", "taken"), [("batch", True), ("interactive", False)])
def test_who_would_leave_is_nobody_to_wait_for(pool: str, taken: bool) -> None:
    """All lanes are taken for 40 steps of 0.1 s, and a first token is due in 1 s: a request is refused, with the time to come back,
    unless who runs is batch work beyond its own, which would leave at once."""
    scheduler = make_scheduler(100, service=ServiceRules(max_first_token=1.0))
    for i in range(4):
        scheduler.add(served(f"r{i}", 4, 40, pool=pool))
    device = Device(scheduler)
    for _ in range(10):
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, device.run(plan), 0.1)
    if taken:
        scheduler.add(served("new", 4, 4))
        plan = scheduler.schedule()
        assert plan is not None and "new" in {row.request_id for row in plan.rows}
    else:
        with pytest.raises(QueueFull, match="the first token may take 1 s; 3.* s are predicted") as refused:
            scheduler.add(served("new", 4, 4))
        assert refused.value.retry_after == pytest.approx(MARGIN * 30 * 0.1 - 1, abs=0.5)


def test_a_tenant_beyond_its_ceiling_is_refused_where_a_first_token_is_due() -> None:
    rules = ServiceRules(max_first_token=1.0, tenants={"t": TenantLimits(tokens_per_minute=60)})
    now = [0.0]
    scheduler = make_scheduler(100, service=rules, clock=lambda: now[0])
    for tokens in (8, 10, 12) * 5:
        scheduler.entrance.rates.observe(tokens, 1, 0.1)
    run(scheduler, {0: [served("first", 60, 3, tenant="t")]})
    with pytest.raises(QueueFull, match="the first token may take 1 s; 4.* s are predicted") as refused:
        scheduler.add(served("more", 9, 3, tenant="t"))
    now[0] += refused.value.retry_after + 1e-6
    scheduler.add(served("more", 9, 3, tenant="t"))
