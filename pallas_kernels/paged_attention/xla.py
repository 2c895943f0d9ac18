"""paged_attention in XLA: decode rows together by paged_decode, the others by tiles of query tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import LOWEST, MASKED, ceil_div, flat_blocks, pad_axis, scores, take_blocks
from pallas_kernels.paged_decode.xla import decode, finish

QUERY_TILE = 128  # tokens
CHUNK = 128  # tokens of context an iteration; 256 takes twice the time for 128 tokens on CPU


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
) -> jax.Array:
    """f32[T, H, D]; shapes as in the op."""
    tokens, heads, head_width = q.shape
    rows = block_tables.shape[0]
    q = q.astype(kv.dtype)
    short = min(rows, tokens)
    lens = jnp.where(jnp.arange(short) < num_decode[0], context_lens[:short], 0)
    decoded, _ = decode(
        q[:short], kv, layer, block_tables[:short], lens, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks
    )

    tile = min(QUERY_TILE, tokens)
    counts = query_start[1:] - query_start[:-1]
    tiles = jnp.where(jnp.arange(rows) < num_decode[0], 0, ceil_div(counts, tile))
    ends = jnp.cumsum(tiles)
    padded = jnp.pad(q, ((0, tile), (0, 0), (0, 0)))

    def one(i, out):
        row = jnp.sum(ends <= i, dtype=jnp.int32)
        begin = (i - ends[row] + tiles[row]) * tile  # of this tile among the row's tokens
        start = query_start[row] + begin
        part = lax.dynamic_slice_in_dim(padded, start, tile)
        position = context_lens[row] - counts[row] + begin
        live = counts[row] - begin
        table = block_tables[row]
        new = attend_tile(part, kv, layer, table, position, live, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks)
        old = lax.dynamic_slice_in_dim(out, start, tile)
        new = jnp.where((jnp.arange(tile) < live)[:, None, None], new, old)
        return lax.dynamic_update_slice_in_dim(out, new, start, 0)

    out = jnp.pad(decoded, ((0, tokens + tile - short), (0, 0), (0, 0)))
    return lax.fori_loop(0, ends[-1], one, out)[:tokens]


def attend_tile(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_table: jax.Array,
    position: jax.Array,
    live: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> jax.Array:
    """f32[t, H, D] for t query tokens q [t, H, D] of one row at consecutive positions, `live` of them real.

    block_table i32[B]; position i32: of the first token. A loop over chunks of blocks, from the window's first to the one of
    the last live token.
    """
    tile, heads, head_width = q.shape
    _, blocks, _, kv_heads, block_size, width = kv.shape
    group = heads // kv_heads
    per_chunk = max(1, min(CHUNK // block_size, block_table.shape[0]))
    chunk = per_chunk * block_size
    table = pad_axis(block_table, 0, -(-block_table.shape[0] // per_chunk) * per_chunk)
    flat = flat_blocks(kv)
    q = pad_axis(q, 2, width).reshape(tile, kv_heads, group, width).transpose(1, 0, 2, 3).reshape(kv_heads, tile * group, width)
    query = jnp.repeat(position + jnp.arange(tile), group)
    end = position + jnp.minimum(live, tile)
    begin = jnp.int32(0) if window is None else jnp.maximum(position + 1 - window, 0)

    def step(i, carry):
        top, total, acc = carry
        ids = lax.dynamic_slice_in_dim(table, i * per_chunk, per_chunk)
        place = i * chunk + jnp.arange(chunk)
        inside = (place >= begin) & (place < end)
        ids = jnp.where(inside.reshape(per_chunk, block_size).any(1), ids, 0)
        at = 2 * (layer * blocks + ids)
        k, v = (take_blocks(flat, x).transpose(1, 0, 2, 3).reshape(kv_heads, chunk, width) for x in (at, at + 1))
        seen = inside & (place <= query[:, None])
        if window is not None:
            seen &= place > query[:, None] - window
        s = scores(jnp.einsum("kqd,kcd->kqc", q, k, preferred_element_type=jnp.float32), scale, soft_cap)
        s = jnp.where(seen, s, MASKED)
        v = jnp.where(inside[:, None], v, 0)  # 0 * NaN is NaN
        new_top = jnp.maximum(top, s.max(-1))
        p = jnp.exp(s - new_top[..., None])
        keep = jnp.exp(top - new_top)
        acc = acc * keep[..., None] + jnp.einsum("kqc,kcd->kqd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_top, total * keep + p.sum(-1), acc

    shape = (kv_heads, tile * group)
    start = (jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, width), jnp.float32))
    top, total, acc = lax.fori_loop(begin // chunk, ceil_div(end, chunk), step, start)
    sinks = None if sinks is None else jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, group), (1, tile))
    out, _ = finish(top, total, acc, sinks)
    return out.reshape(kv_heads, tile, group, width).transpose(1, 0, 2, 3).reshape(tile, heads, width)[..., :head_width]
