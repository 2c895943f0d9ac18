"""Gives out the ids of the pool's blocks, with reference counts. Block 0 is scrap and never given out."""

from collections.abc import Callable, Iterable

import numpy as np

from pagedjax.host.retention import IdleBlocks


class BlockPool:
    """Ids 1 .. num_blocks - 1. A block is free when nobody refers to it; the last one released is the first one given.

    Blocks that are to be kept are given out last, in the order of `IdleBlocks`: the one that was released longest ago first, unless
    it is retained or pinned. They may be shared again until then.
    """

    def __init__(self, num_blocks: int, *, retained: float = 0.5):
        """At most the share `retained` of the blocks is held on to by retention and pins, and only while others are free."""
        self.num_blocks = num_blocks
        self.on_reuse: Callable[[int], None] = lambda block: None  # called with a kept block that is given out after all
        self._free = list(range(num_blocks - 1, 0, -1))
        self._refs = [0] * num_blocks
        self._kept: set[int] = set()
        self._idle = IdleBlocks(int(retained * self.capacity))  # kept blocks without references

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def capacity(self) -> int:
        """Blocks that can be in use at once."""
        return self.num_blocks - 1

    @property
    def largest(self) -> int:
        """Blocks that one sequence can hold."""
        return self.capacity

    def fits(self, count: int) -> bool:
        """Whether `count` blocks can be given out."""
        return count <= self.num_free

    @property
    def kept(self) -> frozenset[int]:
        return frozenset(self._kept)

    @property
    def pinned(self) -> frozenset[int]:
        return frozenset(self._idle.pinned)

    @property
    def retained_blocks(self) -> int:
        """How many blocks retention and pins may hold on to."""
        return self._idle.budget

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has checked num_free."""
        assert count <= self.num_free, f"allocate({count}) with {self.num_free} free blocks"
        blocks = [self._free.pop() if self._free else self._reuse() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def _reuse(self) -> int:
        block = self._idle.pop()
        self._kept.remove(block)
        self.on_reuse(block)
        return block

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of them are free, and would not be once they are shared."""
        return sum(self._refs[block] == 0 for block in blocks)

    def is_shared(self, block: int) -> bool:
        """Whether more than one refer to it."""
        return self._refs[block] > 1

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each. Kept blocks may be shared when they are free."""
        for block in blocks:
            if self._refs[block] == 0:
                assert block in self._kept, f"block {block} is free and cannot be shared"
                self._idle.remove(block)
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; a block without references can be given out again at once. Of kept blocks that lose their
        last reference the first one named is the first one given, so name the end of a chain before its beginning."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} was released once too often"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._kept:
                    self._idle.add(block)
                else:
                    self._free.append(block)

    # --- blocks that outlive their users ----------------------------------------------------------------------------

    def keep(self, block: int) -> None:
        """Block, which somebody refers to, is worth keeping when nobody does."""
        assert self._refs[block] > 0, f"block {block} is free and cannot be kept"
        self._kept.add(block)

    def advance(self, now: float) -> None:
        """Sets the clock (seconds, never back) by which retention fades and releases are dated."""
        self._idle.advance(now)

    def retain(self, blocks: Iterable[int], retention: int, seconds: float) -> None:
        """Marks those of the blocks that are kept: when the last reference is gone they go at level `retention`, 1 to 10, which
        falls to 0 within so many seconds. Somebody refers to them all."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free and cannot be retained"
            if block in self._kept:
                self._idle.retain(block, retention, seconds)

    def pin(self, block: int) -> None:
        """A kept block, in use or not, is given out after all others."""
        assert block in self._kept, f"block {block} is not kept and cannot be pinned"
        self._idle.pin(block)

    def unpin(self, block: int) -> None:
        """It is as if the block had never been pinned."""
        self._idle.unpin(block)

    def flush(self) -> int:
        """Kept blocks without references, pinned or not, become plain free blocks; how many there were."""
        count = len(self._idle)
        self._free += [self._reuse() for _ in range(count)]
        return count

    def states(self) -> bytes:
        """Of each block but scrap: 0 free, 1 free but readable, 2 in use, 3 in use by more than one."""
        refs = np.asarray(self._refs)
        states = np.where(refs > 1, 3, np.where(refs == 1, 2, 0)).astype(np.uint8)
        states[list(self._idle)] = 1
        return states[1:].tobytes()

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Recounts ownership from the block lists of all sequences; raises AssertionError where it does not add up."""
        counts = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts[0] == 0, "the scrap block is held by a sequence"
        assert counts == self._refs, "reference counts differ from the sequences' block lists"
        assert set(self._idle) <= self._kept, "a block that is not kept is idle"
        free = {*self._free, *self._idle}
        assert len(free) == self.num_free, "a block is in the free list twice"
        assert all((count == 0) == (block in free) for block, count in enumerate(counts) if block), "free list and counts differ"
        self._idle.check()
        assert self._idle.marked() <= self._kept, "a block that is not kept is retained or pinned"
