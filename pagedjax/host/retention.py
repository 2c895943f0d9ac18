"""The order in which cached blocks that nobody refers to are given out again: the lowest level first, and of one level the one
that was released longest ago.

A block has level 0, which makes plain least recently used of it, unless it was marked. With a retention r it has level r when it
is released and loses one level every seconds / r, down to 0 (the decaying bias of TensorRT-LLM's retention priorities, in steps);
then its mark is gone. A pinned block has PINNED, which does not decay. At most `budget` blocks have a level above 0: where there
are more, the lowest, and of those the one released longest ago, goes to 0. Every block can be given out, pinned ones too.

Blocks that were never marked are in one dictionary in the order of their release, and cost what they would without any of this. The
others are in a heap for each level, by release, and in one of the times at which they fall; what a heap says of a block that has
moved on is skipped when it comes up, and dropped when there is more of that than of the rest. So all is O(log n), amortised.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

HIGHEST = 10
PINNED = HIGHEST + 1


@dataclass(slots=True, eq=False)
class _Idle:
    """A marked block without references."""

    stamp: int  # releases are counted
    released: float  # seconds
    retention: int
    seconds: float
    level: int

    def falls(self) -> float:
        """When its level, which is above 0, ends."""
        return self.released + (self.retention - self.level + 1) * self.seconds / self.retention

    def faded(self, now: float) -> int:
        """Its level without a pin."""
        self.level = self.retention
        while self.level and self.falls() <= now:
            self.level -= 1
        return self.level


class IdleBlocks:
    """Marks of blocks, and the order of those that are idle. The clock is the caller's, in seconds, and never goes back."""

    def __init__(self, budget: int):
        self.budget = budget
        self.now = 0.0
        self._stamp = 0
        self._plain: dict[int, int] = {}  # block: stamp, in order
        self._marked: dict[int, _Idle] = {}
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in range(PINNED + 1)]  # by level: (stamp, block)
        self._falls: list[tuple[float, int]] = []  # (time, block)
        self._raised = 0  # idle blocks above level 0
        self._retentions: dict[int, tuple[int, float]] = {}  # marks, of blocks in use too: (retention, seconds)
        self.pinned: set[int] = set()

    def __len__(self) -> int:
        return len(self._plain) + len(self._marked)

    def __contains__(self, block: int) -> bool:
        return block in self._plain or block in self._marked

    def __iter__(self) -> Iterator[int]:
        yield from self._plain
        yield from self._marked

    def level(self, block: int) -> int:
        """Of an idle block."""
        return self._marked[block].level if block in self._marked else 0

    def marked(self) -> set[int]:
        """Blocks with a retention or a pin, in use or not."""
        return self._retentions.keys() | self.pinned

    # --- marks ------------------------------------------------------------------------------------------------------

    def retain(self, block: int, retention: int, seconds: float) -> None:
        """Marks a block in use, for when it is not. Of two marks the higher one counts, of equal ones the longer."""
        assert 0 < retention <= HIGHEST and seconds > 0, f"retention {retention} for {seconds} seconds"
        self._retentions[block] = max(self._retentions.get(block, (0, 0.0)), (retention, seconds))

    def pin(self, block: int) -> None:
        self.pinned.add(block)
        self._mark_again(block)

    def unpin(self, block: int) -> None:
        self.pinned.discard(block)
        self._mark_again(block)

    def _mark_again(self, block: int) -> None:
        """An idle block's place follows its pin, and its release stays what it was."""
        stamp = self._plain.pop(block, None)
        if stamp is not None:
            self._marked[block] = _Idle(stamp, self.now, 0, 0.0, 0)
        if block in self._marked:
            self._place(block, self._marked[block])
            self._keep_budget()

    # --- the order --------------------------------------------------------------------------------------------------

    def add(self, block: int) -> None:
        """The block lost its last reference."""
        self._stamp += 1
        if block in self._retentions or block in self.pinned:
            retention, seconds = self._retentions.get(block, (0, 0.0))
            idle = self._marked[block] = _Idle(self._stamp, self.now, retention, seconds, 0)
            self._place(block, idle)
            self._keep_budget()
        else:
            self._plain[block] = self._stamp

    def remove(self, block: int) -> None:
        """The idle block is in use again; it keeps its marks."""
        if self._plain.pop(block, None) is None:
            self._raised -= self._marked.pop(block).level > 0

    def pop(self) -> int:
        """Takes out the block that is to be given out next. Its marks are gone."""
        if not self._marked:
            block = next(iter(self._plain))
            del self._plain[block]
            return block
        block = self._first()
        self.remove(block)
        self._retentions.pop(block, None)
        self.pinned.discard(block)
        return block

    def advance(self, now: float) -> None:
        """It is now: levels that have ended by now fall."""
        assert now >= self.now, f"the clock goes back from {self.now} to {now}"
        self.now = now
        while self._falls and self._falls[0][0] <= now:
            _, block = heappop(self._falls)
            idle = self._marked.get(block)
            if idle is not None and 0 < idle.level < PINNED and idle.falls() <= now:
                self._place(block, idle)

    def _first(self) -> int:
        faded = self._head(0)
        if self._plain:
            block = next(iter(self._plain))
            return block if faded is None or self._plain[block] < faded[0] else faded[1]
        return next(head[1] for head in map(self._head, range(PINNED + 1)) if head is not None)

    def _head(self, level: int) -> tuple[int, int] | None:
        """(stamp, block) of the marked block of a level that was released first."""
        heap = self._heaps[level]
        while heap and not self._holds(level, *heap[0]):
            heappop(heap)
        return heap[0] if heap else None

    def _holds(self, level: int, stamp: int, block: int) -> bool:
        idle = self._marked.get(block)
        return idle is not None and (idle.stamp, idle.level) == (stamp, level)

    def _place(self, block: int, idle: _Idle) -> None:
        """Gives a marked block the level it has now."""
        self._raised -= idle.level > 0
        idle.level = PINNED if block in self.pinned else idle.faded(self.now)
        self._raised += idle.level > 0
        heappush(self._heaps[idle.level], (idle.stamp, block))
        if 0 < idle.level < PINNED:
            heappush(self._falls, (idle.falls(), block))
        elif idle.level == 0:
            self._retentions.pop(block, None)
        if sum(map(len, self._heaps)) + len(self._falls) > 4 * len(self._marked) + 64:
            self._sweep()

    def _keep_budget(self) -> None:
        while self._raised > self.budget:
            _, block = next(head for head in map(self._head, range(1, PINNED + 1)) if head is not None)
            idle = self._marked[block]
            idle.retention = 0
            self.pinned.discard(block)
            self._place(block, idle)

    def _sweep(self) -> None:
        """Drops what the heaps say of blocks that have moved on."""
        for level, heap in enumerate(self._heaps):
            heap[:] = sorted({entry for entry in heap if self._holds(level, *entry)})
        self._falls = [(idle.falls(), block) for block, idle in self._marked.items() if 0 < idle.level < PINNED]
        heapify(self._falls)

    def check(self) -> None:
        """Raises AssertionError where the tables do not add up."""
        stamps = list(self._plain.values())
        assert stamps == sorted(stamps), "blocks that were never marked are not in the order of their release"
        assert not self._plain.keys() & self._marked.keys(), "a block is idle twice"
        assert self._raised == sum(idle.level > 0 for idle in self._marked.values()) <= self.budget, "blocks above level 0"
        assert not self._plain.keys() & self.marked(), "a marked block is idle without its mark"
        for block, idle in self._marked.items():
            level = (
                PINNED
                if block in self.pinned
                else _Idle(idle.stamp, idle.released, idle.retention, idle.seconds, 0).faded(self.now)
            )
            assert idle.level == level, f"block {block} has level {idle.level}, not {level}"
            assert (idle.stamp, block) in self._heaps[level], f"block {block} is not in the heap of its level"
            falling = 0 < level < PINNED
            assert not falling or (idle.falls(), block) in self._falls, f"nothing says when block {block} falls"
