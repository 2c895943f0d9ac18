"""What of a sequence is in the cache already: where layers see differently far, each group needs other blocks of it."""

from typing import NamedTuple


class Found(NamedTuple):
    """What a sequence can start from: its first num_tokens tokens, and where they are. Of each group the blocks in order: a block
    of the pool, 0 where the window has moved on, or -p for place p of host memory."""

    num_tokens: int
    blocks: list[list[int]]


def first_seen(num_tokens: int, window: int | None, size: int) -> int:
    """The first block, of so many tokens, of which the token at position num_tokens sees any."""
    return 0 if window is None else max(0, num_tokens + 1 - window) // size


def usable(rows: list[list[int]], windows: tuple[int | None, ...], size: int) -> Found:
    """The longest beginning that every group has the blocks for. `rows`: of each group the block of each place in order, 0 where
    there is none; of a window only the last blocks are needed."""
    end = min(len(row) for row in rows)
    firsts = [0] * len(rows)
    while end:
        firsts = [first_seen(end * size, window, size) for window in windows]
        holes = [max((i for i in range(first, end) if not row[i]), default=-1) for first, row in zip(firsts, rows, strict=True)]
        if max(holes) < 0:
            break
        end = max(holes)
    blocks = [[0] * min(first, end) + row[first:end] for first, row in zip(firsts, rows, strict=True)]
    return Found(end * size, blocks)
