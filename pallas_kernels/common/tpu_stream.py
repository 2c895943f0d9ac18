"""Blocks of the pool on their way into the VMEM of a TPU: an attention kernel's work as a list of jobs, and one stream of the
blocks of all, always ahead of the arithmetic."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.counting import copied

OPENS, CLOSES = 1, 2  # bits of Jobs.state


class Jobs(NamedTuple):
    """i32[C, M] each: M jobs for each of C cores (or parts of the context). A job is a tile of queries that attends to a range of
    a row's blocks; one without blocks does no more than open and close its tile."""

    tile: jax.Array  # never falls along M
    row: jax.Array  # of the block tables
    first: jax.Array  # block of the row
    count: jax.Array  # blocks
    base: jax.Array  # position in the row's context of the tile's first token, as if it were the row's
    begin: jax.Array  # first token of the tile that is the row's
    end: jax.Array  # after the last
    state: jax.Array  # OPENS: the tile's first job; CLOSES: its last


@dataclass(frozen=True)
class Config:
    """Sizes of an attention kernel."""

    tokens: int  # a tile; 1 for decode
    fetch: int  # blocks a chunk
    compute: int  # blocks that are computed at once; divides fetch
    buffers: int  # chunks in VMEM


def scalars(jobs: Jobs) -> tuple[jax.Array, jax.Array]:
    """(i32[C * M * 8], i32[C * (M + 1)]): the jobs as `JobReader` reads them, and for each place the next job with blocks at or
    after it, M where there is none."""
    cores, most = jobs.tile.shape
    number = jnp.broadcast_to(jnp.arange(most, dtype=jnp.int32), (cores, most))
    ahead = jnp.concatenate([jnp.where(jobs.count > 0, number, most), jnp.full((cores, 1), most, jnp.int32)], 1)
    return jnp.stack(jobs, -1).reshape(-1).astype(jnp.int32), lax.cummin(ahead, axis=1, reverse=True).reshape(-1)


@dataclass(frozen=True)
class JobReader:
    """What `scalars` gives, in SMEM, as one core sees it."""

    jobs: Any
    ahead: Any
    core: jax.Array | int
    most: Any  # M

    def get(self, job: jax.Array, field: str) -> jax.Array:
        return self.jobs[(self.core * self.most + job) * len(Jobs._fields) + Jobs._fields.index(field)]

    def next(self, job: jax.Array) -> jax.Array:
        """The first with blocks at or after this one; M: none."""
        return self.ahead[self.core * (self.most + 1) + job]


def slot_of(number: jax.Array, buffers: int) -> jax.Array:
    """The buffer of a chunk, by its number in the stream."""
    return lax.rem(number, jnp.int32(buffers))


@dataclass(frozen=True)
class Stream:
    """The chunks of all jobs of a core, in order. One copy a block (all heads, keys and values), one more for its scales."""

    sources: tuple[Any, ...]  # kv[J, N, ...] and, per token, its scales
    buffers: tuple[Any, ...]  # [buffers, fetch, ...] of each
    arrived: Any  # a semaphore a buffer
    place: Any  # i32[4] in SMEM: the next chunk to start (its job, and the first of its blocks), chunks started, chunks taken
    tables: Any  # i32[S * B]
    width: int  # B
    jobs: JobReader
    layer: jax.Array
    config: Config

    def open(self) -> None:
        """Starts as many chunks as there are buffers, but for the one that will be in use."""
        self.place[0] = self.jobs.next(jnp.int32(0))
        self.place[1] = self.place[2] = self.place[3] = 0
        for _ in range(self.config.buffers - 1):
            self.start_next()

    def start_next(self) -> None:
        """Starts the next chunk, if there is one, into the buffer that was in use last."""
        job = self.place[0]

        @pl.when(job < self.jobs.most)
        def _() -> None:
            fetch, block = self.config.fetch, self.place[1]
            left = self.jobs.get(job, "count") - block
            base = self.jobs.get(job, "row") * self.width + self.jobs.get(job, "first") + block
            slot = slot_of(self.place[2], self.config.buffers)

            def start(i: jax.Array, _: None) -> None:
                block = self.tables[base + i]
                for name, copy in zip(("block", "scales"), self.copies(block, slot, i), strict=False):
                    copied(name, copy.dst_ref, self.layer, block)
                    copy.start()

            lax.fori_loop(0, jnp.minimum(left, fetch), start, None)
            self.place[2] += 1
            self.place[0] = jnp.where(left > fetch, job, self.jobs.next(job + 1))
            self.place[1] = jnp.where(left > fetch, block + fetch, 0)

    def take(self, blocks: jax.Array) -> jax.Array:
        """Waits for the next chunk, which has so many blocks. The buffer that it is in."""
        slot = slot_of(self.place[3], self.config.buffers)

        def wait(i: jax.Array, _: None) -> None:
            for copy in self.copies(0, slot, i):
                copy.wait()

        lax.fori_loop(0, blocks, wait, None)
        self.place[3] += 1
        return slot

    def copies(self, block: jax.Array | int, slot: jax.Array, i: jax.Array) -> list[Any]:
        pairs = zip(self.sources, self.buffers, strict=True)
        return [pltpu.make_async_copy(x.at[self.layer, block], y.at[slot, i], self.arrived.at[slot]) for x, y in pairs]
