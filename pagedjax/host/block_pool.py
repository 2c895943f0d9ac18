"""Gives out the ids of the pool's blocks, with reference counts. Block 0 is scrap and never given out."""

from collections.abc import Iterable


class BlockPool:
    """Ids 1 .. num_blocks - 1. A block is free when nobody refers to it; the last one released is the first one given."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Blocks that can be in use at once."""
        return self.num_blocks - 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. The caller has checked num_free."""
        assert count <= len(self._free), f"allocate({count}) with {len(self._free)} free blocks"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is free and cannot be shared"
            self._refs[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each; a block without references can be given out again at once."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} was released once too often"
            self._refs[block] -= 1
            if self._refs[block] == 0:
                self._free.append(block)

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Recounts ownership from the block lists of all sequences; raises AssertionError where it does not add up."""
        counts = [0] * self.num_blocks
        for blocks in held:
            for block in blocks:
                counts[block] += 1
        assert counts[0] == 0, "the scrap block is held by a sequence"
        assert counts == self._refs, "reference counts differ from the sequences' block lists"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        assert all((count == 0) == (block in free) for block, count in enumerate(counts) if block), "free list and counts differ"
