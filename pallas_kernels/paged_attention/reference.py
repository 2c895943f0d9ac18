"""paged_attention in NumPy, float64."""

import numpy as np

from pallas_kernels.paged_decode.reference import attend_one


def reference(q, kv, layer, block_tables, context_lens, query_start, **options) -> np.ndarray:
    """out [T, H, D] in float64: query i of n in a row sees the row's context without its last n - 1 - i tokens."""
    out = np.zeros(q.shape)
    for s, length in enumerate(context_lens):
        start, end = int(query_start[s]), int(query_start[s + 1])
        for t in range(start, end):
            out[t], _ = attend_one(q[t], kv, layer, block_tables[s], int(length) - (end - 1 - t), **options)
    return out
