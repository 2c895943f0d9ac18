"""The waiting queue against a sorted list, and what it foresees."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued import Queued, queued

from pagedjax.errors import UserError
from pagedjax.host import waiting as waiting_module
from pagedjax.host.policy import POLICIES, PolicyOptions, rank
from pagedjax.host.pools import Held
from pagedjax.host.tenants import TenantLimits, Tenants
from pagedjax.host.waiting import Ahead, WaitingQueue

OPTIONS = PolicyOptions(aging=5.0, level_tokens=10)


@st.composite
def sequences(draw: st.DrawFn) -> list[Queued]:
    return [
        queued(
            i,
            prompt=draw(st.integers(1, 50)),
            max_tokens=draw(st.integers(1, 20)),
            priority=draw(st.integers(-2, 2)),
            pool=draw(st.sampled_from(["interactive", "batch"])),
            deadline=draw(st.none() | st.floats(1, 100)),
        )
        for i in range(draw(st.integers(1, 12)))
    ]


@given(sequences(), st.sampled_from(sorted(POLICIES)), st.randoms(use_true_random=False))
def test_the_head_is_first_by_the_policy_whatever_came_and_went(all_: list[Queued], policy: str, random) -> None:
    queue: WaitingQueue[Queued] = WaitingQueue(
        policy, OPTIONS, cached=lambda s: s.order * 7 % 5, seconds=lambda prompt, output: prompt + 2.0 * output
    )
    inside: list[Queued] = []
    for now in range(60):
        outside = [s for s in all_ if s not in inside]
        if outside and random.random() < 0.6:
            sequence = random.choice(outside)
            if random.random() < 0.5:
                sequence.tokens.append(1)  # as after a preemption
            queue.push(sequence, now)
            inside.append(sequence)
        elif inside:
            sequence = random.choice(inside)
            queue.remove(sequence)
            inside.remove(sequence)
        assert len(queue) == len(inside) and {s.order for s in queue} == {s.order for s in inside}
        assert all((s in queue) == (s in inside) for s in all_)
        for pool in ("interactive", "batch"):
            mine = [s for s in inside if s.request.service.pool == pool]
            assert queue.head(pool, now, {}) is min(mine, key=lambda s: rank(queue.view(s), policy, OPTIONS), default=None)
            assert queue.count(pool) == len(mine)
            assert queue.tokens(pool) == sum(queue.view(s).prompt_left for s in mine)


def test_a_preempted_sequence_keeps_its_place() -> None:
    queue: WaitingQueue[Queued] = WaitingQueue()
    first, second, third = (queued(i) for i in range(3))
    for sequence in (first, second, third):
        queue.push(sequence, 0.0)
    queue.remove(first)
    queue.push(first, 9.0)
    assert queue.head("interactive", 9.0, {}) is first


def test_keys_follow_the_cache_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "WINDOW", 2)
    found = dict.fromkeys(range(6), 0)
    queue: WaitingQueue[Queued] = WaitingQueue("longest_prefix", cached=lambda s: found[s.order])
    all_ = [queued(i, arrival=0.0, prompt=50) for i in range(6)]
    for sequence in all_:
        queue.push(sequence, 0.0)
    assert queue.head("interactive", 0.0, {}) is all_[0]
    found[5] = 40
    assert queue.head("interactive", 0.1, {}) is all_[0]  # looked at a moment ago
    heads = [queue.head("interactive", float(now), {}) for now in (1, 2)]  # two at a time, in turn
    assert heads == [all_[0], all_[5]]
    assert queue.tokens("interactive") == 5 * 50 + 10
    found[5] = 0
    assert queue.head("interactive", 5.0, {}) is all_[5]
    assert queue.head("interactive", 6.0, {}) is all_[5]
    assert queue.head("interactive", 7.0, {}) is all_[0]


@pytest.mark.parametrize("num_tenants", [1, 3, 50])
def test_ranking_anew_is_bounded_and_reaches_all(num_tenants: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_module, "WINDOW", 10)
    looks: list[int] = []

    def look(sequence: Queued) -> int:
        looks.append(sequence.order)
        return 0

    queue: WaitingQueue[Queued] = WaitingQueue("longest_prefix", cached=look)
    for i in range(60):
        queue.push(queued(i, tenant=str(i % num_tenants)), 0.0)
    for now in range(1, 11):
        looks.clear()
        queue.head("interactive", float(now), {})
        assert 9 <= len(looks) <= 10
    seen = set()
    for now in range(11, 31):
        queue.head("interactive", float(now), {})
        seen |= set(looks)
    assert len(seen) == 60


def test_a_long_queue_is_not_looked_through_for_its_head() -> None:
    looks = [0]

    def look(sequence: Queued) -> int:
        looks[0] += 1
        return 0

    queue: WaitingQueue[Queued] = WaitingQueue("priority", cached=look)
    for i in range(4000):
        queue.push(queued(i, priority=i % 3), 0.0)
    assert looks == [4000]
    for now in range(3000):
        head = queue.head("interactive", float(now), {})
        assert head is not None
        queue.remove(head)
        queue.push(head, float(now))  # preempted
        queue.remove(head)
    assert looks == [7000] and len(queue) == 1000
    (flow,) = queue._flows["interactive"].values()
    assert len(flow._heap) <= 64 + 4 * 1000


def test_tenants_take_turns_and_one_with_a_cap_is_passed_over() -> None:
    tenants = Tenants({"b": TenantLimits(max_blocks=8), "c": TenantLimits(tokens_per_minute=60)})
    queue: WaitingQueue[Queued] = WaitingQueue(tenants=tenants, needs=lambda s: Held(1, s.prompt_len // 4))
    names = ["a", "a", "b", "b", "c", "c"]
    for i, name in enumerate(names):
        queue.push(queued(i, prompt=24, tenant=name), 0.0)
    held: dict[str, Held] = {}
    entered = []
    while (head := queue.head("interactive", 0.0, held)) is not None:
        tenant = head.request.service.tenant
        queue.remove(head)
        tenants.admitted(head.key, "interactive", tenant, prompt=60, cached=0, now=0.0)
        tenants.computed(head.key, 60, 0.0)
        rows, blocks = held.get(tenant, Held())
        held[tenant] = Held(rows + 1, blocks + 6)
        entered.append(head.order)
    assert entered == [0, 2, 4, 1]
    assert queue.held_back["interactive"] == {
        "b": "tenant 'b' may hold 8 blocks; it has 6 and needs 6 more",
        "c": "tenant 'c' has used its 60 tokens per minute; it may start in 1.0 s",
    }
    assert queue.seconds_idle(0.0) == 0.0  # b waits for blocks, not for time
    queue.remove(next(s for s in queue if s.order == 3))
    assert queue.seconds_idle(0.0) == 1.0
    assert queue.head("interactive", 1.0, held) is next(iter(queue))
    queue.remove(next(iter(queue)))
    assert queue.seconds_idle(0.0) is None and queue.head("interactive", 1.0, held) is None


# --- what is foreseen ---------------------------------------------------------------------------------------------------


def ahead(queue: WaitingQueue[Queued], order: int, **options) -> Ahead:
    return queue.ahead(queue.view(queued(order, **options)))


def test_what_is_ahead_in_ones_own_queue() -> None:
    queue: WaitingQueue[Queued] = WaitingQueue("priority")
    assert ahead(queue, 9) == Ahead(0, 0, 0)
    for i in range(4):
        queue.push(queued(i, prompt=10 * (i + 1), max_tokens=5, priority=i), 0.0)
    assert ahead(queue, 9, arrival=9.0, priority=9) == Ahead(4, 100, 20)
    assert ahead(queue, 9, arrival=3.5, priority=1) == Ahead(2, 30, 10)


def test_a_light_tenant_is_not_behind_all_of_a_heavy_one() -> None:
    queue: WaitingQueue[Queued] = WaitingQueue(tenants=Tenants({"third": TenantLimits(weight=2)}))
    for i in range(100):
        queue.push(queued(i, prompt=50, max_tokens=5, tenant="heavy"), 0.0)
    assert ahead(queue, 200, prompt=100, tenant="heavy") == Ahead(100, 5000, 500)
    assert ahead(queue, 200, prompt=100, tenant="light") == Ahead(2, 100, 10)
    assert ahead(queue, 200, prompt=100, tenant="third") == Ahead(1, 50, 5)
    assert ahead(queue, 200, prompt=100, tenant="light", pool="batch").tokens == pytest.approx(300)  # a quarter is batch work's
    assert ahead(queue, 200, prompt=10**6, tenant="light") == Ahead(100, 5000, 500)  # and no more than there is


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(UserError, match="policy must be one of first_come, priority, .*; got 'fifo'"):
        WaitingQueue("fifo")
