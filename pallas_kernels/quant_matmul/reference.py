"""quant_matmul in NumPy, float64, and how far from it a backend may be."""

import numpy as np

from pallas_kernels.quant_matmul.weights import Int4Weight, Int8Weight, Weight

F32, BF16 = 2.0**-24, 2.0**-8  # the largest relative error of rounding to these


def dequantize(weight: Weight, inputs: int, *, size: bool = False) -> np.ndarray:
    """float64[out, inputs], exact; with `size` (|value| + |zero|) * scale."""
    take, sign = (np.abs, -1) if size else (np.asarray, 1)
    if isinstance(weight, Int8Weight):
        return take(np.asarray(weight.values, np.float64)) * np.asarray(weight.scales, np.float64)[:, None]
    packed = np.asarray(weight.values).astype(np.int64)
    nibbles = np.stack([packed & 15, (packed >> 4) & 15])
    values = np.where(nibbles > 7, nibbles - 16, nibbles).reshape(2, len(packed), -1, weight.group).transpose(0, 2, 1, 3)
    values = take(values.astype(np.float64))  # [2, pairs, out, group]
    if weight.zeros is not None:
        values -= sign * take(np.asarray(weight.zeros, np.float64))[..., None]
    values *= np.asarray(weight.scales, np.float64)[..., None]
    return values.transpose(2, 1, 0, 3).reshape(len(packed), -1)[:, :inputs]


def quantized_rows(x: np.ndarray) -> np.ndarray:
    """float64[T, in]: x as it is after rounding to int8 by rows; in f32 up to the rounding, as the op does it."""
    x = np.asarray(x, np.float32)
    top = np.abs(x).max(axis=1, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    return np.rint(x * inverse).astype(np.float64) * (top / np.float32(127))


def reference(x: np.ndarray, weight: Weight, *, int8_activations: bool = False) -> np.ndarray:
    """float64[T, out]; x [T, in] and the weight as in the op."""
    x = np.asarray(x)
    rows = quantized_rows(x) if int8_activations else x.astype(np.float64)
    return rows @ dequantize(weight, x.shape[1]).T


def error_bound(x: np.ndarray, weight: Weight, *, int8_activations: bool = False, out_dtype: str = "float32") -> np.ndarray:
    """float64[T, out]: the largest error that a backend may make.

    With n inputs and A = |x| |w|: a sum of n products in f32 is off by at most n 2^-24 A (Higham, Accuracy and Stability of
    Numerical Algorithms, 3.1; products of 8-bit significands are exact), scaling adds a few roundings. Zero points may be
    subtracted after the product, so that there |w| is (|value| + |zero|) * scale. int4 weights may be rounded to bfloat16 before
    the product where the activations are bfloat16: 2^-8 A. int8 products are exact: what is left are four roundings of the
    result. A bfloat16 result is rounded once more, by 2^-8 |y|.
    """
    y = np.abs(reference(x, weight, int8_activations=int8_activations))
    if int8_activations:
        bound = 4 * F32 * y
    else:
        x = np.asarray(x)
        wide = np.abs(x.astype(np.float64))
        bound = (x.shape[1] + 8) * F32 * (wide @ dequantize(weight, x.shape[1], size=True).T)
        if isinstance(weight, Int4Weight) and x.dtype != np.float32:
            bound += BF16 * (wide @ np.abs(dequantize(weight, x.shape[1])).T)
    return bound * (1 + BF16) + BF16 * y if out_dtype == "bfloat16" else bound
