"""paged_decode in NumPy, float64."""

import numpy as np


def attend_one(
    q: np.ndarray,
    kv: np.ndarray,
    layer: int,
    blocks: np.ndarray,
    length: int,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: np.ndarray | None = None,
    kv_scales: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(out [H, D], lse [H]) of one query q [H, D] that sees the first `length` tokens of a row, or the last `window` of them."""
    heads, width = q.shape
    _, _, _, kv_heads, block_size, _ = kv.shape
    out, lse = np.zeros((heads, width)), np.full(heads, -np.inf)
    seen = np.arange(0 if window is None else max(0, length - window), length)
    if len(seen) == 0:
        return out, lse
    block, place = blocks[seen // block_size], seen % block_size
    for h in range(heads):
        k, v = (kv[layer, block, which, h // (heads // kv_heads), place, :width].astype(np.float64) for which in (0, 1))
        if kv_scales is not None:
            k_scale, v_scale = (
                kv_scales[which] if kv_scales.ndim == 1 else kv_scales[layer, block, which, h // (heads // kv_heads), place, None]
                for which in (0, 1)
            )
            k, v = k * k_scale, v * v_scale
        s = k @ q[h].astype(np.float64) * scale
        if soft_cap is not None:
            s = soft_cap * np.tanh(s / soft_cap)
        extra = [] if sinks is None else [float(sinks[h])]
        top = max([s.max(), *extra])
        p = np.exp(s - top)
        total = p.sum() + sum(np.exp(x - top) for x in extra)
        out[h], lse[h] = p @ v / total, top + np.log(total)
    return out, lse


def reference(q, kv, layer, block_tables, context_lens, **options) -> tuple[np.ndarray, np.ndarray]:
    """(out [S, H, D], lse [S, H]) in float64; q [S, H, D] and kv as they are in the op, options as in attend_one."""
    rows = [attend_one(q[s], kv, layer, block_tables[s], int(n), **options) for s, n in enumerate(context_lens)]
    return np.stack([out for out, _ in rows]), np.stack([lse for _, lse in rows])
