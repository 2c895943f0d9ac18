"""Which cached block goes first: against an oracle that looks at all of them each time, with virtual time."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from fake_device import drive, expected, make_request, make_scheduler, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.errors import UserError
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.prefix_cache import PrefixCache
from pagedjax.host.request import Service
from pagedjax.host.retention import PINNED, IdleBlocks


@dataclass
class Known:
    """A block of the oracle, idle or in use."""

    stamp: int = 0
    released: float = 0.0
    retention: int = 0  # as it was when the block was released
    seconds: float = 1.0
    mark: tuple[int, float] | None = None
    pinned: bool = False


class Oracle:
    """Says the same as IdleBlocks, from the definition."""

    def __init__(self, budget: int):
        self.budget, self.now, self.stamp = budget, 0.0, 0
        self.blocks: dict[int, Known] = {}
        self.idle: set[int] = set()

    def level(self, block: int) -> int:
        b = self.blocks[block]
        steps = range(1, b.retention + 1)
        return PINNED if b.pinned else sum(b.released + k * b.seconds / b.retention > self.now for k in steps)

    def order(self) -> list[int]:
        return sorted(self.idle, key=lambda block: (self.level(block), self.blocks[block].stamp))

    def settle(self) -> None:
        """Over the budget the first of those above 0 falls; who is at 0 has no mark."""
        while len(above := [block for block in self.order() if self.level(block)]) > self.budget:
            self.blocks[above[0]].retention, self.blocks[above[0]].pinned = 0, False
        for block in self.idle:
            if self.level(block) == 0:
                self.blocks[block].mark, self.blocks[block].retention = None, 0

    def add(self, block: int) -> None:
        b = self.blocks[block]
        self.stamp += 1
        b.stamp, b.released = self.stamp, self.now
        b.retention, b.seconds = b.mark or (0, 1.0)
        self.idle.add(block)

    def pop(self) -> int:
        block = self.order()[0]
        self.idle.remove(block)
        self.blocks[block] = Known()
        return block


ACTIONS = ["add", "add", "add", "remove", "pop", "retain", "retain", "pin", "unpin", "advance"]


def act(name: str, number: int, order: IdleBlocks, oracle: Oracle) -> None:
    """Does the same to both, where it can be done."""
    used, idle = sorted(oracle.blocks.keys() - oracle.idle), sorted(oracle.idle)
    every = sorted(oracle.blocks)
    if name == "advance":
        oracle.now += number * 0.7
        order.advance(oracle.now)
    elif name == "add" and used:
        order.add(used[number % len(used)])
        oracle.add(used[number % len(used)])
    elif name == "remove" and idle:
        order.remove(idle[number % len(idle)])
        oracle.idle.remove(idle[number % len(idle)])
    elif name == "pop" and idle:
        assert order.pop() == oracle.pop()
    elif name == "retain" and used:
        block, mark = used[number % len(used)], (1 + number % 10, 1.0 + number % 7)
        order.retain(block, *mark)
        oracle.blocks[block].mark = max(oracle.blocks[block].mark or (0, 0.0), mark)
    elif name in ("pin", "unpin"):
        block = every[number % len(every)]
        order.pin(block) if name == "pin" else order.unpin(block)
        oracle.blocks[block].pinned = name == "pin"
    oracle.settle()


@given(st.integers(0, 6), st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 1000)), max_size=120))
@settings(max_examples=300, deadline=None)
def test_equals_the_oracle(budget: int, actions: list[tuple[str, int]]) -> None:
    order, oracle = IdleBlocks(budget), Oracle(budget)
    oracle.blocks = {block: Known() for block in range(1, 13)}
    for name, number in actions:
        act(name, number, order, oracle)
        order.check()
        assert (set(order), len(order)) == (oracle.idle, len(oracle.idle))
        assert {block: order.level(block) for block in order} == {block: oracle.level(block) for block in oracle.idle}
        assert order.pinned == {block for block, b in oracle.blocks.items() if b.pinned}
        assert order.marked() - order.pinned == {block for block, b in oracle.blocks.items() if b.mark and not b.pinned}
    while oracle.idle:
        act("pop", 0, order, oracle)
    assert len(order) == 0


@given(st.lists(st.tuples(st.sampled_from(["add", "remove", "pop", "advance"]), st.integers(0, 1000)), max_size=100))
def test_without_marks_it_is_plain_least_recently_used(actions: list[tuple[str, int]]) -> None:
    order, oracle, line = IdleBlocks(5), Oracle(5), []
    oracle.blocks = {block: Known() for block in range(1, 9)}
    for name, number in actions:
        before = set(oracle.idle)
        act(name, number, order, oracle)
        line = [block for block in line if block in oracle.idle] + list(oracle.idle - before)
        assert oracle.order() == line == list(order)


def keep_some(pool: BlockPool, count: int) -> list[int]:
    blocks = pool.allocate(count)
    for block in blocks:
        pool.keep(block)
    return blocks


@pytest.mark.parametrize(
    ("share", "after", "survives"),
    [(0.5, 0.0, True), (0.5, 59.9, True), (0.5, 60.0, False), (0.0, 0.0, False), (0.1, 0.0, False)],
)
def test_a_retained_block_outlives_newer_ones_for_its_time_and_within_the_budget(
    share: float, after: float, survives: bool
) -> None:
    pool, gone = BlockPool(9, retained=share), []
    pool.on_reuse = gone.append
    old, *newer = keep_some(pool, 8)
    pool.advance(100.0)
    pool.retain([old], 3, 60.0)
    pool.release([old])
    pool.release(newer)
    pool.advance(100.0 + after)
    pool.allocate(7)
    assert (old not in gone) == survives
    assert gone == (newer if survives else [old, *newer[:-1]])


def test_levels_fall_one_by_one() -> None:
    order = IdleBlocks(9)
    order.retain(1, 4, 40.0)
    order.add(1)
    levels = []
    for now in (0.0, 9.9, 10.0, 29.9, 30.0, 39.9, 40.0, 1e9):
        order.advance(now)
        order.check()
        levels.append(order.level(1))
    assert levels == [4, 4, 3, 2, 1, 1, 0, 0]
    with pytest.raises(AssertionError, match="the clock goes back from 1000000000.0 to 5"):
        order.advance(5)


def test_a_use_renews_retention_and_what_has_faded_is_plain() -> None:
    order = IdleBlocks(9)
    order.retain(1, 2, 10.0)
    order.retain(1, 1, 99.0)  # the higher one counts
    order.add(1)
    order.advance(6.0)
    assert order.level(1) == 1
    order.remove(1)
    order.add(1)
    assert order.level(1) == 2
    order.advance(16.0)
    assert order.level(1) == 0
    order.remove(1)
    order.add(1)
    assert order.level(1) == 0


def test_over_the_budget_the_lowest_and_oldest_fall() -> None:
    order = IdleBlocks(2)
    for block, retention in ((1, 5), (2, 3), (3, 3), (4, 5)):
        order.retain(block, retention, 60.0)
        order.add(block)
    assert [order.level(block) for block in (1, 2, 3, 4)] == [5, 0, 0, 5]
    assert [order.pop() for _ in range(4)] == [2, 3, 1, 4]


def test_what_blocks_leave_behind_is_swept() -> None:
    order = IdleBlocks(50)
    for i in range(20000):
        block = i % 20
        if block in order:
            order.remove(block)
        order.retain(block, 1 + block % 10, 1e6)
        order.add(block)
    assert sum(map(len, order._heaps)) + len(order._falls) <= 4 * 20 + 64
    order.check()


def test_check_sees_a_block_at_a_wrong_level() -> None:
    order = IdleBlocks(9)
    order.retain(1, 4, 40.0)
    order.add(1)
    order._falls.clear()
    with pytest.raises(AssertionError, match="nothing says when block 1 falls"):
        order.check()
    order.advance(10.0)
    with pytest.raises(AssertionError, match="block 1 has level 4, not 3"):
        order.check()


# --- through the prefix cache -----------------------------------------------------------------------------------------


def write(cache: PrefixCache, pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """A sequence that computes tokens and ends."""
    found = cache.find(salt, tokens)
    pool.share(found)
    blocks = found + pool.allocate(-(-len(tokens) // 4) - len(found))
    for block, (key, content) in zip(blocks, cache.keys(salt, tokens), strict=False):
        cache.publish(key, content, block)
    pool.release(reversed(blocks))
    cache.check()
    pool.check([])
    return blocks


def made(num_blocks: int = 9) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, 4)


PREFIX = [*range(8)]


def pin_before(cache: PrefixCache, write: Callable[[], object]) -> None:
    cache.pin("", PREFIX)
    write()


def pin_after(cache: PrefixCache, write: Callable[[], object]) -> None:
    write()
    cache.pin("", PREFIX)


def pin_and_unpin(cache: PrefixCache, write: Callable[[], object]) -> None:
    cache.pin("", PREFIX)
    write()
    cache.unpin("", PREFIX)


@pytest.mark.parametrize(("how", "left"), [(pin_before, 2), (pin_after, 2), (pin_and_unpin, 0), (lambda _, write: write(), 0)])
def test_a_pinned_prefix_stays(how: Callable, left: int) -> None:
    pool, cache = made()
    how(cache, lambda: write(cache, pool, PREFIX))
    for i in range(1, 4):
        write(cache, pool, [100 * i + j for j in range(24)])  # 6 blocks each
    assert len(cache.find("", PREFIX)) == left


def test_pins_cannot_wedge_the_pool() -> None:
    pool, cache = made()
    cache.pin("", [*range(16)])
    write(cache, pool, [*range(16)])
    assert pool.num_free == 8 and len(pool.pinned) == 4
    gone: list[int] = []
    forget, pool.on_reuse = pool.on_reuse, lambda block: (gone.append(block), forget(block))
    blocks = pool.allocate(7)
    assert len(gone) == 3 and len(cache.find("", [*range(16)])) == 1  # the end of the chain first
    pool.release(blocks)
    write(cache, pool, [*range(16)])  # computed again, it is pinned again
    assert len(pool.pinned) == 4


def test_a_request_takes_pinned_blocks_when_it_needs_them() -> None:
    scheduler = make_scheduler(9)
    cache = scheduler.tables.cache
    assert cache is not None
    first, long = make_request("first", [*range(17)], 2), make_request("long", [*range(50, 78)], 4)
    assert cache.pin("0:", first.prompt) == 4
    events = drive(scheduler, {0: [first]}, 1)
    assert len(cache.find("0:", first.prompt)) == 4
    events |= drive(scheduler, {0: [long]}, 1)  # needs all 8 blocks
    assert cache.find("0:", first.prompt) == []
    assert all(tokens_of(events[r.id, 0]) == expected(r, 64) for r in (first, long))
    drive(scheduler, {0: [make_request("again", [*range(17)], 2)]}, 1)
    assert len(scheduler.pool.pinned) == 4


def test_pins_are_counted_and_bounded() -> None:
    pool, cache = made()
    assert cache.pin("", PREFIX) == 2 and cache.pin("", [*PREFIX, *range(30, 38)]) == 4  # of which 2 are the same
    with pytest.raises(UserError, match="pinned prefixes may have 4 blocks together; got 5, of which 4 are pinned"):
        cache.pin("other", [1, 2, 3, 4])
    with pytest.raises(UserError, match="a pinned prefix must fill a block of 4 tokens; got 3"):
        cache.pin("", [1, 2, 3])
    with pytest.raises(UserError, match="unpin must name the tokens of a pin; got 4 tokens that are not pinned"):
        cache.unpin("", PREFIX[:4])
    write(cache, pool, PREFIX)
    assert cache.unpin("", PREFIX) == 2 and len(pool.pinned) == 2
    assert cache.unpin("", [*PREFIX, *range(30, 38)]) == 4 and len(pool.pinned) == 0
    cache.check()
    with pytest.raises(UserError, match="got 8 tokens that are not pinned"):
        cache.unpin("", PREFIX)


def test_flush_forgets_all_but_what_is_in_use() -> None:
    pool, cache = made()
    cache.pin("", PREFIX)
    write(cache, pool, PREFIX)
    write(cache, pool, [*range(50, 58)])
    held = cache.find("", [*range(50, 54)])
    pool.share(held)
    assert cache.flush() == 3 and cache.flush() == 0
    assert len(cache) == 1 and cache.find("", PREFIX) == [] and cache.find("", [*range(50, 58)]) == held
    cache.check()
    pool.check([held])
    assert pool.num_free == 7
    pool.release(held)
    write(cache, pool, PREFIX)
    assert len(pool.pinned) == 2


def test_a_prefix_is_pinned_in_all_layer_groups_or_in_none() -> None:
    tables = make_scheduler(13, windows=(None, 9)).tables  # of 12 blocks pins may have 6
    with pytest.raises(UserError, match="pinned prefixes may have 6 blocks together; got 8, of which 4 are pinned"):
        tables.pin("", [*range(16)])
    with pytest.raises(UserError, match="unpin must name the tokens of a pin"):
        tables.unpin("", [*range(16)])
    assert tables.pin("", [*range(14)]) == 6 and tables.unpin("", [*range(14)]) == 6


@pytest.mark.parametrize(("retention", "cached"), [(0, 0), (5, 24)])
def test_blocks_of_a_prompt_that_left_a_window_are_retained_too(retention: int, cached: int) -> None:
    """A prompt of 28 tokens is found again up to 24 only if blocks of its window group that were given back early are there."""
    scheduler = make_scheduler(33, windows=(None, 9), max_model_len=64)
    kept = replace(make_request("kept", [*range(28)], 20), service=Service(retention=retention))
    other, again = make_request("other", [*range(50, 80)], 12), make_request("again", [*range(25)], 1)
    events = drive(scheduler, {0: [kept], 40: [other], 80: [again]}, 1)
    assert events["again", 0][-1].usage.cached == cached
