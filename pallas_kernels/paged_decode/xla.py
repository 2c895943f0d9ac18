"""paged_decode in XLA: a loop over the live blocks of all rows with an online softmax; the whole context is never gathered.

The work is one list of (row, block) pairs, row after row, so that rows of different lengths cost what they hold: an iteration
takes the next pairs, makes a partial softmax of each, and folds them into the state of their rows. Where there are many rows,
long iterations come first and short ones do the rest: an iteration costs the same however few of its pairs are real.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import LOWEST, MASKED, ceil_div, flat_blocks, pad_axis, scores, take, take_blocks

STEP_BYTES = 4 << 20  # K and V moved in a short iteration, at most
MAX_PAIRS = 32  # of a short iteration


def pairs_per_step(rows: int, blocks: int, block_bytes: int) -> int:
    """How many (row, block) pairs a short iteration takes: enough to pay for its overhead, few for few rows, whose lists are
    short."""
    return max(1, min(STEP_BYTES // block_bytes, MAX_PAIRS, 4 * rows, rows * blocks))


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
    long: int = 1,
) -> tuple[jax.Array, jax.Array]:
    """(f32[S, H, D], f32[S, H]); shapes as in the op. Reads each live block once, and writes and reads a copy of it.

    long: how many times the pairs of a short iteration a long one takes; 1: there are only short ones, and half as much to compile.
    """
    wanted, heads, head_width = q.shape
    if wanted == 1:  # with one row XLA:CPU re-lays the whole pool around the gather
        q, block_tables, context_lens = pad_axis(q, 0, 2), pad_axis(block_tables, 0, 2), pad_axis(context_lens, 0, 2)
    _, blocks, _, kv_heads, block_size, width = kv.shape
    rows, group = q.shape[0], heads // kv_heads
    block_bytes = 2 * kv_heads * block_size * width * kv.dtype.itemsize
    few = pairs_per_step(rows, block_tables.shape[1], block_bytes)
    many = few * long
    q = pad_axis(q.astype(kv.dtype), 2, width).reshape(rows, kv_heads, group, width)
    flat = flat_blocks(kv)

    # Live rows first, so that the rows of neighbouring pairs are neighbours. The same in every layer: computed once a step.
    live = context_lens > 0
    (order,) = jnp.nonzero(live, size=rows, fill_value=rows - 1)
    q, tables = take(q, order), take(block_tables, order)
    lens = jnp.where(jnp.arange(rows) < jnp.sum(live), take(context_lens, order), 0)
    begin = jnp.zeros_like(lens) if window is None else jnp.maximum(lens - window, 0)
    work = work_list(lens, begin, tables, many, block_size)

    def step(first, pairs, carry):
        near = min(pairs, rows)  # rows that the pairs of an iteration can belong to
        row, block, place, lo, hi = (lax.dynamic_slice_in_dim(x, first, pairs) for x in work[1:])
        place = place[:, None] + jnp.arange(block_size)
        seen = (place >= lo[:, None]) & (place < hi[:, None])
        base = jnp.minimum(row[0], rows - near)
        # Kept apart from what follows, or the gathers compute all this again for every element.
        at, seen, row, base = lax.optimization_barrier((2 * (layer * blocks + block), seen, row, base))
        k, v = take_blocks(flat, at), take_blocks(flat, at + 1)
        v = jnp.where(seen[:, None, :, None], v, 0)  # 0 * NaN is NaN
        s = jnp.einsum("wkgd,wkpd->wkgp", take(q, row), k, preferred_element_type=jnp.float32)
        s = jnp.where(seen[:, None, None], scores(s, scale, soft_cap), MASKED)

        top, total, acc = (lax.dynamic_slice_in_dim(x, base, near) for x in carry)
        mine = (row - base) == jnp.arange(near)[:, None]
        new_top = jnp.maximum(top, jnp.where(mine[..., None, None], s.max(-1), MASKED).max(1))
        p = jnp.exp(s - take(new_top, row - base)[..., None])
        part = jnp.einsum("wkgp,wkpd->wkgd", p.astype(v.dtype), v, preferred_element_type=jnp.float32)
        keep = jnp.exp(top - new_top)
        total = total * keep + fold(mine, p.sum(-1))
        acc = acc * keep[..., None] + fold(mine, part)
        return tuple(lax.dynamic_update_slice_in_dim(x, new, base, 0) for x, new in zip(carry, (new_top, total, acc), strict=True))

    shape = (rows, kv_heads, group)
    start = (jnp.full(shape, LOWEST, jnp.float32), jnp.zeros(shape, jnp.float32), jnp.zeros((*shape, width), jnp.float32))
    rounds = 0 if long == 1 else work[0] // many
    carry = start if long == 1 else lax.fori_loop(0, rounds, lambda i, c: step(i * many, many, c), start)
    left = ceil_div(work[0] - rounds * many, few)
    top, total, acc = lax.fori_loop(0, left, lambda i, c: step(rounds * many + i * few, few, c), carry)
    out, lse = finish(top, total, acc, None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group))
    rank = jnp.maximum(jnp.cumsum(live.astype(jnp.int32)) - 1, 0)
    out = jnp.where(live[:, None, None], take(out.reshape(rows, heads, width), rank), 0)
    lse = jnp.where(live[:, None], take(lse.reshape(rows, heads), rank), -jnp.inf)
    return out[:wanted, :, :head_width], lse[:wanted]


def work_list(lens: jax.Array, begin: jax.Array, tables: jax.Array, pairs: int, block_size: int) -> tuple[jax.Array, ...]:
    """(how many (row, block) pairs there are, then of each pair, i32[S * B rounded up]: its row, its block in the pool, the
    place of the block's first token in the row, and the first place and the end of what the row sees). Pairs past the count see
    nothing, of the scrap block."""
    rows, width = tables.shape
    first = begin // block_size
    counts = ceil_div(lens, block_size) - first
    ends = jnp.cumsum(counts)
    pair = jnp.arange(-(-rows * width // pairs) * pairs, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, pair, side="right").astype(jnp.int32), rows - 1)
    real = pair < ends[-1]
    block = jnp.where(real, pair - (take(ends, row) - take(counts, row)) + take(first, row), 0)
    ids = jnp.where(real, tables[row, block], 0)
    return ends[-1], row, ids, block * block_size, take(begin, row), jnp.where(real, take(lens, row), 0)


def fold(mine: jax.Array, parts: jax.Array) -> jax.Array:
    """parts [W, ...] summed by row, [R, ...]; mine bool[R, W] says whose they are. A product with zeros and ones, in full f32:
    on CPU much faster than a scatter."""
    flat = parts.reshape(parts.shape[0], -1)
    out = jnp.dot(mine.astype(jnp.float32), flat, precision=lax.Precision.HIGHEST)
    return out.reshape(mine.shape[0], *parts.shape[1:])


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
