"""kv_write in NumPy."""

import numpy as np


def reference(kv: np.ndarray, k: np.ndarray, v: np.ndarray, layer: int, slots: np.ndarray) -> np.ndarray:
    """A copy of kv [J, N, 2, K, P, D'] with k, v [T, K, D] at slots [T] of the layer, zeros from D to D'."""
    kv = np.array(kv)
    block_size = kv.shape[4]
    for t, slot in enumerate(slots):
        for which, x in enumerate((k, v)):
            place = kv[layer, slot // block_size, which, :, slot % block_size]
            place[:] = 0
            place[:, : x.shape[2]] = x[t]
    return kv
