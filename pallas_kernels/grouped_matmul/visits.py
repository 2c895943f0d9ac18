"""Which tile of rows is multiplied with which expert's weights on a GPU, as a list that a grid goes over."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Visits(NamedTuple):
    """Rows begin[v] to end[v] - 1, which are inside of the tile that begins at aligned * start[v], belong to expert[v], or (E) to
    nobody, and are to be 0. All i32, with visits of no rows at the end."""

    expert: jax.Array
    start: jax.Array
    begin: jax.Array
    end: jax.Array


def find_visits(group_sizes: jax.Array, tokens: int, rows: int, aligned: int) -> Visits:
    """Tiles of so many rows, each from a multiple of `aligned` on, in which each row is some visit's. A tile is inside of the
    tokens, where there are enough for one; tokens must be a multiple of `aligned`."""
    experts = group_sizes.shape[0]
    ends = jnp.append(jnp.cumsum(group_sizes), tokens).astype(jnp.int32)
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    first = lax.div(starts, jnp.int32(aligned)) * aligned
    tiles = jnp.where(starts < ends, lax.div(ends - first + (rows - 1), jnp.int32(rows)), 0)
    after = jnp.cumsum(tiles)
    groups = min(experts + 1, tokens)  # that have rows, at most
    visit = jnp.arange((tokens + (aligned - 1) * groups) // rows + groups, dtype=jnp.int32)
    expert = jnp.minimum(jnp.sum(after <= visit[:, None], axis=1, dtype=jnp.int32), experts)
    start = first[expert] + (visit - (after - tiles)[expert]) * rows
    begin, end = jnp.maximum(start, starts[expert]), jnp.minimum(start + rows, ends[expert])
    start = jnp.minimum(start, max(0, tokens - rows))
    return Visits(expert, lax.div(start, jnp.int32(aligned)), begin, end)
