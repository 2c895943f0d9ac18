"""grouped_matmul through Pallas' Triton backend, which JAX has deprecated: for GPUs that there is no Mosaic kernel for (sm_80,
sm_100), and for what that one does not take. A program is a visit (visits.py) and a tile of outputs; rows that are not the expert's
are masked."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.common.compat import traced_for
from pallas_kernels.common.layout import precision_of
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tuning import tuned
from pallas_kernels.grouped_matmul.spec import GroupedSpec, grouped_key
from pallas_kernels.grouped_matmul.visits import find_visits


@dataclass(frozen=True)
class Config:
    rows: int  # of a tile; this and the next two are powers of two, at least 16
    outputs: int
    inputs: int  # that are multiplied at once
    warps: int = 4
    stages: int = 3  # tiles in flight


def choose_config(spec: GroupedSpec) -> Config:
    """Tiles of about the rows of an expert, 16 to 64."""
    rows = min(64, max(16, pl.next_power_of_2(-(-spec.tokens // spec.experts))))
    return Config(rows, 64 if rows > 16 else 128, 32 if spec.dtype == "float32" else 64)


def fits(spec: GroupedSpec, config: Config, chip: Chip) -> bool:
    """Whether the sizes are such as Triton knows, and the tiles in flight have room in half of the shared memory."""
    powers = all(size >= 16 and size & (size - 1) == 0 for size in (config.rows, config.outputs, config.inputs))
    tile = config.inputs * (config.rows + config.outputs) * jnp.dtype(spec.dtype).itemsize
    return powers and config.warps in (1, 2, 4, 8) and config.stages * tile <= chip.fast_memory // 2


def candidates(spec: GroupedSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    if chip is None:
        return []
    default = choose_config(spec)
    sizes = ((rows, outputs, inputs) for rows in (16, 32, 64, 128) for outputs in (64, 128) for inputs in (32, 64))
    others = [Config(*size, warps, stages) for size in sizes for warps, stages in ((4, 3), (4, 4), (8, 3))]
    return [default, *(c for c in others if c != default and fits(spec, c, chip))]


def config_of(spec: GroupedSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if this one fits into it."""
    default = choose_config(spec)
    config = tuned("grouped_matmul", "triton", chip, grouped_key(spec), default)
    return config if fits(spec, config, chip) else default


def supports(spec: GroupedSpec, chip: Chip | None) -> str | None:
    """As of the table of backends: every call."""


def body(expert_ref, start_ref, begin_ref, end_ref, lhs_ref, rhs_ref, out_ref, *, config: Config):
    v, experts = pl.program_id(0), rhs_ref.shape[0]
    (inputs, outputs) = lhs_ref.shape[1], rhs_ref.shape[1]
    expert, begin, end = expert_ref[v], begin_ref[v], end_ref[v]
    row = start_ref[v] + lax.iota(jnp.int32, config.rows)
    out = pl.program_id(1) * config.outputs + lax.iota(jnp.int32, config.outputs)
    own = ((row >= begin) & (row < end))[:, None]
    steps = jnp.where((begin < end) & (expert < experts), jnp.int32(-(-inputs // config.inputs)), jnp.int32(0))
    weights = jnp.minimum(expert, experts - 1)

    def step(i, acc):
        at = i * config.inputs + lax.iota(jnp.int32, config.inputs)
        inside = (at < inputs)[None, :]
        zero = jnp.zeros((), lhs_ref.dtype)
        x = plt.load(lhs_ref.at[row[:, None], at[None, :]], mask=own & inside, other=zero)
        w = plt.load(rhs_ref.at[weights, out[:, None], at[None, :]], mask=(out < outputs)[:, None] & inside, other=zero)
        precision = precision_of(x.dtype)
        return acc + lax.dot_general(x, w, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)

    acc = lax.fori_loop(jnp.int32(0), steps, step, jnp.zeros((config.rows, config.outputs), jnp.float32))
    plt.store(out_ref.at[row[:, None], out[None, :]], acc.astype(out_ref.dtype), mask=own & (out < outputs)[None, :])


def matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str,
    chip: Chip,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    (tokens, inputs), (experts, outputs, _) = lhs.shape, rhs.shape
    config = config or config_of(GroupedSpec(tokens, inputs, outputs, experts, str(lhs.dtype), out_dtype), chip)
    visits = find_visits(group_sizes, tokens, config.rows, 1)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    with traced_for(chip):
        return pl.pallas_call(
            partial(body, config=config),
            grid=(visits.begin.shape[0], pl.cdiv(outputs, config.outputs)),
            in_specs=[whole] * 6,
            out_specs=whole,
            out_shape=jax.ShapeDtypeStruct((tokens, outputs), out_dtype),
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
            interpret=interpret,
            name="grouped_matmul_triton",
        )(*visits, lhs, rhs)
