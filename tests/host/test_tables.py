"""Copy on write, swap, windows: what a sequence holds, and that the control (a move left out) is noticed."""

import pytest
from fake_device import drive, expected, make_request, make_scheduler, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.host.block_pool import BlockPool
from pagedjax.host.sequence import Sequence
from pagedjax.host.tables import BlockTables

P = 4


def check_tokens(events, requests) -> None:
    for request in requests:
        for index in range(request.params.n):
            assert tokens_of(events[request.id, index]) == expected(request, 64), request.id


# --- copy on write ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("prompt", "n"), [(13, 4), (12, 3), (1, 3), (4, 2), (5, 2), (16, 4)])
def test_samples_share_the_prompt_and_copy_one_block_each(prompt: int, n: int, caching: bool) -> None:
    """Each sample after the first computes the prompt's last token alone, and takes a copy of the block it stands in, if that
    holds other tokens, too."""
    request = make_request("a", [*range(prompt)], 9, n=n)
    scheduler = make_scheduler(prefix_caching=caching)
    computed = held = 0

    def each_step(_, plan) -> None:
        nonlocal computed, held
        computed += sum(max(0, min(row.start + row.count, prompt) - row.start) for row in plan.rows if plan) if plan else 0
        if len(scheduler.running) == n:
            held = scheduler.pool.capacity - scheduler.pool.num_free
            whole = (prompt - 1) // P
            assert held == whole + sum(len(s.held) - whole for s in scheduler.running)

    events = drive(scheduler, {0: [request]}, 1, each_step)
    check_tokens(events, [request])
    assert held and computed == prompt + n - 1
    assert scheduler.stats.copies == (n - 1 if (prompt - 1) % P else 0)
    assert scheduler.stats.cached_tokens == (n - 1) * (prompt - 1)


def test_savings_of_parallel_sampling_are_the_closed_form() -> None:
    """Blocks that are not held because they are shared, over those that would be: (n - 1) floor(p / P) / (n ceil((p + t) / P)) when
    each has t tokens of output behind a prompt of p (section 6.3 of Kwon et al. 2023 measures it)."""
    p, n = 18, 4
    seen = []

    def each_step(_, plan) -> None:
        lengths = {s.num_scheduled - p for s in scheduler.running}  # the first sample is a step ahead
        if len(scheduler.running) == n and min(lengths) > 0:
            alone = sum(-(-s.num_scheduled // P) for s in scheduler.running)
            saved = alone - (scheduler.pool.capacity - scheduler.pool.num_free)
            assert saved == (n - 1) * (p // P)
            seen.append(saved)

    scheduler = make_scheduler(200, token_budget=32)
    drive(scheduler, {0: [make_request("a", [*range(p)], 24, n=n)]}, 1, each_step)
    assert len(seen) > 15


def test_a_copy_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    take = BlockTables.take_moves
    monkeypatch.setattr(BlockTables, "take_moves", lambda self: ((), *take(self)[1:]))
    with pytest.raises((AssertionError, KeyError)):
        drive(make_scheduler(), {0: [make_request("a", [*range(14)], 9, n=2)]}, 1)


def tables(num_blocks: int = 20, **options) -> tuple[BlockTables, list[Sequence]]:
    made = BlockTables(BlockPool(num_blocks), P, max_model_len=64, chunk=16, **options)
    return made, [made.sequence(make_request(str(i), [*range(30)], 9), 0, 39, i) for i in range(3)]


def test_a_fork_at_a_full_block_copies_nothing() -> None:
    made, (a, b, _) = tables()
    made.grow(a, 8)
    a.num_scheduled = 8
    made.fork(a, b, 8)
    b.num_scheduled = 8
    made.grow(a, 9)
    made.grow(b, 9)
    assert made.take_moves() == ((), (), (), ())
    assert a.blocks[0][:2] == b.blocks[0][:2] and a.blocks[0][2] != b.blocks[0][2]
    made.check([a, b])


def test_the_last_one_that_holds_a_block_writes_in_place() -> None:
    made, (a, b, c) = tables()
    made.grow(a, 6)
    a.num_scheduled = 6
    made.fork(a, b, 6)
    made.fork(a, c, 6)
    b.num_scheduled = c.num_scheduled = 6
    shared = a.blocks[0][1]
    assert [made.missing(s, 7) for s in (a, b, c)] == [1, 1, 1]
    made.grow(b, 7)
    made.grow(a, 7)
    assert made.missing(c, 7) == 0
    made.grow(c, 7)
    copies = made.take_moves()[0]
    assert [copy.source for copy in copies] == [shared, shared] and c.blocks[0][1] == shared
    assert {copy.target for copy in copies} == {a.blocks[0][1], b.blocks[0][1]}
    made.check([a, b, c])
    for s in (a, b, c):
        made.release(s)
    assert made.pool.num_free == made.pool.capacity


# --- swap ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_swapped_sequences_compute_nothing_again(caching: bool, delay: int) -> None:
    made = [make_request(f"r{i}", [60 + i] * 9, 40) for i in range(3)]
    options = {"token_budget": 32, "prefix_caching": caching, "host_blocks": 100}
    scheduler = make_scheduler(22, preemption="swap", **options)
    events = drive(scheduler, {0: made}, delay)
    check_tokens(events, made)
    assert scheduler.stats.swaps == scheduler.stats.preemptions > 0
    assert scheduler.stats.recomputed_tokens == 0
    again = make_scheduler(22, preemption="recompute", **options)
    check_tokens(drive(again, {0: made}, delay), made)
    assert again.stats.swaps == 0 and again.stats.preemptions > 0


@pytest.mark.parametrize("which", [1, 2])
def test_a_swap_that_is_left_out_is_noticed(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control, out and in."""
    take = BlockTables.take_moves

    def without(self):
        moves = list(take(self))
        moves[which] = ()
        return tuple(moves)

    monkeypatch.setattr(BlockTables, "take_moves", without)
    made = [make_request(f"r{i}", [60 + i] * 9, 40) for i in range(3)]
    with pytest.raises((AssertionError, KeyError)):
        drive(make_scheduler(22, token_budget=32, host_blocks=100, preemption="swap", prefix_caching=False), {0: made}, 1)


def test_blocks_of_the_cache_go_to_host_memory_and_come_back() -> None:
    """A prompt whose blocks were given to others since is not computed again."""
    old, new = make_request("old", [*range(17)], 1), make_request("new", [*range(30, 70)], 1)
    again = make_request("again", [*range(17)], 3)
    for places, cached in ((100, 16), (3, 16), (2, 12), (0, 4)):  # of four blocks three were given to others, the last one first
        scheduler = make_scheduler(12, host_blocks=places)
        events = drive(scheduler, {0: [old], 20: [new], 40: [again]}, 1)
        check_tokens(events, [old, new, again])
        assert events["again", 0][-1].usage.cached == cached, places


# --- windows ---------------------------------------------------------------------------------------------------------------


def test_a_window_layer_holds_what_it_sees() -> None:
    window, scheduler = 9, make_scheduler(64, windows=(None, 9), prefix_caching=False)
    most = 0

    def each_step(_, plan) -> None:
        nonlocal most
        for s in scheduler.running:
            whole, part = (sum(map(bool, blocks)) for blocks in s.blocks)
            assert whole == -(-s.num_scheduled // P)
            most = max(most, part)

    request = make_request("a", [*range(3)], 50)
    check_tokens(drive(scheduler, {0: [request]}, 1, each_step), [request])
    assert most == -(-(window - 1) // P) + 1


def test_what_a_window_needs_bounds_what_is_admitted() -> None:
    """40 tokens of prompt in chunks of 16 never need more than the window and a chunk in the second group."""
    made = make_scheduler(40, windows=(None, 9))
    assert made.tables.most(40) == 10 + (-(-(9 + 16) // P) + 1)


def test_a_prefix_is_found_where_the_window_has_moved_on() -> None:
    """Of the window group only the last blocks before the hit must be there; where one of them is not, the hit is shorter."""
    first, second = make_request("a", [*range(29)], 1), make_request("b", [*range(29)], 5)
    scheduler = make_scheduler(64, windows=(None, 9))
    events = drive(scheduler, {0: [first], 20: [second]}, 1)
    check_tokens(events, [first, second])
    assert events["b", 0][-1].usage.cached == 28
    tables = scheduler.tables
    sequence = tables.sequence(second, 0, 34, 99)
    found = tables.find(sequence, 28)
    assert [sum(map(bool, blocks)) for blocks in found.blocks] == [7, 2] and found.blocks[1][:5] == [0] * 5
    tables.cache._forget(found.blocks[1][6])  # pyright: ignore
    shorter = tables.find(tables.sequence(second, 0, 34, 100), 28)
    assert shorter.num_tokens == 24 and all(shorter.blocks[1][4:])


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.integers(1, 40), st.integers(5, 20))
def test_any_window_frees_as_it_goes(window: int, prompt: int, budget: int) -> None:
    scheduler = make_scheduler(64, windows=(window,), token_budget=budget, prefix_caching=False)
    request = make_request("a", [*range(prompt)], 20)

    def each_step(_, plan) -> None:
        for s in scheduler.running:
            assert len(s.held) <= scheduler.tables.most(64)

    check_tokens(drive(scheduler, {0: [request]}, 1, each_step), [request])
