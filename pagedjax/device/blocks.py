"""Whole blocks of the pool on the move: from block to block inside a step, and to host memory and back between steps."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from pagedjax.state import Pool


def copy_blocks(kv: Pool, copies: jax.Array) -> Pool:
    """The pool, copies i32[C, 2] of (source, target), the real ones first, then (0, 0): the pool with each source
    also in its target, in all layers, one copy after the other. In place, one layer of one block at a time; the loop is as long
    as there are real copies."""
    layers = jax.tree.leaves(kv)[0].shape[0]
    zero = jnp.int32(0)

    def copy(i: jax.Array, kv: Pool) -> Pool:
        source, target = copies[i // layers]

        def copy_one(array: jax.Array) -> jax.Array:
            rest = [zero] * (array.ndim - 2)
            block = lax.dynamic_slice(array, (i % layers, source, *rest), (1, 1, *array.shape[2:]))
            return lax.dynamic_update_slice(array, block, (i % layers, target, *rest))

        return jax.tree.map(copy_one, kv)

    return lax.fori_loop(0, layers * jnp.sum(copies[:, 1] != 0, dtype=jnp.int32), copy, kv)


def read_block(kv: Pool, block: jax.Array) -> Pool:
    """The pool, block i32[1] -> [J, 2, K, P, D'], and its scales."""
    return jax.tree.map(lambda array: lax.dynamic_index_in_dim(array, block[0], axis=1, keepdims=False), kv)


def write_block(kv: Pool, block: jax.Array, data: Pool, *, on_device: NamedSharding) -> Pool:
    """The pool with `data`, as read_block has it but in host memory, as block i32[1]. The data is moved by itself first: from
    host memory, XLA for TPU would write it by taking the pool there."""

    def write(array: jax.Array, data: jax.Array) -> jax.Array:
        return lax.dynamic_update_index_in_dim(array, jax.device_put(data, on_device), block[0], axis=1)

    return jax.tree.map(write, kv, data)
