"""Quantized weights: what they look like in memory, and how they are made.

int8: one scale for each output. int4: `group` neighbouring inputs of one output share a scale, and perhaps a zero point. Groups
come in pairs: a byte holds a column of an even group in its low four bits and the same column of the odd group behind it in its
high four, so that unpacking moves nothing between lanes; activations are split into even and odd groups instead (`split_groups`).
Values are two's complement, -8 to 7; shifted to the top of the byte they are 16 times as much, which is how kernels unpack them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from pallas_kernels.common.layout import check, pad_axis

GROUPS = (32, 64, 128)


class Int8Weight(NamedTuple):
    """values * scales[:, None]."""

    values: jax.Array  # int8[out, in], -127 to 127
    scales: jax.Array  # f32[out]


class Int4Weight(NamedTuple):
    """(value - zero) * scale. With `in` no multiple of 2 * group the last groups are filled up with values that are 0."""

    values: jax.Array  # int8[out, pairs * group]: columns of even groups in the low bits, of odd ones in the high bits
    scales: jax.Array  # f32[2, pairs, out]: of even groups, of odd groups; out last, or TPUs would store them 128 lanes wide
    zeros: jax.Array | None  # int8[2, pairs, out], -8 to 7; None: 0

    @property
    def group(self) -> int:
        return self.values.shape[1] // self.scales.shape[1]


Weight = Int8Weight | Int4Weight


def quantize_int8(w: ArrayLike) -> Int8Weight:
    """w [out, in], floats, to the nearest multiples of max|w| / 127 of each row: no value moves by more than half of that scale
    (and f32 rounding). The scale of a row of zeros is 1. In JAX where w is of JAX, or else in NumPy."""
    xp, x = _floats(w)
    top = xp.abs(x).max(axis=1)
    scales = xp.where(top > 0, top / 127, 1)
    return Int8Weight(xp.round(x / scales[:, None]).astype(xp.int8), scales)


def quantize_int4(w: ArrayLike, *, group: int = 128, zeros: bool = False) -> Int4Weight:
    """w [out, in], floats, in groups of 32, 64 or 128 columns: no value moves by more than half a scale (and f32 rounding).

    The scale is max|w| / 7 of the group, or, with zero points, (max(w, 0) - min(w, 0)) / 15; 1 where the group is all zeros. In
    JAX where w is of JAX, or else in NumPy.
    """
    check(group in GROUPS, f"group must be 32, 64 or 128; got {group}")
    xp, x = _floats(w)
    outputs, pairs = x.shape[0], -(-x.shape[1] // (2 * group))
    x = xp.pad(x, ((0, 0), (0, 2 * pairs * group - x.shape[1]))).reshape(outputs, pairs, 2, group).transpose(2, 1, 0, 3)
    low, high = xp.minimum(x.min(-1), 0), xp.maximum(x.max(-1), 0)
    span = (high - low) / 15 if zeros else xp.maximum(high, -low) / 7
    scales = xp.where(span > 0, span, 1)
    zero = xp.where(span > 0, xp.clip(xp.round(-8 - low / scales), -8, 7), 0) if zeros else xp.zeros_like(scales)
    q = xp.clip(xp.round(x / scales[..., None]) + zero[..., None], -8, 7).astype(xp.int8)
    packed = ((q[0] & 15) | (q[1] << 4)).transpose(1, 0, 2)
    return Int4Weight(packed.reshape(outputs, pairs * group), scales, zero.astype(xp.int8) if zeros else None)


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(int8[T, in], f32[T, 1]): x to the nearest multiples of max|x| / 127 of each row; a row of zeros has scale 0."""
    x = x.astype(jnp.float32)
    top = jnp.abs(x).max(axis=1, keepdims=True)
    return jnp.round(x * jnp.where(top > 0, 127 / top, 0)).astype(jnp.int8), top / 127


def split_groups(x: jax.Array, weight: Int4Weight) -> jax.Array:
    """[T, in] -> [2, T, pairs * group]: the columns of even groups, and of odd ones; zeros where the weight is filled up."""
    group, pairs = weight.group, weight.scales.shape[1]
    x = pad_axis(x, 1, 2 * pairs * group).reshape(x.shape[0], pairs, 2, group)
    return x.transpose(2, 0, 1, 3).reshape(2, x.shape[0], pairs * group)


def _floats(w: Any) -> tuple[Any, Any]:
    """The library that w is an array of, and w in f32."""
    w = w if isinstance(w, jax.Array) else np.asarray(w)
    xp = jnp if isinstance(w, jax.Array) else np
    fits = w.ndim == 2 and min(w.shape) >= 1 and jnp.issubdtype(w.dtype, jnp.floating)
    check(fits, f"w must be floats [out, in], none of them 0; got {w.dtype}{list(w.shape)}")
    return xp, w.astype(xp.float32)
