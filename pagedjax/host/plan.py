"""What the scheduler asks of a step, and what the step answers: plain values. Those made for each row and step are named tuples,
which take half the time of a frozen dataclass to make."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from pagedjax.host.request import Logprobs, Request


class Row(NamedTuple):
    """`count` tokens of one sequence in a step, from position `start`."""

    request_id: str
    index: int
    epoch: int
    lane: int
    start: int
    count: int
    tokens: tuple[int, ...] | None  # None: one token, still on the device
    table: np.ndarray  # i32[G, B]; the sequence's own, read when the step is packed
    steps: int  # decode steps this row may take in the dispatch; 0: no token is sampled
    mask: np.ndarray | None  # u32[words]: the tokens that may be sampled, where that changes with each
    targets: tuple[int, ...] | None  # tokens whose prompt logprobs are wanted: those after positions start, start + 1, …


@dataclass(frozen=True)
class Entry:
    """A sequence that takes a lane with this plan: what the lane must hold."""

    lane: int
    request: Request
    index: int
    tokens: tuple[int, ...]
    max_len: int
    mask: np.ndarray | None = None  # u32[words]: the tokens that may be sampled first


class Copy(NamedTuple):
    """Block `source` of the pool to block `target`, all layers of its group."""

    source: int
    target: int


class Swap(NamedTuple):
    """A block of the pool and its place in host memory."""

    block: int
    place: int


@dataclass(frozen=True)
class Plan:
    """One dispatch. Rows with one token come first.

    Its parts happen in this order: swap_out (pool to host memory), swap_in (back), copies, then the step; each reads what the one
    before it left. `fresh` is only filled in debug mode, where these blocks are poisoned before anything comes in.
    """

    rows: tuple[Row, ...]
    entries: tuple[Entry, ...]
    steps: int
    copies: tuple[Copy, ...] = ()
    swap_out: tuple[Swap, ...] = ()
    swap_in: tuple[Swap, ...] = ()
    fresh: tuple[int, ...] = ()  # blocks that were given out

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)

    @property
    def num_decode(self) -> int:
        return sum(row.count == 1 for row in self.rows)


class RowResult(NamedTuple):
    """What a step gave a row: sampled tokens, their logprobs where asked for, and prompt logprobs of its positions."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    scored: tuple[Logprobs, ...] = ()
