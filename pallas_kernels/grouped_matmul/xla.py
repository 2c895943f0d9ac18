"""grouped_matmul in XLA: a loop over experts, blocks of their outputs, and tiles of their rows. Experts without rows are skipped,
and each block of weights is read (and on CPU copied, or expanded to f32) once for all rows of its expert."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import ceil_div, pad_axis
from pallas_kernels.common.targets import Chip

BLOCK_BYTES = 1 << 20  # of weights in f32; half of a core's second cache on CPU
MAX_ROWS = 128  # of a tile


def row_tile(tokens: int, experts: int) -> int:
    """Rows an iteration: about those of an expert, a power of two."""
    mean = max(1, tokens // experts)
    return min(MAX_ROWS, max(8, 1 << (mean - 1).bit_length()))


def matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, out_dtype: str, chip: Chip | None) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    (tokens, inputs), (experts, outputs, _) = lhs.shape, rhs.shape
    wide = jnp.float32 if chip is None else lhs.dtype  # f32 products are twice as fast as bf16 ones on CPU
    tile = row_tile(tokens, experts)
    block = min(outputs, max(16, BLOCK_BYTES // (4 * inputs) // 16 * 16))
    # A tile may reach past its expert's rows: the next one's, written later, then replace what it left there.
    lhs = pad_axis(lhs.astype(wide), 0, tokens + tile)
    ends = jnp.cumsum(group_sizes)

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

    y = lax.fori_loop(0, experts, expert, jnp.zeros((tokens + tile, outputs), jnp.float32))[:tokens]
    return jnp.where(jnp.arange(tokens)[:, None] < ends[-1], y, 0).astype(out_dtype)
