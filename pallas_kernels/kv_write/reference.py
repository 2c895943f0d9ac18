"""kv_write in NumPy."""

import numpy as np

from pallas_kernels.common.quantized import is_quantized, largest


def reference(
    kv: np.ndarray, k: np.ndarray, v: np.ndarray, layer: int, slots: np.ndarray, kv_scales: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """(a copy of kv [J, N, 2, K, P, D'] with k, v [T, K, D] at slots [T] of the layer, zeros from D to D'; the scales, those per
    token [J, N, 2, K, P] with the new ones)."""
    kv, scales = np.array(kv), None if kv_scales is None else np.array(kv_scales)
    block_size = kv.shape[4]
    for t, slot in enumerate(slots):
        at = slot // block_size, slot % block_size
        for which, x in enumerate((k, v)):
            vector = x[t].astype(np.float32)
            if is_quantized(kv.dtype):
                vector, made = quantized(vector, kv.dtype, 1.0 if scales is None else scales[which] if scales.ndim == 1 else None)
                if scales is not None and scales.ndim > 1:
                    scales[layer, at[0], which, :, at[1]] = made
            place = kv[layer, at[0], which, :, at[1]]
            place[:] = 0
            place[:, : x.shape[2]] = vector.astype(kv.dtype)
    return kv, scales


def quantized(x: np.ndarray, dtype: np.dtype, scale: float | None) -> tuple[np.ndarray, np.ndarray]:
    """(x [K, D] as it is stored, scales f32[K]): by the given one, or (None) by the largest component of each head."""
    top = np.float32(largest(dtype))
    made = np.full(len(x), scale, np.float32) if scale is not None else np.abs(x).max(axis=1) / top
    made = np.where(made == 0, np.float32(1), made)
    y = np.clip(x / made[:, None], -top, top)
    return (np.round(y) if dtype == np.int8 else y), made
