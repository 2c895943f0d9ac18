"""grouped_matmul for TPU: a list of visits, each of one tile of rows for one expert, is made before the kernel and steers it from
scalar memory; a tile with rows of several experts is visited once for each. The grid walks over tiles of outputs and, inside,
over as many visits as there are; the weights of an expert stay in VMEM from one of its visits to the next."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.targets import KIB, MIB, Chip
from pallas_kernels.common.tuning import tuned
from pallas_kernels.grouped_matmul.spec import GroupedSpec, grouped_key

LANES, SUBLANES = 128, 16  # of a tile of bfloat16


@dataclass(frozen=True)
class Config:
    rows: int  # of a tile
    outputs: int  # of a tile


class Visits(NamedTuple):
    """Row t of lhs takes part in visit v if begin[v] <= t < end[v]. Visits of one tile follow each other; the last ones may be of
    tiles without rows of any expert, and then of no row. All i32[tiles + experts], of which `count` are meant."""

    tile: jax.Array
    expert: jax.Array
    begin: jax.Array
    end: jax.Array
    count: jax.Array  # i32


def find_visits(group_sizes: jax.Array, tokens: int, rows: int) -> Visits:
    """Of tiles of so many rows. What is past the last expert's rows counts as one more group, whose weights nobody needs."""
    experts = group_sizes.shape[0]
    ends = jnp.append(jnp.cumsum(group_sizes), tokens).astype(jnp.int32)
    sizes = jnp.append(group_sizes, tokens - ends[-2]).astype(jnp.int32)
    first = lax.div(ends - sizes, jnp.int32(rows))
    tiles = jnp.where(sizes > 0, lax.div(ends - 1, jnp.int32(rows)) + 1 - first, 0)
    after = jnp.cumsum(tiles)
    visit = jnp.arange(-(-tokens // rows) + experts, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(after <= visit[:, None], axis=1, dtype=jnp.int32), experts)
    used = jnp.where(sizes[:-1] > 0, jnp.arange(experts, dtype=jnp.int32), 0)
    expert = jnp.where(group < experts, group, used.max())  # of the last visit that had one, which is there already
    tile = jnp.minimum(first[group] + visit - (after - tiles)[group], -(-tokens // rows) - 1)
    return Visits(tile, expert, jnp.where(group < experts, (ends - sizes)[group], tokens), ends[group], after[-1])


def vmem_bytes(spec: GroupedSpec, config: Config) -> int:
    """What a visit needs, with two buffers for all that is copied."""
    rows, outputs = min(config.rows, spec.tokens), min(config.outputs, spec.outputs)
    size = jnp.dtype(spec.dtype).itemsize
    out = rows * outputs * jnp.dtype(spec.out_dtype).itemsize
    return 2 * (rows * spec.inputs * size + outputs * spec.inputs * size + out) + 4 * rows * outputs


def choose_config(spec: GroupedSpec, chip: Chip) -> Config:
    """Tiles of about the rows of an expert, 64 to 256, and of as many outputs as fit half of VMEM: each tile of outputs reads lhs
    again."""
    rows = min(256, max(64, pl.next_power_of_2(-(-spec.tokens // spec.experts))))
    options = (Config(r, outputs) for r in (rows, 64) for outputs in (1024, 512, 256, 128))
    return next((config for config in options if fits(spec, config, chip)), Config(64, LANES))


def fits(spec: GroupedSpec, config: Config, chip: Chip) -> bool:
    return vmem_bytes(spec, config) <= chip.fast_memory // 2 and table_bytes(spec, config) <= chip.scalar_memory // 2


def table_bytes(spec: GroupedSpec, config: Config) -> int:
    """SMEM that the visits take."""
    return 4 * 4 * (-(-spec.tokens // config.rows) + spec.experts)


def candidates(spec: GroupedSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    if chip is None:
        return []
    default = choose_config(spec, chip)
    others = [Config(rows, outputs) for rows in (32, 64, 128, 256, 512) for outputs in (128, 256, 512, 1024, 2048)]
    some = (c for c in others if c.rows < 2 * max(32, spec.tokens) and c.outputs < 2 * spec.outputs)
    return [default, *(c for c in some if c != default and fits(spec, c, chip))]


def config_of(spec: GroupedSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if this one fits into it."""
    default = choose_config(spec, chip)
    config = tuned("grouped_matmul", "mosaic_tpu", chip, grouped_key(spec), default)
    whole = config.rows % SUBLANES == 0 and config.outputs % LANES == 0
    return config if whole and fits(spec, config, chip) else default


def supports(spec: GroupedSpec, chip: Chip | None) -> str | None:
    if chip is None:
        return "must know its chip"
    if spec.dtype != "bfloat16":
        return f"takes bfloat16; got {spec.dtype}: cast both factors"
    config, half = choose_config(spec, chip), chip.fast_memory // 2
    needed = vmem_bytes(spec, config)
    if needed > half:
        return f"needs {needed / MIB:.0f} MiB of VMEM for {spec.inputs} inputs, where {half // MIB} may be used: split the inputs"
    table = table_bytes(spec, config)
    if table > chip.scalar_memory // 2:
        return (
            f"needs {table // KIB} KiB of SMEM for its visits, where {chip.scalar_memory // 2 // KIB} may be used: split the tokens"
        )
    return None


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str,
    chip: Chip,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    (tokens, inputs), (experts, outputs, _) = lhs.shape, rhs.shape
    config = config or config_of(GroupedSpec(tokens, inputs, outputs, experts, str(lhs.dtype), out_dtype), chip)
    rows, outs = min(config.rows, tokens), min(config.outputs, outputs)
    visits = find_visits(group_sizes, tokens, rows)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(pl.cdiv(outputs, outs), visits.count),
        in_specs=[
            pl.BlockSpec((rows, inputs), lambda o, v, tile, *_: (tile[v], 0)),
            pl.BlockSpec((None, outs, inputs), lambda o, v, tile, expert, *_: (expert[v], o, 0)),
        ],
        out_specs=pl.BlockSpec((rows, outs), lambda o, v, tile, *_: (tile[v], o)),
    )
    return pl.pallas_call(
        visit_kernel,
        grid_spec=grid_spec,
        out_shape=jax.ShapeDtypeStruct((tokens, outputs), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=chip.fast_memory * 3 // 4
        ),
        interpret=interpret,
        name="grouped_matmul",
    )(visits.tile, visits.expert, visits.begin, visits.end, lhs, rhs)


def visit_kernel(tile_ref, expert_ref, begin_ref, end_ref, lhs_ref, rhs_ref, o_ref):
    v = pl.program_id(1)
    begin, end, tile = begin_ref[v], end_ref[v], tile_ref[v]
    first = (v == 0) | (tile != tile_ref[jnp.maximum(v - 1, 0)])

    @pl.when(first)
    def _():
        o_ref[...] = jnp.zeros_like(o_ref)

    @pl.when(begin < end)
    def _():
        part = lax.dot_general(lhs_ref[...], rhs_ref[...], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        row = tile * o_ref.shape[0] + lax.broadcasted_iota(jnp.int32, part.shape, 0)
        o_ref[...] = jnp.where((row >= begin) & (row < end), part.astype(o_ref.dtype), o_ref[...])
