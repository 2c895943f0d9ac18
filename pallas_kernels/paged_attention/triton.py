"""paged_attention through Pallas' Triton backend: as paged_decode/triton.py, for tiles of query tokens; decode rows go there.

A program takes one tile of a row's query tokens, with the G heads of one kv head side by side, and all of the context that one of
them sees.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.compat import traced_for
from pallas_kernels.common.layout import ceil_div, check_pool, pad_axis
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.spec import AttentionSpec, attention_spec
from pallas_kernels.common.splits import merge
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tiles import tiles_of
from pallas_kernels.common.tuning import attention_key, tuned
from pallas_kernels.paged_decode import triton as one
from pallas_kernels.paged_decode.triton import supports

__all__ = ["Config", "attend", "candidates", "supports"]


@dataclass(frozen=True)
class Config:
    rows: int  # query tokens times heads in a tile; a power of two, at least 16 and at least the heads of one kv head
    tile: int  # this and what follows as in paged_decode's, for decode rows, too
    warps: int = 4
    stages: int = 2

    @property
    def context(self) -> one.Config:
        return one.Config(self.tile, self.warps, self.stages)


def heuristic(group: int, width: int, dtype: str, chip: Chip) -> Config:
    """64 rows: four warps of 16, which is what a product takes at once."""
    return Config(max(64, 1 << (group - 1).bit_length()), one.heuristic(width, dtype, chip).tile)


def candidates(spec: AttentionSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    found = [
        Config(rows, c.tile, c.warps, c.stages) for c in one.candidates(spec, chip) for rows in (64, 32, 128) if rows >= spec.group
    ]
    default = [] if chip is None else [heuristic(spec.group, -(-spec.width // 16) * 16, str(compute_dtype(spec.dtype)), chip)]
    return default + [c for c in found if c not in default]


def config_of(spec: AttentionSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if it is one to try for this one, or else `heuristic`."""
    rule, *others = candidates(spec, chip)
    config = tuned("paged_attention", "triton", chip, attention_key(spec), rule)
    return config if config in others else rule


def body(q_ref, kv_ref, scales_ref, layer_ref, table_ref, tiles_ref, out_ref, lse_ref, *, rows, window, tile, **options):
    number, head = pl.program_id(0), pl.program_id(1)
    group, width = q_ref.shape[2:]
    row, start, position, count = (tiles_ref[field, number] for field in range(4))
    mine = lax.iota(jnp.int32, rows)
    token, member = lax.div(mine, jnp.int32(group)), lax.rem(mine, jnp.int32(group))
    live = token < count
    columns = [begin + lax.iota(jnp.int32, size) for begin, size in one.pieces(width)]
    zero = jnp.zeros((), q_ref.dtype)
    q = [
        plt.load(q_ref.at[(start + token)[:, None], head, member[:, None], c[None, :]], mask=live[:, None], other=zero)
        for c in columns
    ]
    last = jnp.where(live, position + token, position)
    begin = jnp.maximum(position + 1 - window, 0) if window is not None else jnp.int32(0)
    span = lax.div(begin, jnp.int32(tile)), jnp.where(count > 0, ceil_div(position + count, tile), 0)
    place = layer_ref[0], row, head, begin, last, span
    state = one.attend_tiles(q, kv_ref, scales_ref, table_ref, *place, window=window, tile=tile, **options)
    out, lse = one.result(*state)
    for part, c in zip(out, columns, strict=True):
        plt.store(out_ref.at[(start + token)[:, None], head, member[:, None], c[None, :]], part, mask=live[:, None])
    plt.store(lse_ref.at[start + token, head, member], lse, mask=live)


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
    interpret: bool = False,
) -> jax.Array:
    """f32[T, H, D]; shapes and options as in the op."""
    tokens, heads, head_width = q.shape
    kv_heads, rows = kv.shape[3], block_tables.shape[0]
    group, width = heads // kv_heads, -(-head_width // 16) * 16
    compute = compute_dtype(kv.dtype)
    kind = "none" if kv_scales is None else "token" if kv_scales.ndim > 1 else "tensor"
    spec = attention_spec(q, check_pool(kv), str(kv.dtype), block_tables, window, soft_cap, sinks, kind)
    config = config or config_of(spec, chip)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    tiles = tiles_of(query_start, context_lens, num_decode, tokens, config.rows // group)
    scales = jnp.ones(2, jnp.float32) if kv_scales is None else kv_scales
    padded = pad_axis(q.astype(compute), 2, width).reshape(tokens, kv_heads, group, width)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    with traced_for(chip):
        out, lse = pl.pallas_call(
            partial(body, rows=config.rows, tile=config.tile, token_scales=scales.ndim > 1, **options),
            grid=(tiles.row.shape[0], kv_heads),
            in_specs=[whole] * 6,
            out_specs=[whole] * 2,
            out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in (padded.shape, padded.shape[:3])],
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
            interpret=interpret,
            name="paged_attention_triton",
        )(padded, kv, scales, layer.reshape(1), block_tables, jnp.stack(tiles))
    number = jnp.arange(tokens)[:, None, None]
    owned = (number >= num_decode[0]) & (number < query_start[-1])  # what no program wrote may hold anything
    by_head = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group)
    out, _ = merge(out[None, ..., :head_width], jnp.where(owned, lse, -jnp.inf)[None], by_head)
    short = min(rows, tokens)
    lens = jnp.where(jnp.arange(short) < num_decode[0], context_lens[:short], 0)
    more = {"sinks": sinks, "kv_scales": kv_scales, "chip": chip, "config": config.context, "interpret": interpret}
    decoded, _ = one.decode(q[:short], kv, layer, block_tables[:short], lens, **options, **more)
    out = out.reshape(tokens, heads, head_width)
    return jnp.where(number < num_decode[0], pad_axis(decoded, 0, tokens), out)
