"""grouped_matmul in XLA. Few rows are multiplied with every expert's weights, which are read once and without a copy. Otherwise
there is a loop over experts, blocks of their outputs, and tiles of their rows: experts without rows are skipped, and each block of
weights is read (and on CPU copied, or expanded to f32) once for all rows of its expert."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import ceil_div, einsum_f32, pad_axis
from pallas_kernels.common.targets import KIB, Chip, is_cpu
from pallas_kernels.grouped_matmul.spec import GroupedSpec

MAX_ROWS = 128  # of a tile
FEW_ROWS = 64  # up to here the products that nobody needs cost less than the loop, if most experts have rows
NARROW_ROWS = 32  # up to here CPUs are faster in bf16 than in f32


@dataclass(frozen=True)
class Config:
    """Of an iteration of the loop."""

    rows: int
    kib: int  # of weights, as if they were f32


def default_config(spec: GroupedSpec) -> Config:
    """About the rows of an expert, a power of two; of weights half of a core's second cache on CPU."""
    mean = max(1, spec.tokens // spec.experts)
    return Config(min(MAX_ROWS, max(8, 1 << (mean - 1).bit_length())), 1024)


def at_once(tokens: int, experts: int) -> bool:
    """Whether there is no loop."""
    return experts <= tokens <= FEW_ROWS


def candidates(spec: GroupedSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    if at_once(spec.tokens, spec.experts):
        return []
    default = default_config(spec)
    others = [Config(rows, kib) for rows in (8, 16, 32, 64, 128) for kib in (512, 1024, 2048)]
    near = [c for c in others if default.rows <= 2 * c.rows and c.rows <= 2 * default.rows]
    return [default, *(config for config in near if config != default)]


def matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, out_dtype: str, chip: Chip | None, config: Config
) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    tokens, ends = lhs.shape[0], jnp.cumsum(group_sizes)
    loop = not at_once(tokens, len(ends))
    y = by_loop(lhs, rhs, group_sizes, ends, chip, config) if loop else by_choice(lhs, rhs, ends)
    return jnp.where(jnp.arange(tokens)[:, None] < ends[-1], y, 0).astype(out_dtype)


def by_choice(lhs: jax.Array, rhs: jax.Array, ends: jax.Array) -> jax.Array:
    """f32[T, out]: each row of the product with its expert; any past the last expert's."""
    products = einsum_f32("ti,eoi->eto", lhs, rhs)
    row = jnp.arange(lhs.shape[0])
    expert = jnp.minimum(jnp.sum(row[:, None] >= ends, axis=1), len(ends) - 1)
    return products[expert, row]


def by_loop(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, ends: jax.Array, chip: Chip | None, config: Config
) -> jax.Array:
    """f32[T, out], any past the last expert's rows."""
    (tokens, inputs), (experts, outputs, _) = lhs.shape, rhs.shape
    tile = config.rows
    wide = jnp.float32 if is_cpu(chip) and tile > NARROW_ROWS else lhs.dtype
    block = min(outputs, max(16, config.kib * KIB // (4 * inputs) // 16 * 16))
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
                product = einsum_f32("ti,oi->to", x, weights)
                return lax.dynamic_update_slice(y, product, (row, at))

            return lax.fori_loop(0, ceil_div(group_sizes[e], tile), rows, y)

        return lax.fori_loop(0, jnp.where(group_sizes[e] > 0, -(-outputs // block), 0), outputs_of, y)

    return lax.fori_loop(0, experts, expert, jnp.zeros((tokens + tile, outputs), jnp.float32))[:tokens]
