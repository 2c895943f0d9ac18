"""Debug mode: what a wrong block table would read or write is made to show."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from pagedjax.device.sharding import block_in_host_memory

GUARD = 12345.0  # what the guard block is filled with


class PoolWatch:
    """Fills every block with NaN when it is given out, so that whoever reads a slot before it was written gets NaN, and looks after
    every step whether somebody wrote to the last block of the pool, which is never given out. For tests: each step waits."""

    def __init__(self, read: Callable[..., Any], write: Callable[..., Any], shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh):
        """`read` and `write`: compile.lower_read_block and lower_write_block, compiled; shape [J, N, 2, K, P, D'] of the pool."""
        layers, blocks, *block = shape
        self._read, self._write, self._guard = read, write, np.asarray([blocks - 1], np.int32)
        self._poison, self._pattern = (
            jax.device_put(np.full((layers, *block), value, dtype), block_in_host_memory(mesh)) for value in (np.nan, GUARD)
        )

    def start(self, kv: jax.Array) -> jax.Array:
        """The pool with its guard."""
        return self._write(kv, self._guard, self._pattern)

    def poison(self, kv: jax.Array, blocks: Iterable[int]) -> jax.Array:
        for block in blocks:
            kv = self._write(kv, np.asarray([block], np.int32), self._poison)
        return kv

    def check(self, kv: jax.Array) -> None:
        """AssertionError where the guard block was written to."""
        found = np.asarray(self._read(kv, self._guard))
        assert (found == np.asarray(self._pattern)).all(), f"the guard block {self._guard[0]} was written to"
