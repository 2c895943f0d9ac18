"""The online softmax: its state, and a tile of queries that attends to a stretch of one block table."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import LOWEST, MASKED, ceil_div, einsum_f32, flat_blocks, pad_axis, scores, take_blocks
from pallas_kernels.common.quantized import block_scales

CHUNK = 128  # tokens of context an iteration; 256 takes twice the time for 128 tokens on CPU

State = tuple[jax.Array, ...]  # three: running maximum [...], denominator [...] and weighted sum [..., D']; f32


def empty_state(shape: tuple[int, ...], width: int) -> State:
    """Of queries [...] that have seen nothing yet."""
    return jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, width), jnp.float32)


def finish(state: State, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(out [..., D'], lse [...]); nothing seen gives 0 and -inf. sinks [..., broadcast]: one more logit without a value."""
    top, total, acc = state
    empty = total == 0
    if sinks is not None:
        new_top = jnp.maximum(top, sinks)
        keep = jnp.exp(top - new_top)
        total = jnp.where(empty, 0, total * keep + jnp.exp(sinks - new_top))
        acc, top = acc * keep[..., None], new_top
    safe = jnp.where(empty, 1, total)
    return jnp.where(empty[..., None], 0, acc / safe[..., None]), jnp.where(empty, -jnp.inf, top + jnp.log(safe))


def normalized(state: State) -> State:
    """The same state with denominators of 1 (0 where nothing was seen): its weighted sum is the result so far."""
    out, lse = finish(state, None)
    return jnp.maximum(lse, LOWEST), (state[1] > 0).astype(jnp.float32), out


def attend_span(
    state: State,
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    table: jax.Array,
    last: jax.Array,
    begin: jax.Array | int,
    end: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    kv_scales: jax.Array | None,
) -> State:
    """The state [K, t, G] of t queries q [K, t, G, D'] after the tokens begin to end - 1 of the row of blocks `table` i32[B].

    last i32[t]: the last place that a query sees (the first is by `window`); -1: it sees nothing, and its state stays as it is.
    kv_scales: as in the ops. A loop over chunks of blocks; none where end <= begin.
    """
    kv_heads, tile, group, width = q.shape
    blocks, block_size = kv.shape[1], kv.shape[4]
    per_chunk = max(1, min(CHUNK // block_size, table.shape[0]))
    chunk = per_chunk * block_size
    table = pad_axis(table, 0, -(-table.shape[0] // per_chunk) * per_chunk)
    flat = flat_blocks(kv)
    in_row = lambda x: x.swapaxes(0, 1).reshape(kv_heads, chunk, *x.shape[3:])  # [blocks, K, P, …] -> [K, tokens, …]
    q = q.reshape(kv_heads, tile * group, width)
    query = jnp.repeat(last, group)[:, None]

    def step(i, carry):
        top, total, acc = carry
        ids = lax.dynamic_slice_in_dim(table, i * per_chunk, per_chunk)
        place = i * chunk + jnp.arange(chunk)
        inside = (place >= begin) & (place < end)
        ids = jnp.where(inside.reshape(per_chunk, block_size).any(1), ids, 0)
        at = 2 * (layer * blocks + ids)
        k, v = (in_row(take_blocks(flat, x)).astype(q.dtype) for x in (at, at + 1))
        seen = inside & (place <= query)
        if window is not None:
            seen &= place > query - window
        s = einsum_f32("kqd,kcd->kqc", q, k)
        v_scale = None
        if kv_scales is not None:
            k_scale, v_scale = (in_row(x)[:, None] for x in block_scales(kv_scales, at, kv_heads, block_size))
            s *= k_scale
        s = jnp.where(seen, scores(s, scale, soft_cap), MASKED)
        v = jnp.where(inside[:, None], v, 0)  # 0 * NaN is NaN
        new_top = jnp.maximum(top, s.max(-1))
        p = jnp.exp(s - new_top[..., None])
        keep = jnp.exp(top - new_top)
        weights = p if v_scale is None else p * jnp.where(inside, v_scale, 0)
        part = einsum_f32("kqc,kcd->kqd", weights.astype(v.dtype), v)
        acc = acc * keep[..., None] + part
        return new_top, total * keep + p.sum(-1), acc

    flat_state = tuple(x.reshape(kv_heads, tile * group, *x.shape[3:]) for x in state)
    first, after = lax.div(jnp.asarray(begin, jnp.int32), jnp.int32(chunk)), ceil_div(jnp.asarray(end, jnp.int32), chunk)
    top, total, acc = (x.reshape(kv_heads, tile, group, *x.shape[2:]) for x in lax.fori_loop(first, after, step, flat_state))
    return top, total, acc
