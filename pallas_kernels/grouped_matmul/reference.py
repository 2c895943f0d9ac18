"""grouped_matmul in NumPy, float64, and how far from it a backend may be."""

import numpy as np

F32, BF16 = 2.0**-24, 2.0**-8  # the largest relative error of rounding to these


def reference(lhs: np.ndarray, rhs: np.ndarray, group_sizes: np.ndarray) -> np.ndarray:
    """float64[T, out]; arguments as in the op."""
    out, start = np.zeros((lhs.shape[0], rhs.shape[1])), 0
    for expert, size in enumerate(np.asarray(group_sizes)):
        rows = slice(start, start + int(size))
        out[rows] = np.asarray(lhs[rows], np.float64) @ np.asarray(rhs[expert], np.float64).T
        start = rows.stop
    return out


def error_bound(lhs: np.ndarray, rhs: np.ndarray, group_sizes: np.ndarray, out_dtype: str) -> np.ndarray:
    """float64[T, out]: the largest error that a backend may make. n products summed in f32 are off by at most n 2^-24 |lhs| |rhs|
    (Higham, Accuracy and Stability of Numerical Algorithms, 3.1); a bfloat16 result is rounded once more, by 2^-8 |y|."""
    size = reference(np.abs(lhs), np.abs(rhs), group_sizes)
    bound = (lhs.shape[1] + 8) * F32 * size
    y = np.abs(reference(lhs, rhs, group_sizes))
    return bound * (1 + BF16) + BF16 * y if out_dtype == "bfloat16" else bound
