"""paged_decode in XLA: a loop over the live blocks of all rows with an online softmax; the whole context is never gathered.

The work is one list of (row, block) pairs, row after row, so that rows of different lengths cost what they hold: an iteration
takes the next pairs, makes a partial softmax of each, and folds them into the state of their rows. Where the list can be long,
long iterations come first and short ones do the rest: an iteration costs the same however few of its pairs are real.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import MASKED, PoolShape, ceil_div, einsum_f32, flat_blocks, pad_axis, scores, take, take_blocks
from pallas_kernels.common.online import State, empty_state, finish
from pallas_kernels.common.quantized import block_scales, compute_dtype
from pallas_kernels.common.spec import AttentionSpec
from pallas_kernels.common.targets import Chip, is_cpu
from pallas_kernels.common.tuning import attention_key, tuned

STEP_BYTES = 4 << 20  # K and V in a short iteration, at most, in the dtype of the products
LONG_BYTES = 16 << 20  # and in a long one: of more than 32 MiB the C library gives the memory back after each call
MAX_PAIRS = 32  # of a short iteration


@dataclass(frozen=True)
class Config:
    pairs: int  # (row, block) pairs that a short iteration takes
    long: int  # how many times those of a short iteration a long one takes; 1: there are only short ones, and half to compile


def pairs_per_step(rows: int, blocks: int, pool: PoolShape, dtype: str) -> int:
    """How many (row, block) pairs a short iteration takes: enough to pay for its overhead, few for few rows, whose lists are
    short."""
    return max(1, min(STEP_BYTES // block_bytes(pool, dtype), MAX_PAIRS, 4 * rows, rows * blocks))


def block_bytes(pool: PoolShape, dtype: str) -> int:
    """Of a block's K and V, in the dtype of the products."""
    return 2 * pool.kv_heads * pool.block_size * pool.width * compute_dtype(dtype).itemsize


def default_config(spec: AttentionSpec, chip: Chip | None) -> Config:
    """On a CPU a long iteration takes at most a quarter of the largest cache, where its copies must be when they are read."""
    rows = max(2, spec.rows)
    pairs = pairs_per_step(rows, spec.blocks, spec.pool, spec.dtype)
    cache = chip.fast_memory if is_cpu(chip) else 0
    most = min(LONG_BYTES, cache // 4 or LONG_BYTES) // (pairs * block_bytes(spec.pool, spec.dtype))
    return Config(pairs, max(1, min(4, spec.rows, most, rows * spec.blocks // (2 * pairs))))


def config_of(spec: AttentionSpec, chip: Chip | None) -> Config:
    """What was tuned for such calls, if this one's list is as long as a long iteration."""
    default = default_config(spec, chip)
    config = tuned("paged_decode", "xla", chip, attention_key(spec), default)
    return config if config.pairs * config.long <= max(2, spec.rows) * spec.blocks else default


def candidates(spec: AttentionSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    most = max(2, spec.rows) * spec.blocks
    others = [Config(pairs, long) for pairs in (4, 8, 16, 32, 64) for long in (1, 2, 4, 8) if pairs * long <= most]
    default = default_config(spec, chip)
    return [default, *(config for config in others if config != default)]


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
    kv_scales: jax.Array | None,
    config: Config,
) -> tuple[jax.Array, jax.Array]:
    """(f32[S, H, D], f32[S, H]); shapes as in the op."""
    wanted, heads, head_width = q.shape
    if wanted == 1:  # with one row XLA:CPU re-lays the whole pool around the gather
        q, block_tables, context_lens = pad_axis(q, 0, 2), pad_axis(block_tables, 0, 2), pad_axis(context_lens, 0, 2)
    kv_heads, block_size, width = kv.shape[3:]
    rows, group = q.shape[0], heads // kv_heads
    q = pad_axis(q.astype(compute_dtype(kv.dtype)), 2, width).reshape(rows, kv_heads, group, width)
    state = empty_state((rows, kv_heads, group), width)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "kv_scales": kv_scales}
    state = attend_pairs(state, q, kv, layer, block_tables, context_lens, config=config, **options)
    out, lse = finish(state, None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group))
    return out.reshape(rows, heads, width)[:wanted, :, :head_width], lse.reshape(rows, heads)[:wanted]


def attend_pairs(
    state: State,
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    kv_scales: jax.Array | None,
    config: Config,
) -> State:
    """The state [S, K, G] of queries q [S, K, G, D'] after all blocks of each row. Rows of length 0 stay as they are. Reads
    each block once, and writes and reads a copy of it."""
    blocks, _, kv_heads, block_size, width = kv.shape[1:]
    rows = q.shape[0]
    few = min(config.pairs, rows * block_tables.shape[1])
    many = few * config.long
    flat = flat_blocks(kv)
    begin = jnp.zeros_like(context_lens) if window is None else jnp.maximum(context_lens - window, 0)
    total, work = work_list(context_lens, begin, block_tables, many, block_size)

    def step(first, pairs, carry):
        near = min(pairs, rows)  # rows that the pairs of an iteration can belong to
        row, block, start, end = lax.dynamic_slice_in_dim(work, first, pairs, axis=1)
        place = jnp.arange(block_size)
        seen = (place >= start[:, None]) & (place < end[:, None])
        base = jnp.minimum(row[0], rows - near)
        # Kept apart from what follows, or the gathers compute all this again for every element.
        at, seen, row, base = lax.optimization_barrier((2 * (layer * blocks + block), seen, row, base))
        k, v = (take_blocks(flat, x).astype(q.dtype) for x in (at, at + 1))
        v = jnp.where(seen[:, None, :, None], v, 0)  # 0 * NaN is NaN
        s = einsum_f32("wkgd,wkpd->wkgp", take(q, row), k)
        v_scale = None
        if kv_scales is not None:
            k_scale, v_scale = (x[:, :, None] for x in block_scales(kv_scales, at, kv_heads, block_size))
            s *= k_scale
        s = jnp.where(seen[:, None, None], scores(s, scale, soft_cap), MASKED)

        top, total, acc = (lax.dynamic_slice_in_dim(x, base, near) for x in carry)
        mine = (row - base) == jnp.arange(near)[:, None]
        new_top = jnp.maximum(top, jnp.where(mine[..., None, None], s.max(-1), MASKED).max(1))
        p = jnp.exp(s - take(new_top, row - base)[..., None])
        weights = p if v_scale is None else p * jnp.where(seen[:, None, None], v_scale, 0)
        part = einsum_f32("wkgp,wkpd->wkgd", weights.astype(v.dtype), v)
        keep = jnp.exp(top - new_top)
        total = total * keep + fold(mine, p.sum(-1))
        acc = acc * keep[..., None] + fold(mine, part)
        return tuple(lax.dynamic_update_slice_in_dim(x, new, base, 0) for x, new in zip(carry, (new_top, total, acc), strict=True))

    rounds = jnp.int32(0)
    if config.long > 1:
        rounds = lax.div(total, jnp.int32(many))
        state = lax.fori_loop(0, rounds, lambda i, c: step(i * many, many, c), state)
    left = ceil_div(total - rounds * many, few)
    return lax.fori_loop(0, left, lambda i, c: step(rounds * many + i * few, few, c), state)


def work_list(lens: jax.Array, begin: jax.Array, tables: jax.Array, pairs: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """(how many (row, block) pairs there are; i32[4, S * B rounded up]: of each pair its row, its block in the pool, and the first
    place and the end, in the block, of what the row sees).

    Rows of length 0 between others get a pair that sees nothing, of the scrap block, and so do the pairs past the count: the rows
    of neighbouring pairs are neighbours.
    """
    rows, width = tables.shape
    first = lax.div(begin, jnp.int32(block_size))
    number = jnp.arange(rows, dtype=jnp.int32)
    live = lens > 0
    before_last = number <= jnp.max(jnp.where(live, number, -1))
    counts = jnp.where(live, ceil_div(lens, block_size) - first, before_last)
    ends = jnp.cumsum(counts)
    pair = jnp.arange(-(-rows * width // pairs) * pairs, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(ends <= pair[:, None], axis=1, dtype=jnp.int32), rows - 1)
    real = (pair < ends[-1]) & take(live, row)
    block = jnp.where(real, pair - take(ends - counts - first, row), 0)
    ids = jnp.where(real, tables[row, block], 0)
    start = block * block_size
    return ends[-1], jnp.stack([row, ids, take(begin, row) - start, jnp.where(real, take(lens, row) - start, 0)])


def fold(mine: jax.Array, parts: jax.Array) -> jax.Array:
    """parts [W, ...] summed by row, [R, ...]; mine bool[R, W] says whose they are. A product with zeros and ones, in full f32:
    on CPU much faster than a scatter."""
    flat = parts.reshape(parts.shape[0], -1)
    out = jnp.dot(mine.astype(jnp.float32), flat, precision=lax.Precision.HIGHEST)
    return out.reshape(mine.shape[0], *parts.shape[1:])
