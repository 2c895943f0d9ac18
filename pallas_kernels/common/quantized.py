"""Pools of 8 bits: what is stored times a scale is the value. Scales are per tensor (f32[2]: of keys, of values) or per token and
head (f32[J, N, 2, K, P], beside the pool)."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.layout import PoolShape, check, take
from pallas_kernels.common.spec import Scales

DTYPES = ("int8", "float8_e4m3fn")


def is_quantized(dtype: jnp.dtype | str) -> bool:
    """Whether a pool of this dtype is one of 8 bits."""
    return jnp.dtype(dtype).name in DTYPES


def compute_dtype(dtype: jnp.dtype | str) -> jnp.dtype:
    """What the operands of products with a pool of this dtype are: of an 8-bit pool bfloat16, which holds every stored number."""
    return jnp.dtype(jnp.bfloat16) if is_quantized(dtype) else jnp.dtype(dtype)


def largest(dtype: jnp.dtype | str) -> float:
    """The largest number that is stored: 127 or 448."""
    return float(jnp.iinfo(dtype).max) if jnp.dtype(dtype) == jnp.int8 else float(jnp.finfo(dtype).max)


def check_scales(kv_scales: jax.Array | None, pool: PoolShape, dtype: jnp.dtype) -> Scales:
    """Which kind they are; ValueError unless they fit the pool."""
    if kv_scales is None:
        check(dtype != jnp.int8, "kv_scales must be given for a pool of int8; got none")
        return "none"
    check(is_quantized(dtype), f"kv_scales must come with a pool of {' or '.join(DTYPES)}; got one of {dtype}")
    token = (pool.layers, pool.blocks, 2, pool.kv_heads, pool.block_size)
    check(
        kv_scales.dtype == jnp.float32 and kv_scales.shape in ((2,), token),
        f"kv_scales must be f32[2] or f32{list(token)}; got {kv_scales.dtype}{list(kv_scales.shape)}",
    )
    return "tensor" if kv_scales.ndim == 1 else "token"


def quantize(x: jax.Array, scale: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """x / scale as dtype: int8 rounded to the nearest, ties to even; what is too large becomes the largest number."""
    top = largest(dtype)
    y = jnp.clip(x.astype(jnp.float32) / scale, -top, top)
    return (jnp.round(y) if dtype == jnp.int8 else y).astype(dtype)


def token_scales(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """f32[T, K] of x [T, K, D]: what makes the largest component of each the largest number; 1 where all are 0."""
    top = jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1) / largest(dtype)
    return jnp.where(top == 0, 1, top)


def as_stored(
    k: jax.Array, v: jax.Array, dtype: jnp.dtype, kv_scales: jax.Array | None
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
    """k and v [T, K, D] as a pool of this dtype holds them, and the scales f32[T, K] that were made, where they are per token.
    Without scales a pool of 8 bits holds the values themselves."""
    if not is_quantized(dtype):
        return k.astype(dtype), v.astype(dtype), None
    if kv_scales is not None and kv_scales.ndim > 1:
        made = token_scales(k, dtype), token_scales(v, dtype)
        return quantize(k, made[0][..., None], dtype), quantize(v, made[1][..., None], dtype), made
    k_scale, v_scale = (jnp.float32(1), jnp.float32(1)) if kv_scales is None else (kv_scales[0], kv_scales[1])
    return quantize(k, k_scale, dtype), quantize(v, v_scale, dtype), None


def block_scales(kv_scales: jax.Array, at: jax.Array, kv_heads: int, block_size: int) -> tuple[jax.Array, jax.Array]:
    """Those of the keys and the values of the blocks `at` [W], which are 2 * (layer * N + block): each f32[W, K, P]."""
    if kv_scales.ndim == 1:
        k, v = (jnp.broadcast_to(x, (at.shape[0], kv_heads, block_size)) for x in (kv_scales[0], kv_scales[1]))
        return k, v
    flat = kv_scales.reshape(-1, kv_heads, block_size)
    return take(flat, at), take(flat, at + 1)
