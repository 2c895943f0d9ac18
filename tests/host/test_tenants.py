"""Fairness among tenants in a small simulation, against a recount of the service; ceilings, caps and refunds."""

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued import Queued, queued

from pagedjax.errors import UserError
from pagedjax.host import tenants as tenants_module
from pagedjax.host.pools import Held
from pagedjax.host.tenants import TenantLimits, Tenants, TokenCosts, fairness_bound
from pagedjax.host.waiting import WaitingQueue

COSTS = TokenCosts(input=1.0, cached=0.25, output=2.0)
POOL = 60  # slots
ONE = Held(1, 0)
LENGTHS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 15)), min_size=1, max_size=40)  # prompt, output
Served = list[dict[str, float]]


def held_by(running: list[Queued]) -> dict[str, Held]:
    names = [s.request.service.tenant for s in running]
    return {name: Held(names.count(name), 0) for name in names}


def serve(sequences: list[Queued], owner: Callable[[Queued], str], preempt: random.Random | None = None) -> Served:
    """Serves while each owner has something waiting: enters what fits with all it may become, then a token for each that runs, and
    now and then the newest goes back to the queue. The service of each owner, recounted after every event."""
    queue = WaitingQueue(tenants=Tenants(costs=COSTS))
    for sequence in sequences:
        queue.push(sequence, 0.0)
    owners = {owner(s) for s in sequences}
    service = dict.fromkeys(owners, 0.0)
    history, running, started = [dict(service)], [], set()
    now = 0.0
    while {owner(s) for s in queue} == owners:
        now += 1
        head = queue.head("interactive", now, held_by(running))
        while head is not None and sum(s.max_len for s in running) + head.max_len <= POOL:
            queue.remove(head)
            admit(queue.tenants, head.key, head.request.service.tenant, head.prompt_len, now=now)
            running.append(head)
            if head.order not in started:
                started.add(head.order)
                service[owner(head)] += COSTS.input * head.prompt_len
                history.append(dict(service))
            if {owner(s) for s in queue} != owners:
                return history
            head = queue.head("interactive", now, held_by(running))
        for sequence in list(running):
            sequence.tokens.append(1)
            queue.tenants.generated(sequence.key, 1, now)
            service[owner(sequence)] += COSTS.output
            history.append(dict(service))
            if len(sequence.tokens) == sequence.max_len:
                running.remove(sequence)
                queue.tenants.left(sequence.key, now)
        if preempt and running and preempt.random() < 0.3:
            queue.push(running.pop(), now)
    return history


def widest(history: Served) -> float:
    """The largest difference of the services of tenants f and g over any time."""
    gaps = [service["f"] - service["g"] for service in history]
    return max(gaps) - min(gaps)


def work(f: list[tuple[int, int]], g: list[tuple[int, int]], *, tenant: bool = True) -> list[Queued]:
    """All of f, then all of g; owners by the sign of priority where they are not named to the queue."""
    owners = ["f"] * len(f) + ["g"] * len(g)
    return [
        queued(i, arrival=0.0, prompt=prompt, max_tokens=output, tenant=owner if tenant else "", priority="fg".index(owner))
        for i, (owner, (prompt, output)) in enumerate(zip(owners, f + g, strict=True))
    ]


def owner(sequence: Queued) -> str:
    return "fg"[sequence.request.service.priority]


@given(LENGTHS, LENGTHS, st.none() | st.randoms(use_true_random=False))
def test_the_gap_of_backlogged_tenants_is_bounded_at_every_instant(f: list, g: list, preempt: random.Random | None) -> None:
    history = serve(work(f, g), owner, preempt)
    longest = max(prompt for prompt, _ in f + g)
    assert widest(history) <= fairness_bound(COSTS, longest, POOL)


def test_first_come_breaks_the_bound() -> None:
    f, g = [(30, 15)] * 40, [(2, 2)] * 5
    bound = fairness_bound(COSTS, 30, POOL)
    assert widest(serve(work(f, g, tenant=False), owner)) > 3 * bound
    assert widest(serve(work(f, g), owner)) <= bound


def test_without_the_charge_for_output_the_bound_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    f, g = [(1, 29)] * 400, [(29, 1)] * 400
    bound = fairness_bound(COSTS, 29, POOL)
    assert widest(serve(work(f, g), owner)) <= bound
    monkeypatch.setattr(Tenants, "generated", lambda self, key, tokens, now: None)
    assert widest(serve(work(f, g), owner)) > 3 * bound


def counters(tenants: Tenants, *names: str) -> list[float]:
    return [tenants.counter("interactive", name) for name in names]


def admit(tenants: Tenants, key: object, tenant: str, prompt: int, *, cached: int = 0, now: float = 0.0) -> None:
    """And computes all of its prompt."""
    tenants.admitted(key, "interactive", tenant, prompt=prompt, cached=cached, now=now)
    tenants.computed(key, prompt, now)


def test_service_is_counted_by_cost_and_weight() -> None:
    tenants = Tenants({"heavy": TenantLimits(weight=2)}, costs=COSTS)
    admit(tenants, 1, "heavy", 100, cached=60)
    assert counters(tenants, "heavy") == [(40 + 60 * 0.25) / 2]
    tenants.generated(1, 3, 0.0)
    assert counters(tenants, "heavy") == [(40 + 15 + 6) / 2]
    assert tenants.counter("batch", "heavy") == 0  # pools are counted apart


def test_by_weight() -> None:
    """While both wait, a tenant of weight 3 gets three times as much."""
    queue = WaitingQueue(tenants=Tenants({"f": TenantLimits(weight=3)}, costs=COSTS))
    for sequence in work([(10, 5)] * 60, [(10, 5)] * 60):
        queue.push(sequence, 0.0)
    entered = {"f": 0, "g": 0}
    for _ in range(60):
        head = queue.head("interactive", 0.0, {})
        assert head is not None
        queue.remove(head)
        entered[owner(head)] += 1
        admit(queue.tenants, head.key, head.request.service.tenant, 10)
    assert entered == {"f": 45, "g": 15}


def test_a_prompt_is_charged_as_it_is_computed_and_once_in_all_lives() -> None:
    tenants = Tenants(costs=COSTS)
    tenants.admitted("s", "interactive", "a", prompt=100, cached=20, now=0.0)
    assert counters(tenants, "a") == [20 * 0.25]
    for end in (50, 100, 104):  # the last one with tokens that were generated before a preemption
        tenants.computed("s", end, 0.0)
        assert counters(tenants, "a") == [min(end, 100) - 20 + 5]
    admit(tenants, "s", "a", 100)  # again, after a preemption
    assert counters(tenants, "a") == [80 + 5]
    tenants.left("s", 0.0)
    tenants.computed("never admitted", 10, 0.0)
    tenants.left("never admitted", 0.0)
    assert counters(tenants, "a") == [85]


def test_who_comes_back_is_lifted_to_what_the_others_got_so_far() -> None:
    """Not to what the other one will have got when its enormous prompt is done: that would be a wait for all of it."""
    tenants = Tenants(costs=COSTS)
    tenants.admitted("long", "interactive", "heavy", prompt=10_000, cached=0, now=0.0)
    tenants.computed("long", 512, 0.0)
    tenants.arrived("interactive", "light", ["heavy"], 0.0)
    tenants.computed("long", 1024, 0.0)
    assert counters(tenants, "light", "heavy") == [512, 1024]


def test_the_idle_save_up_no_credit() -> None:
    tenants = Tenants(costs=COSTS)
    tenants.arrived("interactive", "busy", [], 0.0)
    for key in range(10):
        admit(tenants, key, "busy", 100)
    tenants.arrived("interactive", "other", ["busy"], 0.0)
    assert counters(tenants, "other") == counters(tenants, "busy") == [1000]
    admit(tenants, "o", "other", 500)
    tenants.arrived("interactive", "idle", ["busy", "other"], 0.0)
    assert counters(tenants, "idle") == [1000]  # the smallest of those that wait
    tenants.arrived("interactive", "other", ["busy"], 0.0)
    assert counters(tenants, "other") == [1500]  # never lowered
    tenants.arrived("interactive", "alone", [], 0.0)
    assert counters(tenants, "alone") == [1500]  # as who was served last


def test_what_a_cap_held_back_is_not_caught_up_on() -> None:
    queue = WaitingQueue(tenants=Tenants({"f": TenantLimits(max_rows=1)}, costs=COSTS))
    for sequence in work([(10, 5)] * 3, [(10, 5)] * 30):
        queue.push(sequence, 0.0)
    busy = {"f": Held(1, 0)}
    for _ in range(20):  # work-conserving: f waits for its own cap only
        head = queue.head("interactive", 0.0, busy)
        assert head is not None and owner(head) == "g"
        assert queue.held_back["interactive"] == {"f": "tenant 'f' may run 1 rows; it runs 1 and needs 1 more"}
        queue.remove(head)
        admit(queue.tenants, head.key, "g", 10)
    f, g = counters(queue.tenants, "f", "g")
    assert 0 < g - f <= 10


# --- ceilings and caps --------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(0.01, 30), st.integers(1, 200), st.integers(0, 50)), max_size=40))
def test_tokens_per_minute_are_a_ceiling_over_any_time(tries: list[tuple[float, int, int]]) -> None:
    tenants = Tenants({"a": TenantLimits(tokens_per_minute=600)})
    now, spent = 0.0, []
    for i, (gap, prompt, output) in enumerate(tries):
        now += gap
        if tenants.may_start("a", now, Held(), ONE) is None:
            assert tenants.seconds_over("a", now) == 0
            admit(tenants, i, "a", prompt, now=now)
            tenants.generated(i, output, now)
            spent.append((now, prompt + output))
        else:
            later = now + tenants.seconds_over("a", now) + 1e-6
            assert later > now and tenants.may_start("a", later, Held(), ONE) is None
    most = max([tokens for _, tokens in spent], default=0)
    for i, (start, _) in enumerate(spent):
        for j in range(i, len(spent)):
            used = sum(tokens for _, tokens in spent[i : j + 1])
            assert used <= 600 + 10 * (spent[j][0] - start) + most


def test_cached_tokens_do_not_count_against_the_ceiling_and_unused_ones_are_given_back() -> None:
    tenants = Tenants({"a": TenantLimits(tokens_per_minute=60)})
    admit(tenants, 1, "a", 1000, cached=950)
    assert tenants.may_start("a", 0.0, Held(), ONE) is None
    tenants.admitted(2, "interactive", "a", prompt=100, cached=0, now=0.0)
    tenants.computed(2, 10, 0.0)
    assert tenants.may_start("a", 0.0, Held(), ONE) == "tenant 'a' has used its 60 tokens per minute; it may start in 91.0 s"
    tenants.left(2, 0.0)
    assert tenants.seconds_over("a", 0.0) == 1.0


def test_caps() -> None:
    tenants = Tenants(default=TenantLimits(max_rows=2, max_blocks=10))
    assert tenants.may_start("a", 0.0, Held(1, 6), Held(1, 4)) is None
    assert tenants.may_start("a", 0.0, Held(1, 6), Held(1, 5)) == "tenant 'a' may hold 10 blocks; it has 6 and needs 5 more"
    assert tenants.may_start("a", 0.0, Held(2, 0), ONE) == "tenant 'a' may run 2 rows; it runs 2 and needs 1 more"
    assert tenants.may_start("a", 0.0, Held(1, 0), Held(2, 0)) is not None  # two beams


def test_made_up_names_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenants_module, "FORGET_AT", 20)
    tenants = Tenants(default=TenantLimits(tokens_per_minute=600), costs=COSTS)
    admit(tenants, "debtor", "debtor", 10**6)
    tenants.left("debtor", 0.0)
    for i in range(500):
        tenants.arrived("interactive", f"name {i}", ["steady"], float(i))
        admit(tenants, i, f"name {i}", 10, now=float(i))
        tenants.left(i, float(i))
        admit(tenants, f"steady {i}", "steady", 10, now=float(i))
        tenants.left(f"steady {i}", float(i))
    assert len(tenants._counters) + len(tenants._levels) < 100
    assert counters(tenants, "debtor") == [10**6]  # what it owes is kept


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TenantLimits(weight=0), "weight must be positive, and finite; got 0"),
        (lambda: TenantLimits(tokens_per_minute=0), "tokens_per_minute must be at least 1; got 0"),
        (lambda: TenantLimits(max_rows=0), "max_rows must be at least 1; got 0"),
        (lambda: TenantLimits(max_blocks=-1), "max_blocks must be at least 1; got -1"),
        (lambda: TokenCosts(input=3.0), "must rise from cached to input to output; got 0.1, 3.0 and 2.0"),
        (lambda: TokenCosts(0.0, 0.0, 0.0), "must be positive, and finite; got 0.0"),
    ],
)
def test_limits_are_checked(make: Callable, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
