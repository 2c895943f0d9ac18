"""The policies, who gives way, and that aging bounds how long anybody is passed over."""

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from queued import queued

from pagedjax.errors import UserError
from pagedjax.host.policy import POLICIES, PolicyOptions, Waiting, displaceable, rank, victim, view

OPTIONS = PolicyOptions(aging=10.0, level_tokens=100, output_weight=2.0)
WAITING = st.builds(
    Waiting,
    order=st.integers(0, 10**6),
    arrival=st.floats(0, 1000),
    tenant=st.sampled_from("ab"),
    pool=st.sampled_from(["interactive", "batch"]),
    priority=st.integers(-3, 3),
    prompt_left=st.integers(1, 1000),
    cached=st.integers(0, 1000),
    output_left=st.integers(1, 500),
    deadline=st.none() | st.floats(0, 2000),
    seconds=st.floats(0, 100),
)
SEQUENCES = st.lists(WAITING, max_size=12, unique_by=lambda w: w.order)


def order(policy: str, *waiting: Waiting, options: PolicyOptions = OPTIONS) -> list[int]:
    return [w.order for w in sorted(waiting, key=lambda w: rank(w, policy, options))]


def test_each_policy_goes_by_its_own() -> None:
    a = Waiting(0, 0.0, priority=2, prompt_left=500, cached=0, output_left=10, deadline=100.0, seconds=1.0)
    b = Waiting(1, 1.0, priority=1, prompt_left=400, cached=50, output_left=300, deadline=110.0, seconds=20.0)
    c = Waiting(2, 2.0, priority=0, prompt_left=300, cached=150, output_left=20, deadline=None, seconds=1.0)
    assert order("first_come", c, b, a) == [0, 1, 2]
    assert order("priority", a, b, c) == [2, 1, 0]
    assert order("longest_prefix", a, b, c) == [2, 1, 0]
    assert order("shortest_work", a, b, c) == [2, 0, 1]
    assert order("deadline", c, a, b) == [1, 0, 2]
    assert set(POLICIES) == {"first_come", "priority", "longest_prefix", "shortest_work", "deadline"}


def test_equal_keys_keep_the_order_of_arrival() -> None:
    same = [Waiting(i, 5.0) for i in range(4)]
    assert all(order(policy, *reversed(same)) == [0, 1, 2, 3] for policy in POLICIES)


def test_without_a_deadline_last_and_by_arrival_until_patience_is_over() -> None:
    none, later, due = Waiting(0, 0.0), Waiting(1, 1.0), Waiting(2, 300.0, deadline=550.0)
    assert order("deadline", later, due, none) == [2, 0, 1]
    assert order("deadline", none, due._replace(deadline=650.0)) == [0, 2]


@given(WAITING, WAITING, st.sampled_from(["priority", "longest_prefix", "shortest_work"]))
def test_aging_bounds_how_long_one_is_passed_over(old: Waiting, new: Waiting, policy: str) -> None:
    levels = {"priority": 6, "longest_prefix": 10, "shortest_work": 20}[policy]  # between the best and the worst drawn
    old = old._replace(arrival=0.0)
    new = new._replace(arrival=levels * OPTIONS.aging + 0.01)
    assert rank(old, policy, OPTIONS) < rank(new, policy, OPTIONS)


def test_without_aging_one_is_passed_over_for_ever() -> None:
    never = replace(OPTIONS, aging=math.inf)
    assert order("priority", Waiting(0, 0.0, priority=1), Waiting(1, 1e9, priority=0), options=never) == [1, 0]


def test_a_view_says_what_is_left() -> None:
    sequence = queued(3, arrival=7.0, prompt=10, max_tokens=20, priority=2, tenant="t", pool="batch", deadline=5.0)
    seen = view(sequence, cached=4, seconds=lambda prompt, output: prompt * 10 + output)
    assert seen == Waiting(3, 7.0, "t", "batch", 2, 6, 4, 20, 12.0, 80.0)
    sequence.tokens += [1] * 5
    sequence.num_scheduled = 14
    assert view(sequence)[5:8] == (1, 14, 15)
    assert view(sequence).seconds == 0.0  # nothing predicted
    assert view(queued(0, max_tokens=20, expected_tokens=6)).output_left == 6
    assert view(queued(0, max_tokens=20, expected_tokens=60)).output_left == 20


def test_of_an_answer_of_unknown_length_one_token_is_predicted() -> None:
    seen = view(queued(0, prompt=10, max_tokens=None), seconds=lambda prompt, output: float(output))
    assert (seen.output_left, seen.seconds) == (100, 1.0)


# --- who gives way ------------------------------------------------------------------------------------------------------


@given(SEQUENCES.filter(bool), st.sampled_from(sorted(POLICIES)), st.booleans(), st.sets(st.integers(0, 11)))
def test_the_victim_is_last_and_the_first_of_a_pool_always_gets_on(
    running: list[Waiting], policy: str, over: bool, planned: set[int]
) -> None:
    taken = {running[i].order for i in planned if i < len(running)}
    for needing in running:
        found = victim(needing, running, policy, OPTIONS, planned=taken - {needing.order}, batch_over=over)
        assert found is needing or found.order not in taken
        assert not (needing.pool == "batch" and found.pool == "interactive")
        if found.pool == needing.pool:
            assert rank(found, policy, OPTIONS) >= rank(needing, policy, OPTIONS)
    for pool in ("interactive", "batch"):
        mine = sorted((r for r in running if r.pool == pool), key=lambda r: rank(r, policy, OPTIONS))
        asked = [victim(n, running, policy, OPTIONS, batch_over=over) for n in mine[1:]]
        assert all(found is not mine[0] for found in asked)


def test_batch_work_goes_first_where_it_is_over_its_own_or_nobody_else_is_left() -> None:
    a, b = Waiting(0, 0.0), Waiting(1, 1.0)
    batch = Waiting(2, -5.0, pool="batch")
    assert victim(a, [a, b, batch], "first_come", OPTIONS, batch_over=True) is batch
    assert victim(a, [a, b, batch], "first_come", OPTIONS) is b
    assert victim(b, [a, b, batch], "first_come", OPTIONS) is b
    assert victim(b, [a, b, batch], "first_come", OPTIONS, planned={0}) is b  # a still runs: batch work keeps its own
    assert victim(a, [a, batch], "first_come", OPTIONS) is batch
    assert victim(a, [a, batch], "first_come", OPTIONS, planned={2}) is a
    assert victim(batch, [a, b, batch], "first_come", OPTIONS, batch_over=True) is batch


def test_an_urgent_sequence_takes_the_place_of_the_least_urgent() -> None:
    first = Waiting(9, 9.0, priority=0)
    running = [Waiting(i, float(i), priority=i % 4) for i in range(8)]
    found = displaceable(first, running, "priority", OPTIONS)
    assert [w.order for w in found] == [7, 3, 6, 2, 5]  # 1, one level behind, has aged by 0.8 of it
    assert displaceable(first, running, "first_come", OPTIONS) == []
    assert displaceable(first, [r._replace(tenant="other") for r in running], "priority", OPTIONS) == []


def test_batch_work_beyond_its_own_makes_room_for_interactive_work() -> None:
    batch = [Waiting(i, float(i), pool="batch") for i in range(3)]
    first = Waiting(9, 9.0)
    assert [w.order for w in displaceable(first, batch, "first_come", OPTIONS, batch_over=True)] == [2, 1, 0]
    assert displaceable(first, batch, "first_come", OPTIONS) == []
    assert displaceable(first._replace(pool="batch"), batch, "first_come", OPTIONS, batch_over=True) == []


def test_an_urgent_sequence_may_need_the_place_of_both() -> None:
    """Batch work that is over its own goes first, then what is less urgent."""
    running = [
        Waiting(0, 0.0, priority=9),
        Waiting(1, 1.0, pool="batch"),
        Waiting(2, 2.0, priority=5),
        Waiting(3, 3.0, pool="batch"),
    ]
    found = displaceable(Waiting(9, 9.0), running, "priority", OPTIONS, batch_over=True)
    assert [w.order for w in found] == [3, 1, 0, 2]


@given(WAITING, SEQUENCES, st.sampled_from(sorted(POLICIES)), st.booleans())
def test_who_was_displaced_does_not_come_back_for_it(first: Waiting, running: list[Waiting], policy: str, over: bool) -> None:
    assume(all(r.order != first.order for r in running))
    for gone in displaceable(first, running, policy, OPTIONS, batch_over=over):
        assert displaceable(gone, [first], policy, OPTIONS, batch_over=over) == []


@given(SEQUENCES, st.integers(1, 3))
def test_no_inversion_with_all_lanes_taken_and_no_thrash(population: list[Waiting], lanes: int) -> None:
    """Whoever stands first takes a lane while it may displace; it ends with the urgent ones running, after few displacements."""
    population = [w._replace(tenant="a", pool="interactive") for w in population]
    running, waiting, moves = population[:lanes], population[lanes:], 0
    while waiting:
        first = min(waiting, key=lambda w: rank(w, "priority", OPTIONS))
        found = displaceable(first, running, "priority", OPTIONS)
        if not found:
            break
        running[running.index(found[0])] = first
        waiting[waiting.index(first)] = found[0]
        moves += 1
    assert moves <= lanes
    for w in waiting:
        assert all(POLICIES["priority"](r, OPTIONS) < POLICIES["priority"](w, OPTIONS) + OPTIONS.hysteresis for r in running)


def test_without_displacement_there_is_an_inversion() -> None:
    first, running = Waiting(1, 0.0, priority=0), [Waiting(0, 0.0, priority=3)]
    assert displaceable(first, running, "priority", OPTIONS) == running
    assert displaceable(first, running, "priority", replace(OPTIONS, hysteresis=math.inf)) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"aging": 0}, "aging must be positive seconds; got 0"),
        ({"level_tokens": 0}, "level_tokens must be positive; got 0"),
        ({"output_weight": -1}, "output_weight must not be negative; got -1"),
        ({"patience": 0}, "patience must be positive seconds; got 0"),
        ({"hysteresis": -1}, "hysteresis must not be negative; got -1"),
    ],
)
def test_options_are_checked(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PolicyOptions(**options)
