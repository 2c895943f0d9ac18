"""paged_attention and paged_decode for CPU, by a kernel that XLA calls.

XLA can give its library of products no operand by reference to a block, so that it copies all that it attends to; the kernel reads
each block in place.
"""

import importlib.util

import jax
import jax.numpy as jnp

from pallas_kernels.common.dispatch import Later
from pallas_kernels.common.machine_code import Recipe
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.spec import AttentionSpec
from pallas_kernels.common.targets import Chip

targets = Later("pallas_kernels.common.numba_targets")  # imports Numba
KERNEL = "pallas_kernels.common.numba_attention"
DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


def supports(spec: AttentionSpec, chip: Chip | None) -> str | None:
    """As of the table of backends."""
    if importlib.util.find_spec("numba") is None:
        return "needs Numba, which is not installed"
    if spec.dtype not in DTYPES:
        return f"takes pools of {', '.join(DTYPES)}; got {spec.dtype}"
    return None


def attend(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    num_decode: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    chip: Chip | None,
) -> jax.Array:
    """f32[T, H, D]; shapes as in paged_attention."""
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, "kv_scales": kv_scales}
    return attend_with_lse(q, kv, layer, block_tables, context_lens, query_start, **options)[0]


def attend_with_lse(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """(f32[T, H, D], f32[T, H])."""
    tokens, heads, width = q.shape
    block_size, stored = kv.shape[4:]
    by_token = kv_scales is not None and kv_scales.ndim > 1
    name = f"pagedjax_attention_{width}_{stored}_{block_size}_{kv.dtype.name}{'_scaled' if by_token else ''}"
    recipe = Recipe(KERNEL, "item_count", "make_kernel", (width, stored, block_size, kv.dtype.name, by_token))
    targets.ensure(name, recipe)
    shapes = jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct((tokens, heads), jnp.float32)
    out, lse = jax.ffi.ffi_call(name, shapes)(
        q.astype(compute_dtype(kv.dtype)).astype(jnp.float32),
        kv,
        jnp.stack([layer, jnp.int32(window or 0)]),
        jnp.array([scale, soft_cap or 0], jnp.float32),
        block_tables,
        context_lens,
        query_start,
        jnp.full(heads, -jnp.inf, jnp.float32) if sinks is None else sinks.astype(jnp.float32),
        jnp.ones(2, jnp.float32) if kv_scales is None else kv_scales.astype(jnp.float32),
    )
    return out, lse
