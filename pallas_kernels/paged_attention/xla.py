"""paged_attention in XLA: tiles of query tokens against stretches of context, then decode rows together as in paged_decode.

What several rows begin with is attended to first, once, by tiles of all tokens whatever their row; then each row goes on by itself.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import PoolShape, ceil_div, pad_axis, take
from pallas_kernels.common.online import attend_span, empty_state, finish, normalized
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.paged_decode.xla import Config, attend_pairs, pairs_per_step

QUERY_TILE = 64  # tokens; 128 is as fast for long rows and 10 % slower for rows of 32 tokens, 32 the other way round


def attend(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    num_decode: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
) -> jax.Array:
    """f32[T, H, D]; shapes as in the op."""
    tokens, heads, head_width = q.shape
    kv_heads, block_size, width = kv.shape[3:]
    rows, group = block_tables.shape[0], heads // kv_heads
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "kv_scales": kv_scales}
    tile = min(QUERY_TILE, tokens)
    counts = query_start[1:] - query_start[:-1]
    decodes = jnp.arange(rows) < num_decode[0]
    tiles = jnp.where(decodes, 0, ceil_div(counts, tile))
    ends = jnp.cumsum(tiles)
    q = pad_axis(pad_axis(q.astype(compute_dtype(kv.dtype)), 2, width), 0, tokens + tile).reshape(
        tokens + tile, kv_heads, group, width
    )

    def one(i, state):
        row = jnp.minimum(jnp.sum(ends <= i, dtype=jnp.int32), rows - 1)
        place = (i - take(ends - tiles, row)) * tile  # of this tile's first token among the row's new ones
        start = take(query_start, row) + place
        count, length = take(counts, row), take(context_lens, row)
        at = place + jnp.arange(tile)
        position = length - count + at
        last = jnp.where(at < count, position, -1)
        end = jnp.minimum(position[0] + tile, length)
        begin = jnp.int32(0) if window is None else jnp.maximum(0, position[0] + 1 - window)
        mine = (lax.dynamic_slice_in_dim(x, start, tile).swapaxes(0, 1) for x in (q, *state))
        part, *old = mine
        new = normalized(attend_span(tuple(old), part, kv, layer, take(block_tables, row), last, begin, end, **options))
        return tuple(lax.dynamic_update_slice_in_dim(x, y.swapaxes(0, 1), start, 0) for x, y in zip(state, new, strict=True))

    state = lax.fori_loop(0, ends[-1], one, empty_state((tokens + tile, kv_heads, group), width))
    short = min(rows, tokens)
    lens = jnp.where(decodes, context_lens, 0)[:short]
    part = tuple(x[:short] for x in state)
    config = Config(pairs_per_step(short, block_tables.shape[1], PoolShape(*kv.shape[:2], *kv.shape[3:]), str(kv.dtype)), 1)
    part = normalized(attend_pairs(part, q[:short], kv, layer, block_tables[:short], lens, config=config, **options))
    state = tuple(lax.dynamic_update_slice_in_dim(x, y, 0, 0) for x, y in zip(state, part, strict=True))
    out = state[2] if sinks is None else finish(state, sinks.astype(jnp.float32).reshape(kv_heads, group))[0]
    return out[:tokens].reshape(tokens, heads, width)[..., :head_width]
