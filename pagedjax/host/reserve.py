"""How much of the cache a sequence holds from the start: block by block as it grows, or one contiguous run as engines before
PagedAttention reserved it. The runs are what the claims of Kwon et al. 2023 are measured against."""

from collections.abc import Iterable
from typing import Literal

Reserve = Literal["paged", "oracle", "pow2", "max"]


def reserved_slots(mode: Reserve, prompt: int, max_len: int, max_model_len: int) -> int:
    """Slots of a sequence's run, as the PagedAttention paper rebuilds Orca: `max` the longest sequence there can be, `pow2` the
    prompt and max_tokens rounded up to a power of two, `oracle` the prompt and max_tokens, where these are the true length. 0 for
    `paged`. Lengths in tokens; max_len is of prompt and output."""
    if mode == "max":
        return max_model_len
    if mode == "pow2":
        return min(max_model_len, prompt + (1 << (max_len - prompt - 1).bit_length()))
    return max_len if mode == "oracle" else 0


class BuddyPool:
    """Gives out runs of consecutive blocks, each cut from an aligned run of a power of two (the buddy system, Knowlton 1965). Ids
    1 .. num_blocks - 1; block 0 is scrap, as in BlockPool, whose place it takes where sequences reserve."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self._free: list[set[int]] = []  # by order: starts of free runs of 2^order blocks, counted from 0 for block 1
        self._runs: dict[int, tuple[int, int]] = {}  # first block: order, blocks asked for
        start, left = 0, num_blocks - 1
        self._free = [set() for _ in range(max(1, left.bit_length()))]
        for order in reversed(range(len(self._free))):
            if left >> order & 1:
                self._free[order].add(start)
                start += 1 << order

    @property
    def capacity(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that nobody asked for; not all of them need be in one run."""
        return self.capacity - sum(count for _, count in self._runs.values())

    @property
    def largest(self) -> int:
        """Blocks of the longest run there can be."""
        return 1 << (self.capacity.bit_length() - 1)

    def fits(self, count: int) -> bool:
        """Whether a run of `count` blocks is free."""
        return count == 0 or any(self._free[order] for order in range((count - 1).bit_length(), len(self._free)))

    def allocate(self, count: int) -> list[int]:
        """A run of `count` blocks. The caller has asked `fits`."""
        if count == 0:
            return []
        order = (count - 1).bit_length()
        found = next((o for o in range(order, len(self._free)) if self._free[o]), None)
        assert found is not None, f"allocate({count}) without a run that long"
        start = min(self._free[found])
        self._free[found].remove(start)
        while found > order:  # the upper half of each cut stays free
            found -= 1
            self._free[found].add(start + (1 << found))
        self._runs[start + 1] = order, count
        return list(range(start + 1, start + 1 + count))

    def release(self, blocks: Iterable[int]) -> None:
        """A whole run, its blocks in any order. Halves that are both free are joined."""
        run = sorted(blocks)
        if not run:
            return
        assert run[0] in self._runs, f"block {run[0]} begins no run that is given out"
        order, count = self._runs.pop(run[0])
        assert len(run) == count, f"a run of {count} blocks is released as a whole; got {len(run)}"
        start = run[0] - 1
        while order + 1 < len(self._free) and start ^ (1 << order) in self._free[order]:
            self._free[order].remove(start ^ (1 << order))
            start &= ~(1 << order)
            order += 1
        self._free[order].add(start)

    def share(self, blocks: Iterable[int]) -> None:
        assert not list(blocks), "runs are not shared"

    def is_shared(self, block: int) -> bool:
        return False

    def num_idle(self, blocks: Iterable[int]) -> int:
        return 0

    def states(self) -> bytes:
        """Of each block but scrap: 0 free, 2 in use; as BlockPool has them."""
        states = bytearray(self.capacity)
        for first, (_, count) in self._runs.items():
            states[first - 1 : first - 1 + count] = bytes([2]) * count
        return bytes(states)

    def check(self, held: Iterable[Iterable[int]]) -> None:
        """Recounts ownership; raises AssertionError where it does not add up."""
        given = sorted(block for first, (_, count) in self._runs.items() for block in range(first, first + count))
        assert sorted(block for blocks in held for block in blocks) == given, "runs differ from the sequences' block lists"
        spans = [(start, 1 << order) for order, starts in enumerate(self._free) for start in starts]
        spans += [(first - 1, 1 << order) for first, (order, _) in self._runs.items()]
        spans.sort()
        ends = [start + length for start, length in spans]
        assert [start for start, _ in spans] == [0, *ends[:-1]] and ends[-1:] == [self.capacity], "runs overlap or leave a gap"
