"""What can be known of a call before it is traced: shapes, dtypes and options. `supports` functions decide by these alone."""

from dataclasses import dataclass
from typing import Literal

import jax

from pallas_kernels.common.layout import PoolShape

Scales = Literal["none", "tensor", "token"]  # of an 8-bit pool: f32[2] for keys and values, or one a token and head


@dataclass(frozen=True)
class AttentionSpec:
    """Of paged_decode and paged_attention."""

    tokens: int  # T; of paged_decode the rows
    rows: int  # S
    blocks: int  # B, of a row's table
    heads: int  # H
    width: int  # D
    pool: PoolShape
    dtype: str  # of the pool
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scales: Scales = "none"

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.heads // self.pool.kv_heads


@dataclass(frozen=True)
class WriteSpec:
    """Of kv_write."""

    tokens: int  # T
    rows: int  # that the tokens come from, at most
    width: int  # D
    pool: PoolShape
    dtype: str  # of the pool
    scales: Scales = "none"


def attention_spec(
    q: jax.Array,
    pool: PoolShape,
    dtype: str,
    block_tables: jax.Array,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    scales: Scales,
) -> AttentionSpec:
    tokens, heads, width = q.shape
    rows, blocks = block_tables.shape
    return AttentionSpec(tokens, rows, blocks, heads, width, pool, dtype, window, soft_cap, sinks is not None, scales)


def spec_of(q: jax.Array, kv: jax.Array, block_tables: jax.Array, kv_scales: jax.Array | None) -> AttentionSpec:
    """Of a call, as far as sizes depend on it."""
    rows, blocks = block_tables.shape
    layers, count, _, *rest = kv.shape
    scales: Scales = "none" if kv_scales is None else "tensor" if kv_scales.ndim == 1 else "token"
    return AttentionSpec(
        q.shape[0], rows, blocks, q.shape[1], q.shape[2], PoolShape(layers, count, *rest), str(kv.dtype), scales=scales
    )


# A decode step of a Llama 3 8B, what reports speak of when no call is at hand.
TYPICAL_POOL = PoolShape(layers=32, blocks=4096, kv_heads=8, block_size=64, width=128)
TYPICAL_DECODE = AttentionSpec(64, 64, 128, 32, 128, TYPICAL_POOL, "bfloat16")
TYPICAL_ATTENTION = AttentionSpec(2048, 64, 128, 32, 128, TYPICAL_POOL, "bfloat16")
TYPICAL_WRITE = WriteSpec(64, 64, 128, TYPICAL_POOL, "bfloat16")
