"""paged_attention in Mosaic GPU for GPUs of compute capability 8, 9 and 10, with products of single warps: see common/mma.py.
Decode rows go to paged_decode's.

A program takes one tile of a row's query tokens, with the G heads of one kv head side by side in 64 rows, and all of the context
that one of them sees. It writes whole tiles, which XLA puts in their places: the last tile of a row has fewer tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import mma
from pallas_kernels.common.compat import traced_for
from pallas_kernels.common.layout import ceil_div, check_pool, pad_axis, take
from pallas_kernels.common.mma import Config, Softmax, Walk, attend_tiles, result, scratch, store, supports
from pallas_kernels.common.spec import AttentionSpec, attention_spec
from pallas_kernels.common.splits import merge
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tiles import places_in, tiles_of
from pallas_kernels.paged_decode import mosaic_gpu_sm80 as one

__all__ = ["Config", "attend", "candidates", "supports"]

ROWS = 64  # of queries in a tile


def candidates(spec: AttentionSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    return [] if chip is None else mma.candidates(ROWS, spec, chip)


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
    chip: Chip,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """f32[T, H, D]; shapes and options as in the op."""
    assert kv_scales is None, "supports() takes no pool with scales"
    tokens, heads, head_width = q.shape
    blocks, _, kv_heads, block_size, width = kv.shape[1:]
    rows, group = block_tables.shape[0], heads // kv_heads
    size = ROWS // group  # tokens of a tile
    spec = attention_spec(q, check_pool(kv), str(kv.dtype), block_tables, window, soft_cap, sinks, "none")
    chosen = config or mma.config_of("paged_attention", ROWS, spec, chip)
    tma = chip.name != "sm_80"
    walk = Walk(ROWS, chosen.tile, chosen.stages, block_size, width, str(kv.dtype), tma, bool(interpret))
    tiles = tiles_of(query_start, context_lens, num_decode, tokens, size)
    packed = pad_axis(q.astype(kv.dtype), 2, width).reshape(tokens, kv_heads, group, width).transpose(1, 0, 2, 3)
    packed = pad_axis(packed.reshape(kv_heads, tokens * group, width), 1, tokens * group + ROWS)

    def body(q_ref, kv_ref, layer_ref, table_ref, tiles_ref, out_ref, lse_ref, **memory):
        number, head = lax.axis_index("tile"), lax.axis_index("head")
        row, start, position, count = (tiles_ref[field, number] for field in range(4))
        begin = jnp.maximum(position + 1 - window, 0) if window is not None else jnp.int32(0)
        end = position + count
        span = lax.div(begin, jnp.int32(walk.tile)), jnp.where(count > 0, ceil_div(end, walk.tile), 0)
        token = lax.div(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=walk.matrix.reduce(1)), jnp.int32(group))
        last = jnp.minimum(position + token, end - 1)
        place = layer_ref[0] * blocks, kv_heads, head
        mine = q_ref.at[head, pl.ds(start * group, ROWS)]
        state = attend_tiles(
            walk, Softmax(scale, window, soft_cap), mine, kv_ref, table_ref, place, row, last, begin, end, span, memory
        )
        store(walk, out_ref.at[number, head], lse_ref.at[number, head], *result(walk, *state))

    shape = tiles.row.shape[0], kv_heads, ROWS
    with traced_for(chip):
        out, lse = plgpu.kernel(
            body,
            out_type=[jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, width), shape)],
            scratch_types=scratch(walk),
            grid=shape[:2],
            grid_names=("tile", "head"),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="paged_attention_sm80",
            interpret=interpret,
        )(packed, kv.reshape(-1, width), layer.reshape(1), block_tables, jnp.stack(tiles))
    by_head = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group)
    at = places_in(tiles, tokens, size)

    def by_token(x):
        whole = x[:, :, : size * group].reshape(*shape[:2], size, group, *x.shape[3:]).swapaxes(1, 2)
        return take(whole.reshape(-1, kv_heads, group, *x.shape[3:]), jnp.maximum(at, 0))

    lse = jnp.where((at >= 0)[:, None, None], by_token(lse), -jnp.inf)
    out, _ = merge(by_token(out)[None, ..., :head_width], lse[None], by_head)
    short = min(rows, tokens)
    lens = jnp.where(jnp.arange(short) < num_decode[0], context_lens[:short], 0)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, "kv_scales": None}
    decoded, _ = one.decode(
        q[:short], kv, layer, block_tables[:short], lens, **options, chip=chip, config=config, interpret=interpret
    )
    first = (jnp.arange(tokens) < num_decode[0])[:, None, None]
    return jnp.where(first, pad_axis(decoded, 0, tokens), out.reshape(tokens, heads, head_width))
