"""paged_decode for CPU: paged_attention's kernel, whose rows have one token each."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.targets import Chip
from pallas_kernels.paged_attention.numba_cpu import attend_with_lse
from pallas_kernels.paged_attention.numba_cpu import supports as supports


def decode(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    chip: Chip | None,
) -> tuple[jax.Array, jax.Array]:
    """(f32[S, H, D], f32[S, H]); shapes as in the op."""
    starts = jnp.arange(q.shape[0] + 1, dtype=jnp.int32)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "sinks": sinks, "kv_scales": kv_scales}
    return attend_with_lse(q, kv, layer, block_tables, context_lens, starts, **options)
