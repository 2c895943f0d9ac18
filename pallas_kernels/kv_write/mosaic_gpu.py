"""kv_write in Mosaic GPU, for GPUs of compute capability 8, 9 and 10: one program a token takes its keys and values of all
heads, quantizes them where the pool has 8 bits, and writes them where they belong. In place: the pool is an argument that is
written to.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.compat import save, traced_for
from pallas_kernels.common.layout import pad_axis
from pallas_kernels.common.quantized import is_quantized, largest
from pallas_kernels.common.spec import WriteSpec
from pallas_kernels.common.targets import Chip

FLOATS = ("float32", "bfloat16", "float16")


def supports(spec: WriteSpec, chip: Chip | None) -> str | None:
    """As of the table of backends."""
    if spec.pool.width % 16:
        return f"takes head widths that are multiples of 16, as the pool stores them; got {spec.pool.width}"
    if spec.dtype not in (*FLOATS, "int8", "float8_e4m3fn"):
        return f"takes pools of {', '.join(FLOATS)}, int8 or float8_e4m3fn; got {spec.dtype}"
    if spec.dtype == "float8_e4m3fn" and chip is not None and chip.name == "sm_80":
        return "has no float8_e4m3fn on sm_80, whose processors cannot convert to it; use int8"
    return None


def layout(heads: int, width: int) -> Any:
    """Where [heads, width] lies in the registers: heads side by side in the four warps as far as that goes, a head along the lanes
    of one, so that its largest component is found inside the warp."""
    warps, lanes = math.gcd(heads, 4), 32 if width % 32 == 0 else 16
    vector = math.gcd(width // lanes, 4)
    axis = lambda size, whole, dim: ((dim,) if size > 1 else ()) + ((plgpu.Replicated(whole // size),) if size < whole else ())
    return plgpu.Layout.TILED(
        plgpu.Tiling(((warps, lanes * vector), (vector,))),
        warp_dims=axis(warps, 4, -3),
        lane_dims=axis(lanes, 32, -2),
        vector_dim=-1,
    )


def body(kv_ref, made_ref, k_ref, v_ref, given_ref, layer_ref, slots_ref, *, token_scales):
    """made_ref: the scales per token; given_ref: those per tensor. Each None if there are none."""
    token = lax.axis_index("token")
    heads, block_size, width = kv_ref.shape[3:]
    slot, layer, dtype = slots_ref[token], layer_ref[0], kv_ref.dtype
    block, place = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
    matrix = layout(heads, width)

    @pl.when(block > 0)  # what padding writes is nothing
    def _():
        for which, ref in enumerate((k_ref, v_ref)):
            x = plgpu.load(ref.at[token], layout=matrix, optimized=False)
            if is_quantized(dtype):
                x = x.astype(jnp.float32)
                if token_scales:
                    top = jnp.max(jnp.abs(x), axis=1) / largest(dtype)
                    scale = jnp.where(top == 0.0, 1.0, top)
                    save(made_ref.at[layer, block, which, :, place], scale)
                    x = x / plgpu.layout_cast(lax.broadcast_in_dim(scale, x.shape, [0]), matrix)
                elif given_ref is not None:
                    x = x / given_ref[which]
                x = jnp.minimum(jnp.maximum(x, -largest(dtype)), largest(dtype))
                if dtype == jnp.int8:
                    x = lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)
            save(kv_ref.at[layer, block, which, :, place], x.astype(dtype))


def write(
    kv: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    slots: jax.Array,
    *,
    kv_scales: jax.Array | None,
    chip: Chip,
    interpret: Any = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The pool, or (the pool, the scales) where these are per token; shapes as in the op."""
    token_scales = kv_scales is not None and kv_scales.ndim > 1
    k, v = (pad_axis(x, 2, kv.shape[5]) for x in (k, v))
    rest = (k, v, None if token_scales else kv_scales, layer.reshape(1), slots)

    def run(refs):
        with traced_for(chip):
            plgpu.kernel(
                partial(body, token_scales=token_scales),
                grid=k.shape[:1],
                grid_names=("token",),
                kernel_name="kv_write",
                interpret=interpret,
            )(*refs, *rest)

    if kv_scales is None or not token_scales:
        return pl.run_state(run)((kv, None))[0]
    return pl.run_state(run)((kv, kv_scales))
