"""paged_decode in XLA: a loop over blocks with an online softmax; the whole context is never gathered."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import MASKED, ceil_div, flat_blocks, pad_axis, scores, take_blocks


def decode(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """(f32[S, H, D], f32[S, H]); shapes as in the op. Moves the K and V of S blocks an iteration, as many iterations as the
    longest row has blocks (inside its window)."""
    rows, heads, head_width = q.shape
    if rows == 1:  # with one row XLA:CPU re-lays the whole pool around the gather
        q, block_tables, context_lens = pad_axis(q, 0, 2), pad_axis(block_tables, 0, 2), pad_axis(context_lens, 0, 2)
    _, blocks, _, kv_heads, block_size, width = kv.shape
    n = q.shape[0]
    group = heads // kv_heads
    q = pad_axis(q.astype(kv.dtype), 2, width).reshape(n, kv_heads, group, width)
    flat = flat_blocks(kv)
    begin = jnp.zeros_like(context_lens) if window is None else jnp.maximum(context_lens - window, 0)
    first = begin // block_size
    count = ceil_div(context_lens, block_size) - first

    def step(i, carry):
        top, total, acc = carry
        ids = jnp.take_along_axis(block_tables, jnp.minimum(first + i, block_tables.shape[1] - 1)[:, None], 1)[:, 0]
        at = 2 * (layer * blocks + jnp.where(i < count, ids, 0))
        k, v = take_blocks(flat, at), take_blocks(flat, at + 1)
        place = (first + i)[:, None] * block_size + jnp.arange(block_size)
        seen = (place >= begin[:, None]) & (place < context_lens[:, None])
        s = scores(jnp.einsum("skgd,skpd->skgp", q, k, preferred_element_type=jnp.float32), scale, soft_cap)
        s = jnp.where(seen[:, None, None], s, MASKED)
        v = jnp.where(seen[:, None, :, None], v, 0)  # 0 * NaN is NaN
        new_top = jnp.maximum(top, s.max(-1))
        p = jnp.exp(s - new_top[..., None])
        p = jnp.where(seen[:, None, None], p, 0)
        keep = jnp.exp(top - new_top)
        acc = acc * keep[..., None] + jnp.einsum("skgp,skpd->skgd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_top, total * keep + p.sum(-1), acc

    shape = (n, kv_heads, group)
    start = (jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, width), jnp.float32))
    top, total, acc = lax.fori_loop(0, jnp.max(count), step, start)
    out, lse = finish(top, total, acc, None if sinks is None else sinks.reshape(kv_heads, group))
    return out.reshape(n, heads, width)[:rows, :, :head_width], lse.reshape(n, heads)[:rows]


def finish(top: jax.Array, total: jax.Array, acc: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(out [..., D], lse [...]) from the softmax's running maximum, denominator and sum; nothing seen gives 0 and -inf."""
    empty = total == 0
    if sinks is not None:
        new_top = jnp.maximum(top, sinks)
        keep = jnp.exp(top - new_top)
        total = jnp.where(empty, 0, total * keep + jnp.exp(sinks - new_top))
        acc, top = acc * keep[..., None], new_top
    safe = jnp.where(empty, 1, total)
    return jnp.where(empty[..., None], 0, acc / safe[..., None]), jnp.where(empty, -jnp.inf, top + jnp.log(safe))
