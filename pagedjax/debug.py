"""Debug mode: what a wrong block table would read or write is made to show."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pagedjax.device.sharding import block_in_host_memory
from pagedjax.state import Pool

GUARD = 12345.0  # what the guard block is filled with, and where it has 8 bits:
GUARD_OF_8_BITS = 96


class PoolWatch:
    """Fills every block with NaN when it is given out, so that whoever reads a slot before it was written gets NaN, and looks after
    every step whether somebody wrote to the last block of the pool, which is never given out. For tests: each step waits."""

    def __init__(self, read: Callable[..., Any], write: Callable[..., Any], kv: Pool, mesh: Mesh):
        """`read` and `write`: compile.lower_read_block and lower_write_block, compiled; kv: the pool, abstract or not."""
        self._read, self._write, self._guard = read, write, np.asarray([jax.tree.leaves(kv)[0].shape[1] - 1], np.int32)

        def filled(array: jax.Array, value: float, of_8_bits: int) -> jax.Array:
            layers, _, *block = array.shape
            value = of_8_bits if array.dtype.itemsize == 1 else value
            return jax.device_put(np.full((layers, *block), value, array.dtype), block_in_host_memory(mesh))

        self._poison = jax.tree.map(lambda array: filled(array, np.nan, 0), kv)  # of 8 bits: the scales are NaN
        self._pattern = jax.tree.map(lambda array: filled(array, GUARD, GUARD_OF_8_BITS), kv)

    def start(self, kv: Pool) -> Pool:
        """The pool with its guard."""
        return self._write(kv, self._guard, self._pattern)

    def poison(self, kv: Pool, blocks: Iterable[int]) -> Pool:
        for block in blocks:
            kv = self._write(kv, np.asarray([block], np.int32), self._poison)
        return kv

    def check(self, kv: Pool) -> None:
        """AssertionError where the guard block was written to."""
        same = jax.tree.map(lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), self._read(kv, self._guard), self._pattern)
        assert all(jax.tree.leaves(same)), f"the guard block {self._guard[0]} was written to"
