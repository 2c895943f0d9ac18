"""Which rows of a step begin with the same blocks, so that attention reads these once for all of them.

Juravsky et al. 2024, Hydragen (arXiv 2402.05099): attention to a shared prefix is one dense product of all the rows' queries; the
online softmax joins it with what each row attends to by itself.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import check

MIN_MEMBERS = 4  # fewer rows copy the blocks each for itself: all queries take part in the shared product, whoever is a member


class SharedPrefix(NamedTuple):
    """The first blocks of several rows. All of their tokens come before every member's first query."""

    table: jax.Array  # i32[B]: the ids; meaningful are the first `count`
    count: jax.Array  # i32: how many blocks; 0: nothing is shared
    member: jax.Array  # bool[S]


def find_shared(block_tables: jax.Array, context_lens: jax.Array, query_counts: jax.Array, block_size: int) -> SharedPrefix:
    """The one prefix that saves most blocks: its length times the rows that would have read it for themselves.

    block_tables i32[S, B]; context_lens and query_counts i32[S], lengths with and number of the row's own tokens. Compares every
    two rows, S * S * B ids.
    """
    rows, width = block_tables.shape
    before = lax.div(context_lens - query_counts, jnp.int32(block_size))  # blocks that every query of the row sees whole
    column = jnp.arange(width, dtype=jnp.int32)
    differ = block_tables[:, None] != block_tables[None]
    common = jnp.min(jnp.where(differ, column, width), axis=2)
    common = jnp.minimum(common, jnp.minimum(before[:, None], before))
    members = jnp.sum(common[:, :, None] > column, axis=1, dtype=jnp.int32)  # [S, B]: of a prefix of b + 1 blocks of row s
    saved = jnp.where(members >= MIN_MEMBERS, (members - 1) * (column + 1), 0).reshape(-1)
    best = jnp.argmax(saved).astype(jnp.int32)
    leader = lax.div(best, jnp.int32(width))
    count = jnp.where(saved[best] > 0, lax.rem(best, jnp.int32(width)) + 1, 0)
    found = SharedPrefix(block_tables[leader], count, (common[leader] >= count) & (count > 0))
    return SharedPrefix(*lax.optimization_barrier(tuple(found)))  # or each layer computes it again


def check_shared(shared: SharedPrefix | None, window: int | None) -> None:
    """ValueError where a prefix comes with a window, which rows of different lengths have at different places."""
    check(shared is None or window is None, f"a shared prefix must come without a window; got window {window}")
