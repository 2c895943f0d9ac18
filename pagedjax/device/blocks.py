"""Whole blocks of the pool on the move: from block to block inside a step, and to host memory and back between steps."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding


def copy_blocks(kv: jax.Array, copies: jax.Array) -> jax.Array:
    """kv [J, N, 2, K, P, D'], copies i32[C, 2] of (source, target), the real ones first, then (0, 0): the pool with each source
    also in its target, in all layers, one copy after the other. In place, one layer of one block at a time; the loop is as long
    as there are real copies."""
    layers = kv.shape[0]
    zero = jnp.int32(0)

    def copy(i: jax.Array, kv: jax.Array) -> jax.Array:
        source, target = copies[i // layers]
        block = lax.dynamic_slice(kv, (i % layers, source, *[zero] * 4), (1, 1, *kv.shape[2:]))
        return lax.dynamic_update_slice(kv, block, (i % layers, target, *[zero] * 4))

    return lax.fori_loop(0, layers * jnp.sum(copies[:, 1] != 0, dtype=jnp.int32), copy, kv)


def read_block(kv: jax.Array, block: jax.Array) -> jax.Array:
    """kv [J, N, 2, K, P, D'], block i32[1] -> [J, 2, K, P, D']."""
    return lax.dynamic_index_in_dim(kv, block[0], axis=1, keepdims=False)


def write_block(kv: jax.Array, block: jax.Array, data: jax.Array, *, on_device: NamedSharding) -> jax.Array:
    """kv [J, N, 2, K, P, D'] with `data` [J, 2, K, P, D'], which is in host memory, as block i32[1]. The data is moved by itself
    first: from host memory, XLA for TPU would write it by taking the pool there."""
    return lax.dynamic_update_index_in_dim(kv, jax.device_put(data, on_device), block[0], axis=1)
