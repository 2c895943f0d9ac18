"""quant_matmul in XLA. On CPU a loop over blocks of outputs, so that what is expanded stays in the cache; elsewhere the compiler
expands weights on their way into the product."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import pad_axis
from pallas_kernels.common.targets import Chip
from pallas_kernels.quant_matmul.weights import Int8Weight, Weight, quantize_rows, split_groups

BLOCK_BYTES = 1 << 20  # of expanded weights; half of a core's second cache


def matmul(x: jax.Array, weight: Weight, *, int8_activations: bool, out_dtype: str, chip: Chip | None) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    if int8_activations and isinstance(weight, Int8Weight):
        return int8_product(x, weight).astype(out_dtype)
    wide = jnp.float32 if chip is None else x.dtype  # f32 products are twice as fast as bf16 ones on CPU
    wanted, x = x.shape[0], x.astype(wide)
    if isinstance(weight, Int8Weight):
        parts, expand = (weight.values,), lambda values: values
    else:
        x = pad_axis(x, 0, max(2, wanted))  # with one row XLA:CPU unpacks for each product anew
        x = split_groups(x, weight).transpose(1, 0, 2).reshape(x.shape[0], -1)
        parts, expand = (weight.values, weight.scales.transpose(1, 0, 2)), expand_int4
        if weight.zeros is not None:
            parts = (*parts, weight.zeros.transpose(1, 0, 2))
    y = by_blocks(x, parts, lambda *block: expand(*block).astype(wide), blocked=chip is None)[:, :wanted].T
    return (y * weight.scales if isinstance(weight, Int8Weight) else y).astype(out_dtype)


def int8_product(x: jax.Array, weight: Int8Weight) -> jax.Array:
    """f32[T, out]; products and sums in integers."""
    rows = max(2, x.shape[0])  # XLA:CPU has no library for one row of int8
    q, row_scales = quantize_rows(x)
    product = lax.dot_general(pad_axis(q, 0, rows), weight.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return product[: x.shape[0]].astype(jnp.float32) * row_scales * weight.scales


def expand_int4(values: jax.Array, scales: jax.Array, zeros: jax.Array | None = None) -> jax.Array:
    """f32[out, 2 * columns], even groups first, from int8[out, columns] and scales and zeros [out, 2, pairs]."""
    outputs, _, pairs = scales.shape
    sixteen = jnp.stack([values << 4, values & -16], axis=1).reshape(outputs, 2, pairs, -1).astype(jnp.float32)
    if zeros is not None:
        sixteen -= 16 * zeros[..., None].astype(jnp.float32)
    return (sixteen * (scales[..., None] / 16)).reshape(outputs, -1)


def by_blocks(x: jax.Array, parts: tuple[jax.Array, ...], expand: Callable[..., jax.Array], *, blocked: bool) -> jax.Array:
    """f32[out, T]: expand(*parts) [out, in] times x [T, in], some outputs at a time. The parts have an axis of outputs first."""
    product = lambda *block: jnp.einsum("oi,ti->ot", expand(*block), x, preferred_element_type=jnp.float32)
    outputs = parts[0].shape[0]
    size = max(16, BLOCK_BYTES // (4 * x.shape[1]) // 16 * 16)
    if not blocked or outputs <= size:
        return product(*parts)

    def step(i, y):
        start = jnp.minimum(i * size, outputs - size)  # the last block may do some outputs again
        block = product(*(lax.dynamic_slice_in_dim(part, start, size) for part in parts))
        return lax.dynamic_update_slice_in_dim(y, block, start, 0)

    return lax.fori_loop(0, -(-outputs // size), step, jnp.zeros((outputs, x.shape[0]), jnp.float32))
