"""paged_decode in Mosaic GPU for GPUs of compute capability 8, 9 and 10, with products of single warps: see common/mma.py.

A program takes the G query heads of one kv head of one row, filled up to 16 rows, and one of the parts that the row's context is
split into; it writes its part's result and logarithm of the denominator, which XLA merges.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mma
from pallas_kernels.common.compat import traced_for
from pallas_kernels.common.layout import check_pool, pad_axis
from pallas_kernels.common.mma import Config, Softmax, Walk, attend_tiles, result, rows_for, scratch, store, supports
from pallas_kernels.common.spec import AttentionSpec, attention_spec
from pallas_kernels.common.splits import default_splits, merge, tile_span
from pallas_kernels.common.targets import Chip

__all__ = ["Config", "candidates", "decode", "supports"]


def candidates(spec: AttentionSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    return [] if chip is None else mma.candidates(rows_for(spec.group, spec.pool.width), spec, chip)


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
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(f32[S, H, D], f32[S, H]); shapes and options as in the op. num_splits: parts of the context, by default_splits."""
    rows, heads, head_width = q.shape
    blocks, _, kv_heads, block_size, width = kv.shape[1:]
    group = heads // kv_heads
    assert kv_scales is None, "supports() takes no pool with scales"
    packed = rows_for(group, width)
    spec = attention_spec(q, check_pool(kv), str(kv.dtype), block_tables, window, soft_cap, sinks, "none")
    config = config or mma.config_of("paged_decode", packed, spec, chip)
    walk = Walk(
        rows=packed,
        tile=config.tile,
        stages=config.stages,
        block_size=block_size,
        width=width,
        dtype=str(kv.dtype),
        tma=chip.name != "sm_80",
        interpret=bool(interpret),
    )
    softmax = Softmax(scale, window, soft_cap)
    splits = num_splits or default_splits(rows * kv_heads, block_tables.shape[1] * block_size, chip.cores)
    q = pad_axis(pad_axis(q.astype(kv.dtype), 2, width).reshape(rows, kv_heads, group, width), 2, walk.rows)

    def body(q_ref, kv_ref, layer_ref, table_ref, lens_ref, out_ref, lse_ref, **memory):
        row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
        length = lens_ref[row]
        begin = jnp.maximum(length - window, 0) if window is not None else jnp.int32(0)
        span = tile_span(begin, length, walk.tile, split, splits)
        last = plgpu.layout_cast(jnp.full((walk.rows,), length - 1, jnp.int32), walk.matrix.reduce(1))
        place = layer_ref[0] * blocks, kv_heads, head
        state = attend_tiles(walk, softmax, q_ref.at[row, head], kv_ref, table_ref, place, row, last, begin, length, span, memory)
        store(walk, out_ref.at[split, row, head], lse_ref.at[split, row, head], *result(walk, *state))

    shape = splits, rows, kv_heads, walk.rows
    with traced_for(chip):
        out, lse = plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, width), shape)],
            scratch_types=scratch(walk),
            grid=(rows, kv_heads, splits),
            grid_names=("row", "head", "split"),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="paged_decode_sm80",
            interpret=interpret,
        )(q, kv.reshape(-1, width), layer.reshape(1), block_tables, context_lens)
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group)
    out, lse = merge(out[..., :group, :head_width], lse[..., :group], sinks)
    return out.reshape(rows, heads, head_width), lse.reshape(rows, heads)
