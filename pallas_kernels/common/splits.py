"""How a row's context is split over the programs of a GPU, and how their partial results are joined.

Flash decoding (Dao et al. 2023): each program attends to a stretch of tiles of its own and writes (out, lse); the softmax over
all of them follows from these exactly.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import LOWEST, ceil_div
from pallas_kernels.common.online import finish

LOG2E = 1.4426950408889634  # log2(e); exp(x) = exp2(x * LOG2E)
WAVES = 2  # programs a core has at least, where there is context enough
MIN_TOKENS = 256  # of context that a split is worth: one more costs a partial result, written and read again


def default_splits(programs: int, tokens: int, cores: int) -> int:
    """Into how many parts the context of `programs` programs is split, so that they keep `cores` cores busy; `tokens`: the
    longest context there can be."""
    return max(1, min(-(-WAVES * cores // programs), tokens // MIN_TOKENS))


def tile_span(begin: jax.Array, end: jax.Array, tile: int, split: jax.Array, splits: int) -> tuple[jax.Array, jax.Array]:
    """(first, after): the tiles that part `split` of `splits` takes of the tokens begin to end - 1. Each tile that holds one of
    these tokens is in exactly one part; a part may be empty, and all are where end <= begin."""
    first = lax.div(begin, jnp.int32(tile))
    after = jnp.where(end > begin, ceil_div(end, tile), first)
    each = ceil_div(after - first, splits)
    start = first + split * each
    return jnp.minimum(start, after), jnp.minimum(start + each, after)


def merge(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(f32[..., D], f32[...]): one softmax from those of R parts, f32[R, ..., D] and f32[R, ...]; an empty part has lse -inf.
    sinks [..., broadcast]: one more logit without a value."""
    top = jnp.maximum(lse.max(0), LOWEST)
    weight = jnp.exp(lse - top)
    acc = jnp.where(weight[..., None] > 0, out, 0) * weight[..., None]
    return finish((top, weight.sum(0), acc.sum(0)), sinks)
