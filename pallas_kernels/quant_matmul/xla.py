"""quant_matmul in XLA. On CPU a loop over blocks of outputs, so that what is expanded stays in the cache; elsewhere the compiler
expands weights on their way into the product."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import einsum_f32, pad_axis
from pallas_kernels.common.targets import KIB, Chip, is_cpu
from pallas_kernels.quant_matmul.spec import MatmulSpec
from pallas_kernels.quant_matmul.weights import Int4Weight, Int8Weight, Weight, quantize_rows, split_groups


@dataclass(frozen=True)
class Config:
    kib: int  # of weights in f32 that are expanded at once, on CPU


DEFAULT = Config(1024)  # half of a core's second cache


def candidates(spec: MatmulSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends: there are blocks on CPU alone, and not where int8 is multiplied as it is."""
    if not is_cpu(chip) or spec.int8_activations:
        return []
    return [DEFAULT, *map(Config, (256, 512, 2048, 4096))]


def matmul(x: jax.Array, weight: Weight, *, int8_activations: bool, out_dtype: str, chip: Chip | None, config: Config) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    if int8_activations and isinstance(weight, Int8Weight):
        return int8_product(x, weight).astype(out_dtype)
    wide = jnp.float32 if is_cpu(chip) else x.dtype  # f32 products are twice as fast as bf16 ones on CPU
    wanted, x = x.shape[0], x.astype(wide)
    outputs, size = weight.values.shape[0], config.kib * KIB if is_cpu(chip) else None
    if isinstance(weight, Int8Weight):
        y = by_blocks(x, outputs, lambda cut: cut(weight.values).astype(wide), size).T * weight.scales
    else:
        x = pad_axis(x, 0, max(2, wanted))  # with one row XLA:CPU unpacks for each product anew
        x = split_groups(x, weight).transpose(1, 0, 2).reshape(x.shape[0], -1)
        y = by_blocks(x, outputs, lambda cut: expand_int4(weight, cut).astype(wide), size)[:, :wanted].T
    return y.astype(out_dtype)


def int8_product(x: jax.Array, weight: Int8Weight) -> jax.Array:
    """f32[T, out]; products and sums in integers."""
    rows = max(2, x.shape[0])  # XLA:CPU has no library for one row of int8
    q, row_scales = quantize_rows(x)
    product = lax.dot_general(pad_axis(q, 0, rows), weight.values, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
    return product[: x.shape[0]].astype(jnp.float32) * row_scales * weight.scales


def expand_int4(weight: Int4Weight, cut: Callable[..., jax.Array]) -> jax.Array:
    """f32[out, 2 * columns] of some outputs, all even groups first. cut: as in `by_blocks`."""
    values = cut(weight.values)
    sixteen = jnp.stack([values << 4, values & -16]).reshape(2, len(values), -1, weight.group).astype(jnp.float32)
    if weight.zeros is not None:
        sixteen -= 16 * cut(weight.zeros, 2).swapaxes(1, 2)[..., None].astype(jnp.float32)
    scaled = sixteen * (cut(weight.scales, 2).swapaxes(1, 2)[..., None] / 16)
    return scaled.swapaxes(0, 1).reshape(len(values), -1)


def by_blocks(x: jax.Array, outputs: int, expand: Callable[..., jax.Array], most: int | None) -> jax.Array:
    """f32[out, T]: weights [out, in] times x [T, in], in blocks of outputs of at most so many bytes (None: all at once).
    expand(cut) are the weights of those outputs that cut(array, axis=0) leaves of an array."""
    product = lambda cut: einsum_f32("oi,ti->ot", expand(cut), x)
    size = outputs if most is None else max(16, most // (4 * x.shape[1]) // 16 * 16)
    if outputs <= size:
        return product(lambda array, axis=0: array)

    def step(i, y):
        start = jnp.minimum(i * size, outputs - size)  # the last block may do some outputs again
        block = product(lambda array, axis=0: lax.dynamic_slice_in_dim(array, start, size, axis))
        return lax.dynamic_update_slice_in_dim(y, block, start, 0)

    return lax.fori_loop(0, -(-outputs // size), step, jnp.zeros((outputs, x.shape[0]), jnp.float32))
