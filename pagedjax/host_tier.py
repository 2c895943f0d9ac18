"""Blocks that were moved out of the pool, in host memory."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from pagedjax.host.plan import Swap
from pagedjax.state import Pool


class HostTier:
    """A fixed number of places for one block each. What a place holds stays until another block is moved there, so it can be read
    any number of times. Nothing here waits for the device: a block on its way to a place is an array like any other to the
    program that moves it back."""

    def __init__(self, read: Callable[..., Any], write: Callable[..., Any], num_places: int):
        """`read` and `write` are compile.lower_read_block and lower_write_block, compiled."""
        self._read, self._write = read, write
        # a block each, as read_block gives it; place 0 is never given out, as block 0 is not
        self.places: list[Pool | None] = [None] * (num_places + 1)

    def swap_out(self, kv: Pool, swaps: Iterable[Swap]) -> None:
        """Copies blocks of the pool to their places."""
        for block, place in swaps:
            self.places[place] = None  # freed first
            self.places[place] = self._read(kv, np.asarray([block], np.int32))

    def swap_in(self, kv: Pool, swaps: Iterable[Swap]) -> Pool:
        """The pool with what the places hold in their blocks; the old one is used up."""
        for block, place in swaps:
            data = self.places[place]
            assert data is not None, f"place {place} of host memory holds nothing"
            kv = self._write(kv, np.asarray([block], np.int32), data)
        return kv

    @property
    def num_places(self) -> int:
        return len(self.places) - 1

    @property
    def bytes_held(self) -> int:
        """Of host memory, over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.places))
