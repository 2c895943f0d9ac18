"""paged_decode through Pallas' Triton backend, which JAX has deprecated: a cross-check of the Mosaic kernels, and what a GPU uses
until there is one for it.

A program takes the G query heads of one kv head of one row, and one of the parts that the row's context is split into. It goes
through that in tiles of tokens, whatever the block size: the table is read for each token, the tile gathered by pointers, and
what lies outside the context or the window is masked, so that it is not read.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.compat import traced_for
from pallas_kernels.common.layout import LOWEST, MASKED, check_pool, pad_axis, precision_of
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.spec import AttentionSpec, attention_spec
from pallas_kernels.common.splits import LOG2E, default_splits, merge, tile_span
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tuning import attention_key, tuned

FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Config:
    tile: int  # tokens of context an iteration; a power of two, at least 16
    warps: int = 4
    stages: int = 2  # tiles in flight


def heuristic(width: int, dtype: str, chip: Chip) -> Config:
    """The largest tile up to 64 tokens whose keys and values take at most half of the shared memory."""
    token = 2 * 2 * width * jnp.dtype(dtype).itemsize
    return Config(tile=next((t for t in (64, 32) if t * token <= chip.fast_memory // 2), 16))


def candidates(spec: AttentionSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    if chip is None:
        return []
    width, dtype = -(-spec.width // 16) * 16, str(compute_dtype(spec.dtype))
    default, most = heuristic(width, dtype, chip), chip.fast_memory // (2 * width * jnp.dtype(dtype).itemsize)
    others = [Config(tile, warps, stages) for tile in (16, 32, 64, 128) for warps in (4, 8) for stages in (2, 3)]
    return [default] + [c for c in others if c != default and c.tile * c.stages <= most]


def config_of(spec: AttentionSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if it is one to try for this one, or else `heuristic`."""
    rule, *others = candidates(spec, chip)
    config = tuned("paged_decode", "triton", chip, attention_key(spec), rule)
    return config if config in others else rule


def pieces(width: int) -> tuple[tuple[int, int], ...]:
    """(start, size) of the pieces of a width that Triton can hold: it knows no sizes but powers of two. 80 is 64 and 16."""
    sizes = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    return tuple((sum(sizes[:i]), size) for i, size in enumerate(sizes))


def supports(spec: AttentionSpec, chip: Chip | None) -> str | None:
    """As of the table of backends."""
    pool = spec.pool
    size = pool.layers * pool.blocks * 2 * pool.kv_heads * pool.block_size * pool.width
    item = jnp.dtype(spec.dtype).itemsize
    if spec.width % 16 and pool.width % 16:
        return f"takes head widths that are multiples of 16, as the pool stores them; got {pool.width}"
    if spec.dtype not in (*FLOATS, "int8", "float8_e4m3fn"):
        return f"takes pools of {', '.join(FLOATS)}, int8 or float8_e4m3fn; got {spec.dtype}"
    if spec.dtype == "float8_e4m3fn" and chip is not None and chip.name == "sm_80":
        return "has no float8_e4m3fn on sm_80, whose processors cannot convert it; use int8"
    if item == 1 and 2**31 <= size <= 2**32:
        return f"counts the {size} bytes of this pool in 32 bits; make the pool smaller than 2 GiB or larger than 4 GiB"
    return None


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """f32; a and b [., .] of one dtype, contracted over these axes."""
    precision = precision_of(a.dtype)
    return lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def attend_tiles(
    q: list[jax.Array],
    kv_ref,
    scales_ref,
    table_ref,
    layer: jax.Array,
    row: jax.Array,
    head: jax.Array,
    begin: jax.Array,
    last: jax.Array,
    span: tuple[jax.Array, jax.Array],
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    tile: int,
    token_scales: bool,
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """(maximum [M] in units of log2, denominator [M], weighted sums [M, w] a piece), f32, of M queries that attend to the tiles
    span[0] to span[1] - 1 of a row.

    q [M, w] a piece of the width; last i32[M]: the last place that a query sees; begin: the first that any of them does.
    kv_ref, scales_ref and table_ref as in the op; without token_scales, scales_ref is f32[2].
    """
    where = pieces(sum(part.shape[1] for part in q))
    block_size, rows = kv_ref.shape[4], last.shape[0]
    end = jnp.max(last) + 1
    across = [start + lax.iota(jnp.int32, size) for start, size in where]
    factor = (1.0 if token_scales else scales_ref[0]) * scale

    def step(i, carry):
        top, total, acc = carry
        place = i * tile + lax.iota(jnp.int32, tile)
        inside = (place >= begin) & (place < end)
        at, slot = lax.div(place, jnp.int32(block_size)), lax.rem(place, jnp.int32(block_size))
        block = plt.load(table_ref.at[row, at], mask=inside, other=0)

        def fetch(which, columns):
            ref = kv_ref.at[layer, block[:, None], which, head, slot[:, None], columns[None, :]]
            return plt.load(ref, mask=inside[:, None], other=jnp.zeros((), kv_ref.dtype)).astype(q[0].dtype)

        s = sum(dot(part, fetch(0, columns), (1, 1)) for part, columns in zip(q, across, strict=True)) * factor
        if token_scales:
            k_scale, v_scale = (plt.load(scales_ref.at[layer, block, w, head, slot], mask=inside, other=0.0) for w in (0, 1))
            s = s * k_scale[None, :]
        if soft_cap is not None:
            s = jnp.tanh(s / soft_cap) * soft_cap
        seen = inside[None, :] & (place[None, :] <= last[:, None])
        if window is not None:
            seen &= place[None, :] > last[:, None] - window
        s = jnp.where(seen, s * LOG2E, MASKED)
        new_top = jnp.maximum(top, jnp.max(s, axis=1))
        p, keep = jnp.exp2(s - new_top[:, None]), jnp.exp2(top - new_top)
        total = total * keep + jnp.sum(p, axis=1)
        if token_scales:
            p = p * v_scale[None, :]
        p = p.astype(q[0].dtype)
        acc = [a * keep[:, None] + dot(p, fetch(1, columns), (1, 0)) for a, columns in zip(acc, across, strict=True)]
        return new_top, total, acc

    empty = jnp.full((rows,), LOWEST, jnp.float32), jnp.zeros((rows,), jnp.float32)
    top, total, acc = lax.fori_loop(*span, step, (*empty, [jnp.zeros((rows, size), jnp.float32) for _, size in where]))
    return top, total, acc if token_scales else [a * scales_ref[1] for a in acc]


def result(top: jax.Array, total: jax.Array, acc: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """(out [M, w] a piece, lse [M]) of what attend_tiles gives; nothing seen gives 0 and -inf."""
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, -jnp.inf, (top + jnp.log2(safe)) / LOG2E)
    return [a / safe[:, None] for a in acc], lse


def body(q_ref, kv_ref, scales_ref, layer_ref, table_ref, lens_ref, out_ref, lse_ref, *, window, splits, tile, **options):
    row, head, split = (pl.program_id(axis) for axis in range(3))
    group, width = q_ref.shape[2:]
    padded = out_ref.shape[3]
    length = lens_ref[row]
    begin = jnp.maximum(length - window, 0) if window is not None else jnp.int32(0)
    mine = lax.iota(jnp.int32, padded)
    columns = [start + lax.iota(jnp.int32, size) for start, size in pieces(width)]
    near = jnp.minimum(mine, group - 1)  # what stands in for the heads that fill up to a power of two
    q = [plt.load(q_ref.at[row, head, near[:, None], c[None, :]]) for c in columns]
    span = tile_span(begin, length, tile, split, splits)
    last = jnp.full((padded,), 1, jnp.int32) * (length - 1)
    place = layer_ref[0], row, head, begin, last, span
    state = attend_tiles(q, kv_ref, scales_ref, table_ref, *place, window=window, tile=tile, **options)
    out, lse = result(*state)
    for part, c in zip(out, columns, strict=True):
        plt.store(out_ref.at[split, row, head, mine[:, None], c[None, :]], part, mask=(mine < group)[:, None])
    plt.store(lse_ref.at[split, row, head, mine], lse, mask=mine < group)


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
    chip: Chip,
    config: Config | None = None,
    num_splits: int | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """(f32[S, H, D], f32[S, H]); shapes and options as in the op. num_splits: parts of the context, by default_splits."""
    rows, heads, head_width = q.shape
    kv_heads, block_size = kv.shape[3:5]
    group, width = heads // kv_heads, -(-head_width // 16) * 16
    compute = compute_dtype(kv.dtype)
    scales = "none" if kv_scales is None else "token" if kv_scales.ndim > 1 else "tensor"
    spec = attention_spec(q, check_pool(kv), str(kv.dtype), block_tables, window, soft_cap, sinks, scales)
    config = config or config_of(spec, chip)
    splits = num_splits or default_splits(rows * kv_heads, block_tables.shape[1] * block_size, chip.cores)
    padded = max(16, 1 << (group - 1).bit_length())
    q = pad_axis(q.astype(compute), 2, width).reshape(rows, kv_heads, group, width)
    by = jnp.ones(2, jnp.float32) if kv_scales is None else kv_scales
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "tile": config.tile, "splits": splits}
    shape = splits, rows, kv_heads, padded
    whole = pl.BlockSpec(memory_space=pl.ANY)
    with traced_for(chip):
        out, lse = pl.pallas_call(
            partial(body, token_scales=by.ndim > 1, **options),
            grid=(rows, kv_heads, splits),
            in_specs=[whole] * 6,
            out_specs=[whole] * 2,
            out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, width), shape)],
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
            interpret=interpret,
            name="paged_decode_triton",
        )(q, kv, by, layer.reshape(1), block_tables, context_lens)
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group)
    out, lse = merge(out[..., :group, :head_width], lse[..., :group], sinks)
    return out.reshape(rows, heads, head_width), lse.reshape(rows, heads)
