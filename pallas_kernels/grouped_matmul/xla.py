"""grouped_matmul in XLA. Few rows are multiplied with every expert's weights, which are read once and without a copy. Otherwise
there is a loop over experts, blocks of their outputs, and tiles of their rows: experts without rows are skipped, and each block of
weights is read (and on CPU copied, or expanded to f32) once for all rows of its expert."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import ceil_div, pad_axis
from pallas_kernels.common.targets import Chip

BLOCK_BYTES = 1 << 20  # of weights in f32; half of a core's second cache on CPU
MAX_ROWS = 128  # of a tile
FEW_ROWS = 64  # up to here the products that nobody needs cost less than the loop, if most experts have rows
NARROW_ROWS = 32  # up to here CPUs are faster in bf16 than in f32


def row_tile(tokens: int, experts: int) -> int:
    """Rows an iteration: about those of an expert, a power of two."""
    mean = max(1, tokens // experts)
    return min(MAX_ROWS, max(8, 1 << (mean - 1).bit_length()))


def matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, out_dtype: str, chip: Chip | None) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    tokens, ends = lhs.shape[0], jnp.cumsum(group_sizes)
    y = by_choice(lhs, rhs, ends) if len(ends) <= tokens <= FEW_ROWS else by_loop(lhs, rhs, group_sizes, ends, chip)
    return jnp.where(jnp.arange(tokens)[:, None] < ends[-1], y, 0).astype(out_dtype)


def by_choice(lhs: jax.Array, rhs: jax.Array, ends: jax.Array) -> jax.Array:
    """f32[T, out]: each row of the product with its expert; any past the last expert's."""
    products = jnp.einsum("ti,eoi->eto", lhs, rhs, preferred_element_type=jnp.float32)
    row = jnp.arange(lhs.shape[0])
    expert = jnp.minimum(jnp.sum(row[:, None] >= ends, axis=1), len(ends) - 1)
    return products[expert, row]


def by_loop(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, ends: jax.Array, chip: Chip | None) -> jax.Array:
    """f32[T, out], any past the last expert's rows."""
    (tokens, inputs), (experts, outputs, _) = lhs.shape, rhs.shape
    tile = row_tile(tokens, experts)
    wide = jnp.float32 if chip is None and tile > NARROW_ROWS else lhs.dtype
    block = min(outputs, max(16, BLOCK_BYTES // (4 * inputs) // 16 * 16))
    # A tile may reach past its expert's rows: the next one's, written later, then replace what it left there.
    lhs = pad_axis(lhs.astype(wide), 0, tokens + tile)

    def expert(e, y):
        start = ends[e] - group_sizes[e]

        def outputs_of(b, y):
            at = jnp.minimum(b * block, outputs - block)  # the last block may do some outputs again
            weights = lax.dynamic_slice(rhs, (e, at, 0), (1, block, inputs))[0].astype(wide)
            weights = lax.optimization_barrier(weights)  # or each tile copies them again

            def rows(t, y):
                row = start + t * tile
                x = lax.dynamic_slice_in_dim(lhs, row, tile)
                product = jnp.einsum("ti,oi->to", x, weights, preferred_element_type=jnp.float32)
                return lax.dynamic_update_slice(y, product, (row, at))

            return lax.fori_loop(0, ceil_div(group_sizes[e], tile), rows, y)

        return lax.fori_loop(0, jnp.where(group_sizes[e] > 0, -(-outputs // block), 0), outputs_of, y)

    return lax.fori_loop(0, experts, expert, jnp.zeros((tokens + tile, outputs), jnp.float32))[:tokens]
