"""Contiguous reservations: the buddy allocator against a plain oracle, and what a scheduler that reserves holds."""

from dataclasses import replace

import pytest
from fake_device import drive, expected, make_request, make_scheduler, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.host.entrance import ServiceRules
from pagedjax.host.policy import PolicyOptions
from pagedjax.host.request import Service
from pagedjax.host.reserve import BuddyPool, reserved_slots


@pytest.mark.parametrize(
    ("mode", "slots"), [("paged", [0, 0, 0]), ("oracle", [13, 26, 60]), ("pow2", [14, 26, 64]), ("max", [64, 64, 64])]
)
def test_what_is_reserved(mode, slots) -> None:
    """Prompt 10 with 3, 16 and 50 of output; pow2 makes 4, 16 and 64 of these, no more than a sequence can be."""
    assert [reserved_slots(mode, 10, 10 + output, 64) for output in (3, 16, 50)] == slots


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 70), st.lists(st.tuples(st.booleans(), st.integers(1, 20)), max_size=60))
def test_runs_are_whole_and_apart(capacity: int, operations) -> None:
    pool, held = BuddyPool(capacity + 1), []
    for take, number in operations:
        if take and pool.fits(number):
            run = pool.allocate(number)
            assert run == list(range(run[0], run[0] + number)) and run[0] >= 1 and run[-1] <= capacity
            assert not {*run} & {b for other in held for b in other}
            held.append(run)
        elif not take and held:
            pool.release(reversed(held.pop(number % len(held))))
        pool.check(held)
        assert pool.num_free == capacity - sum(map(len, held))
    for run in held:
        pool.release(run)
    pool.check([])
    largest = 1 << (capacity.bit_length() - 1)
    assert pool.fits(largest) and not pool.fits(largest + 1), "freed halves join again"


def test_seven_longest_sequences_fit_the_papers_pool() -> None:
    """15,700 slots (OPT-13B on 40 GB) hold 7 runs of 2,048: figure 13 of Kwon et al. 2023."""
    pool = BuddyPool(15_701)
    runs = 0
    while pool.fits(2048):
        pool.allocate(2048)
        runs += 1
    assert runs == 7


@pytest.mark.parametrize("mode", ["oracle", "pow2", "max"])
def test_a_scheduler_that_reserves(mode) -> None:
    """The same tokens, no preemption, and never more than was reserved."""
    made = [make_request(f"r{i}", [i] * (3 + 5 * i), 4 + 3 * i) for i in range(6)]
    scheduler = make_scheduler(34, reserve=mode, prefix_caching=False)

    def each_step(_, plan) -> None:
        for s in scheduler.running:
            want = reserved_slots(mode, s.prompt_len, s.max_len, 64)
            assert s.reserved == want and len(s.held) == -(-want // 4)

    events = drive(scheduler, {0: made}, 1, each_step)
    for request in made:
        assert tokens_of(events[request.id, 0]) == expected(request, 64)
    assert scheduler.stats.preemptions == 0


def test_a_run_that_is_displaced_is_computed_again_and_not_swapped() -> None:
    """Host memory keeps blocks, not runs."""
    rules = ServiceRules("priority", PolicyOptions(aging=1e6))
    scheduler = make_scheduler(17, reserve="max", max_model_len=64, service=rules, host_blocks=50, preemption="swap")
    low, high = (replace(make_request(str(p), [p] * 5, 20), service=Service(priority=p)) for p in (5, 0))
    events = drive(scheduler, {0: [low], 4: [high]}, 1)
    assert scheduler.stats.preemptions == 1 and scheduler.stats.swaps == 0
    assert all(tokens_of(events[r.id, 0]) == expected(r, 64) for r in (low, high))


def test_the_four_classes_of_one_sequence() -> None:
    """By hand: 2 tokens of prompt and 3 of output in blocks of 4, 5 blocks in the pool; committed before the next step."""
    for mode, held in (("paged", [4, 4, 4]), ("oracle", [8, 8, 8]), ("max", [16, 16, 16])):
        scheduler = make_scheduler(6, reserve=mode, prefix_caching=False, max_model_len=16)
        drive(scheduler, {0: [make_request("a", [1, 2], 3)]}, 0)
        waste = scheduler.stats.slot_steps
        assert waste.tokens == 2 + 3 + 4
        assert waste.internal == sum(max(0, h - 5) for h in held)
        assert waste.reserved == sum(held) - waste.tokens - waste.internal
        assert waste.external == sum(20 - h for h in held)
        assert sum(waste.shares().values()) == pytest.approx(1)
