"""kv_write in XLA: by token for CPU and GPU, by block for TPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import pad_axis
from pallas_kernels.common.quantized import as_stored

Write = Callable[..., jax.Array]  # (kv, k, v, layer, slots) -> kv, with k and v as they are stored


def write(
    tokens: Write, kv: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, slots: jax.Array, kv_scales: jax.Array | None
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """What the op gives, by one of the two functions below. Scales are written as a pool whose heads have a width of 1."""
    k, v, made = as_stored(k, v, kv.dtype, kv_scales)
    kv = tokens(kv, *(pad_axis(x, 2, kv.shape[5]) for x in (k, v)), layer, slots)
    if made is None or kv_scales is None:
        return kv
    return kv, tokens(kv_scales[..., None], *(x[..., None] for x in made), layer, slots)[..., 0]


def write_tokens(kv: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, slots: jax.Array) -> jax.Array:
    """A scatter of tokens. With one token XLA:CPU re-lays the whole pool around the write, so a second one goes to slot 0."""
    if k.shape[0] == 1:
        k, v, slots = pad_axis(k, 0, 2), pad_axis(v, 0, 2), pad_axis(slots, 0, 2)
    block_size = jnp.int32(kv.shape[4])
    block, place = lax.div(slots, block_size), lax.rem(slots, block_size)
    return kv.at[layer, block, :, :, place].set(jnp.stack([k, v], 1), mode="promise_in_bounds")


def write_blocks(kv: jax.Array, k: jax.Array, v: jax.Array, layer: jax.Array, slots: jax.Array, *, num_rows: int) -> jax.Array:
    """Reads, merges and writes back each touched block, one after the other.

    A run is a stretch of tokens with consecutive slots of one block. A row of n tokens makes at most n // P + 2 of them, so
    there are at most T // P + 2 * num_rows; runs in the scrap block are left out. Moves 2 blocks (all heads, K and V) a run.
    """
    tokens, block_size = k.shape[0], kv.shape[4]
    most = min(tokens, tokens // block_size + 2 * num_rows)
    first = jnp.concatenate([jnp.ones(1, bool), (slots[1:] != slots[:-1] + 1) | (slots[1:] % block_size == 0)])
    (starts,) = jnp.nonzero(first & (slots >= block_size), size=most, fill_value=tokens)
    run = jnp.cumsum(first.astype(jnp.int32))
    run = jnp.concatenate([run, jnp.zeros(1, jnp.int32)])
    # new[P + t] is token t, so that the slice of P tokens that puts the run in its place never leaves the array
    new = jnp.pad(jnp.stack([k, v], 1), ((block_size, block_size), (0, 0), (0, 0), (0, 0)))
    run_of = jnp.pad(run[:tokens], (block_size, block_size))

    def write(i, kv):
        start = starts[i]
        slot = slots[start]
        at = (layer, slot // block_size, 0, 0, 0, 0)
        offset = block_size + start - slot % block_size
        fresh = lax.dynamic_slice_in_dim(new, offset, block_size).transpose(1, 2, 0, 3)[None, None]
        mine = lax.dynamic_slice_in_dim(run_of, offset, block_size) == run[start]
        old = lax.dynamic_slice(kv, at, (1, 1, *kv.shape[2:]))
        return lax.dynamic_update_slice(kv, jnp.where(mine[:, None], fresh, old), at)

    return lax.fori_loop(0, jnp.sum(starts < tokens, dtype=jnp.int32), write, kv)
