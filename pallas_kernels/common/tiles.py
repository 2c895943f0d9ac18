"""Tiles of query tokens, of rows with any number of them: a grid of fixed size goes over these."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.common.layout import ceil_div, take


class Tiles(NamedTuple):
    """i32 arrays, one entry a tile: the row that it is of, its first token in q, the position of that token in the row's context,
    and how many tokens it has; of the tiles past the last all are 0 but the row."""

    row: jax.Array
    start: jax.Array
    position: jax.Array
    count: jax.Array


def tiles_of(query_start: jax.Array, context_lens: jax.Array, num_decode: jax.Array, tokens: int, tile: int) -> Tiles:
    """The tiles of all rows behind the first num_decode[0], at most `tile` tokens each; arrays of T // tile + S entries, as many
    as there can be. query_start and context_lens as in paged_attention."""
    rows = context_lens.shape[0]
    counts = query_start[1:] - query_start[:-1]
    each = jnp.where(jnp.arange(rows) < num_decode[0], 0, ceil_div(counts, tile))
    ends = jnp.cumsum(each)
    number = jnp.arange(tokens // tile + rows, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(ends <= number[:, None], axis=1, dtype=jnp.int32), rows - 1)
    place = (number - take(ends - each, row)) * tile
    real = number < ends[-1]
    start, position = (jnp.where(real, take(x, row) + place, 0) for x in (query_start, context_lens - counts))
    return Tiles(row, start, position, jnp.where(real, jnp.clip(take(counts, row) - place, 0, tile), 0))


def places_in(tiles: Tiles, tokens: int, tile: int) -> jax.Array:
    """i32[T]: where each token is in an array of whole tiles one after the other, with room for `tile` tokens each; -1: in none."""
    token = jnp.arange(tokens, dtype=jnp.int32)
    number = jnp.sum((tiles.start <= token[:, None]) & (tiles.count > 0), axis=1, dtype=jnp.int32) - 1
    offset = token - take(tiles.start, jnp.maximum(number, 0))
    inside = (number >= 0) & (offset < take(tiles.count, jnp.maximum(number, 0)))
    return jnp.where(inside, number * tile + offset, -1)
