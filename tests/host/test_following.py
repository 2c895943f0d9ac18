"""Whoever shares a prompt that is still being computed waits for it, whatever stands between the two: nothing is computed twice."""

from dataclasses import replace

import pytest
from fake_device import drive, expected, make_request, make_scheduler, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.host import running as running_module
from pagedjax.host.entrance import ServiceRules
from pagedjax.host.plan import Plan
from pagedjax.host.policy import PolicyOptions
from pagedjax.host.request import Request, Service
from pagedjax.host.scheduler import Scheduler

P = 4
RULES = ServiceRules("priority", PolicyOptions(aging=1e6))
HEAVY, LIGHT = Service(tenant="heavy"), Service(tenant="light")
BATCH, CHAT = Service(pool="batch"), Service()
LATER, URGENT = Service(priority=5), Service(priority=0)
SERVICES = st.builds(
    Service, tenant=st.sampled_from(["", "a", "b"]), pool=st.sampled_from(["interactive", "batch"]), priority=st.integers(0, 2)
)


def computed(scheduler: Scheduler, arrivals: dict[int, list[Request]], delay: int) -> int:
    """Tokens of prompts that are computed; every request gets its own tokens."""
    made = {request.id: request for requests in arrivals.values() for request in requests}
    tokens = 0

    def each_step(_: int, plan: Plan | None) -> None:
        nonlocal tokens
        for row in plan.rows if plan else ():
            tokens += max(0, min(row.start + row.count, len(made[row.request_id].prompt)) - row.start)

    events = drive(scheduler, arrivals, delay, each_step)
    for request in made.values():
        assert tokens_of(events[request.id, 0]) == expected(request, scheduler.max_model_len)
    return tokens


def request(name: str, prefix: int, own: list[int], service: Service, max_tokens: int = 3) -> Request:
    return replace(make_request(name, [*range(prefix), *own], max_tokens), service=service)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 45),
    st.integers(1, 6),
    st.lists(st.tuples(SERVICES, st.integers(0, 12)), min_size=2, max_size=6),
    st.integers(9, 24),
    st.integers(0, 1),
    st.sampled_from([(None,), (9,), (None, 9)]),
)
def test_nothing_is_computed_twice(prefix: int, suffix: int, others, budget: int, delay: int, windows) -> None:
    """(p + s) + (N - 1)(s + p mod P) for any pools, tenants, urgencies and times of arrival, in a pool where nothing is given out
    twice."""
    scheduler = make_scheduler(400, num_lanes=8, token_budget=budget, service=RULES, windows=windows)
    arrivals: dict[int, list[Request]] = {}
    for i, (service, at) in enumerate(others):
        arrivals.setdefault(at, []).append(request(f"r{i}", prefix, [50 + i] * suffix, service))
    wanted = (prefix + suffix) + (len(others) - 1) * (suffix + prefix % P)
    assert computed(scheduler, arrivals, delay) == wanted


@pytest.mark.parametrize(("first", "second"), [(HEAVY, LIGHT), (BATCH, CHAT), (LATER, URGENT)])
def test_the_turn_of_who_waits_is_the_leaders(first: Service, second: Service) -> None:
    """Steps of 16 tokens, of 40 that the two share 8 are there. The second one comes one step after the first, goes before it by
    the rules, and has its first token as early as if it computed what is left itself; the first one's tail comes after that."""
    scheduler = make_scheduler(100, service=RULES)
    rows: list[dict[str, tuple[int, int]]] = []
    made = [request("a", 40, [60] * 20, first), request("b", 40, [61], second)]

    def each_step(_: int, plan: Plan | None) -> None:
        rows.append({row.request_id: (row.start, row.count) for row in plan.rows} if plan else {})

    drive(scheduler, {0: [make_request("c", [*range(8)], 1)], 2: made[:1], 3: made[1:]}, 0, each_step)
    shared = next(i for i, row in enumerate(rows) if row.get("b", (0, 0))[0] == 40)
    assert shared == 4 and rows[2:4] == [{"a": (8, 16)}, {"a": (24, 16)}]
    assert rows[4] == {"b": (40, 1), "a": (40, 15)}


def test_without_waiting_it_is_computed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    arrivals = {0: [request("a", 40, [60], BATCH)], 1: [request("b", 40, [61], CHAT)]}
    assert computed(make_scheduler(100), arrivals, 1) == 41 + 1
    monkeypatch.setattr(running_module, "lead_of", lambda *_: None)
    monkeypatch.setattr(running_module, "computed_by_others", lambda *_: None)
    assert computed(make_scheduler(100), arrivals, 1) > 41 + 20


def test_a_leader_that_goes_leaves_what_it_computed() -> None:
    scheduler = make_scheduler(100)
    rows: list[dict[str, tuple[int, int]]] = []

    def each_step(step: int, plan: Plan | None) -> None:
        rows.append({row.request_id: (row.start, row.count) for row in plan.rows} if plan else {})
        if step == 1:
            scheduler.cancel("a")

    made = [request("a", 60, [], HEAVY, 2), request("b", 60, [61], LIGHT, 2)]
    events = drive(scheduler, {0: made[:1], 1: made[1:]}, 1, each_step)
    assert [row.get("b") for row in rows[:4]] == [None, None, (32, 16), (48, 13)]
    assert tokens_of(events["b", 0]) == expected(made[1], 64)


@pytest.mark.parametrize("later", [1, 4])
def test_nobody_waits_for_a_leader_that_finds_no_blocks(later: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where its tenant has what it may hold: it stands still at its 21st token. Who shares its prompt goes on by itself,
    and helps it over that place."""
    prefill, stands = running_module.Running.prefill, [True]

    def stuck(self, sequence, step, until=None) -> bool:
        if stands[0] and sequence.request.id == "a":
            until = min(until or 20, 20)
            return sequence.num_scheduled < until and prefill(self, sequence, step, until)
        return prefill(self, sequence, step, until)

    monkeypatch.setattr(running_module.Running, "prefill", stuck)
    made = [request("a", 40, [60], HEAVY), request("b", 40, [61], LIGHT)]
    ends: dict[str, int] = {}

    def each_step(step: int, plan: Plan | None) -> None:
        stands[0] = step < 30
        for row in plan.rows if plan else ():
            if row.steps:
                ends.setdefault(row.request_id, step)

    events = drive(make_scheduler(100), {0: made[:1], later: made[1:]}, 0, each_step)
    assert ends["b"] <= later + 3 and ends["a"] <= later + 6
    assert all(tokens_of(events[r.id, 0]) == expected(r, 64) for r in made)


def test_what_others_computed_meanwhile_is_taken_over() -> None:
    """Two sequences of one prompt that run already, since their blocks were not in the cache when they entered: one goes on, the
    other takes over its blocks, pays for them as for cached ones, and says so."""
    scheduler = make_scheduler(100, token_budget=16, service=RULES)
    made = [request("a", 50, [60], HEAVY), request("b", 50, [61], LIGHT)]
    for own in made:
        scheduler.add(own)
    own = {s.request.id: s for s in scheduler.sequences()}
    first = scheduler.schedule()
    assert first is not None and [row.request_id for row in first.rows] == ["a"]
    b = own["b"]
    scheduler.entrance.queue.remove(b)
    running_module.Running.enter(scheduler._runs, b, scheduler.tables.find(b, 8), running_module.Step(0.0, 16))
    assert b.num_scheduled == 8 and len(scheduler.running) == 2
    plans = [scheduler.schedule() for _ in range(2)]  # by turns, as each pays for what it computes
    assert [[(row.request_id, row.start, row.count) for row in plan.rows] for plan in plans if plan] == [
        *([("b", 16, 16)], [("a", 32, 16)]),
    ]
    assert [own[name].cached for name in "ab"] == [16, 16] and own["a"].blocks[0][4:8] == b.blocks[0][4:]
    scheduler.check()
    tenants = scheduler.entrance.tenants
    assert tenants.counter("interactive", "light") == pytest.approx(16 * tenants.costs.cached + 16)
    assert tenants.counter("interactive", "heavy") == pytest.approx(16 * tenants.costs.cached + 32)
    assert [(d.what, d.why) for d in scheduler.trace.of("b")][-2:-1] == [("found", {"start": 8, "tokens": 8})]
