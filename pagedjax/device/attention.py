"""Writes a layer's new K and V into the pool and attends."""

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh, NamedSharding

from pagedjax.device.sharding import POOL
from pagedjax.state import Pool, QuantizedPool, split_pool
from pallas_kernels import kv_write, paged_attention, paged_decode
from pallas_kernels.common.targets import platform_of

Place = tuple[jax.Array | int, jax.Array | int]  # of a layer: its group, and which of the group's layers it is


@struct.dataclass
class Rows:
    """Where the tokens of a pass stand in the cache. Made once a pass, read by every layer."""

    slots: jax.Array  # i32[G, T]: block * P + place in the block; padding: 0
    positions: jax.Array  # i32[T]
    query_start: jax.Array  # i32[S+1]
    num_decode: jax.Array  # i32[1]
    context_lens: jax.Array  # i32[S]
    block_tables: jax.Array  # i32[G, S, B]
    mesh: Mesh = struct.field(pytree_node=False)


def attend(
    q: jax.Array,  # f32[T, H, D]
    k: jax.Array,  # f32[T, K, D]
    v: jax.Array,  # f32[T, K, D]
    kv: Pool,
    place: Place,
    rows: Rows,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> tuple[jax.Array, Pool]:
    """(f32[T, H, D], the pool with this layer's new tokens). The write comes first: rows of one step may read each other.

    Blocks that end before the window of a row's first token are not read; their entries in the table may be 0.
    """
    group, layer = (jnp.asarray(x, jnp.int32) for x in place)
    slots, tables = (jax.lax.dynamic_index_in_dim(x, group, keepdims=False) for x in (rows.slots, rows.block_tables))
    where = {"platform": platform_of(rows.mesh.devices.flat[0]), "sharding": NamedSharding(rows.mesh, POOL)}
    num_rows = rows.context_lens.shape[0]
    data, scales = split_pool(kv)
    written = kv_write(data, k, v, layer, slots, num_rows=num_rows, kv_scales=scales, **where)
    kv = QuantizedPool(*written) if isinstance(written, tuple) else written
    data, scales = split_pool(kv)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "kv_scales": scales, **where}
    if q.shape[0] == num_rows:  # a decode bucket
        out = paged_decode(q, data, layer, tables, rows.context_lens, **options)
    else:
        out = paged_attention(q, data, layer, tables, rows.context_lens, rows.query_start, rows.num_decode, **options)
    assert isinstance(out, jax.Array)
    return out.astype(jnp.float32), kv
