"""Gives out the ids of the pool's blocks, with reference counts. Block 0 is scrap and never given out."""

from collections.abc import Callable, Iterable


class BlockPool:
    """Ids 1 .. num_blocks - 1. A block is free when nobody refers to it; the last one released is the first one given.

    Blocks that are to be kept are given out last, the one that was released longest ago first, and may be shared again until then.
    """

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.on_reuse: Callable[[int], None] = lambda block: None  # called with a kept block that is given out after all
        self._free = list(range(num_blocks - 1, 0, -1))
        self._refs = [0] * num_blocks
        self._kept: set[int] = set()
        self._idle: dict[int, None] = {}  # kept blocks without references, in the order of their release

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def capacity(self) -> int:
        """Blocks that can be in use at once."""
        return self.num_blocks - 1

    def fits(self, count: int) -> bool:
        """Whether `count` blocks can be given out."""
        return count <= self.num_free

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has checked num_free."""
        assert count <= self.num_free, f"allocate({count}) with {self.num_free} free blocks"
        blocks = [self._free.pop() if self._free else self._reuse() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def _reuse(self) -> int:
        block = next(iter(self._idle))
        del self._idle[block]
        self._kept.remove(block)
        self.on_reuse(block)
        return block

    def keep(self, block: int) -> None:
        """Block, which somebody refers to, is worth keeping when nobody does."""
        assert self._refs[block] > 0, f"block {block} is free and cannot be kept"
        self._kept.add(block)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of them are free, and would not be once they are shared."""
        return sum(block in self._idle for block in blocks)

    def is_shared(self, block: int) -> bool:
        """Whether more than one refer to it."""
        return self._refs[block] > 1

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each. Kept blocks may be shared when they are free."""
        for block in blocks:
            assert self._refs[block] > 0 or block in self._idle, f"block {block} is free and cannot be shared"
            self._idle.pop(block, None)
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; a block without references can be given out again at once. Of kept blocks that lose their
        last reference the first one named is the first one given, so name the end of a chain before its beginning."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} was released once too often"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if block in self._kept:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Recounts ownership from the block lists of all sequences; raises AssertionError where it does not add up."""
        counts = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts[0] == 0, "the scrap block is held by a sequence"
        assert counts == self._refs, "reference counts differ from the sequences' block lists"
        assert self._idle.keys() <= self._kept, "a block that is not kept is idle"
        free = {*self._free, *self._idle}
        assert len(free) == self.num_free, "a block is in the free list twice"
        assert all((count == 0) == (block in free) for block, count in enumerate(counts) if block), "free list and counts differ"
