"""quant_matmul through Pallas' Triton backend, which JAX has deprecated: for GPUs that there is no Mosaic kernel for (sm_80,
sm_100), and for what that one does not take. A program takes a tile of tokens, a tile of outputs and one of the parts that the
inputs are split into; weights are read as they are stored and expanded in registers. XLA adds up the parts and scales them."""

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
from pallas_kernels.quant_matmul.spec import MatmulSpec, matmul_key
from pallas_kernels.quant_matmul.weights import Int4Weight, Weight, quantize_rows, split_groups

MAX_SPLITS = 8


@dataclass(frozen=True)
class Config:
    tokens: int  # of a tile; this and the next two are powers of two, at least 16
    outputs: int
    columns: int  # bytes of a row of weights that are multiplied at once; of int4 weights a group
    splits: int
    warps: int = 4
    stages: int = 3  # tiles in flight


def choose_config(spec: MatmulSpec, chip: Chip) -> Config:
    """Tiles of up to 64 tokens (32 of f32), and splits until there are two programs for each multiprocessor."""
    wide = spec.dtype == "float32" and not spec.int8_activations
    tokens = min(32 if wide else 64, max(16, pl.next_power_of_2(spec.tokens)))
    columns = spec.group or (128 if spec.int8_activations else 32 if wide else 64)
    tiles = -(-spec.tokens // tokens) * -(-spec.outputs // 64)
    splits = max(1, min(MAX_SPLITS, 2 * chip.cores // tiles, spec.columns // columns // 4))
    options = (Config(tokens, 64, columns, splits, stages=stages) for stages in (3, 2))
    return next((config for config in options if fits(spec, config, chip)), Config(16, 64, columns, splits, stages=1))


def fits(spec: MatmulSpec, config: Config, chip: Chip) -> bool:
    """Whether the sizes are such as Triton knows, and the tiles in flight have room in half of the shared memory."""
    powers = all(size >= 16 and size & (size - 1) == 0 for size in (config.tokens, config.outputs, config.columns))
    itemsize = 1 if spec.int8_activations else jnp.dtype(spec.dtype).itemsize
    row = config.columns * (config.tokens * itemsize * (2 if spec.group else 1) + config.outputs)
    whole = spec.group in (0, config.columns) and config.warps in (1, 2, 4, 8)
    return powers and whole and config.stages * row <= chip.fast_memory // 2


def candidates(spec: MatmulSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    if chip is None:
        return []
    default = choose_config(spec, chip)
    sizes = ((t, o) for t in (16, 32, 64, 128) if t < 2 * max(16, spec.tokens) for o in (32, 64, 128))
    others = [
        Config(t, o, default.columns, default.splits, warps, stages) for t, o in sizes for warps, stages in ((4, 3), (4, 4), (8, 3))
    ]
    return [default, *(c for c in others if c != default and fits(spec, c, chip))]


def config_of(spec: MatmulSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if this one fits into it."""
    default = choose_config(spec, chip)
    config = tuned("quant_matmul", "triton", chip, matmul_key(spec), default)
    return config if fits(spec, config, chip) else default


def supports(spec: MatmulSpec, chip: Chip | None) -> str | None:
    """As of the table of backends."""
    size = spec.outputs * spec.columns
    if 2**31 <= size <= 2**32:
        return f"counts the {size} bytes of this weight in 32 bits; split the outputs"
    return None


def body(x_ref, w_ref, scale_ref, *rest, config: Config, group: int, total):
    """x [halves, T, columns], w [out, columns], out [splits, T, out]; rest: zero points of int4 weights, and the output."""
    *zeros, out_ref = rest
    (halves, tokens, columns), outputs = x_ref.shape, w_ref.shape[0]
    row = pl.program_id(0) * config.tokens + lax.iota(jnp.int32, config.tokens)
    out = pl.program_id(1) * config.outputs + lax.iota(jnp.int32, config.outputs)
    split = pl.program_id(2)
    own, mine = (row < tokens)[:, None], (out < outputs)[:, None]
    steps = -(-columns // config.columns)
    each = -(-steps // config.splits)

    def line(ref, half, i):
        """f32[outputs, 1] of a group."""
        return plt.load(ref.at[half, i, out], mask=out < outputs, other=0).astype(jnp.float32)[:, None]

    def step(i, acc):
        at = i * config.columns + lax.iota(jnp.int32, config.columns)
        inside = (at < columns)[None, :]
        w = plt.load(w_ref.at[out[:, None], at[None, :]], mask=mine & inside, other=0)
        packed = w.astype(jnp.int32) if group else w
        for half in range(halves):
            x = plt.load(x_ref.at[half, row[:, None], at[None, :]], mask=own & inside, other=0)
            if group:
                values = (packed >> 4 if half else (packed << 28) >> 28).astype(jnp.float32)
                w = (values - line(zeros[0], half, i) if zeros else values) * line(scale_ref, half, i)
            precision = precision_of(x.dtype)
            contract = ((1,), (1,)), ((), ())
            acc += lax.dot_general(x, w.astype(x.dtype), contract, precision=precision, preferred_element_type=total)
        return acc

    empty = jnp.zeros((config.tokens, config.outputs), total)
    acc = lax.fori_loop(split * each, jnp.minimum((split + 1) * each, steps), step, empty)
    plt.store(out_ref.at[split, row[:, None], out[None, :]], acc, mask=own & (out < outputs)[None, :])


def matmul(
    x: jax.Array,
    weight: Weight,
    *,
    int8_activations: bool,
    out_dtype: str,
    chip: Chip,
    config: Config | None = None,
    interpret: bool = False,
) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    (tokens, inputs), outputs = x.shape, weight.values.shape[0]
    int4 = isinstance(weight, Int4Weight)
    group, zeros = (weight.group, weight.zeros) if int4 else (0, None)
    spec = MatmulSpec(tokens, inputs, outputs, str(x.dtype), out_dtype, group, zeros is not None, int8_activations)
    config = config or config_of(spec, chip)
    row_scales = None
    if int8_activations:
        x, row_scales = quantize_rows(x)
    halves = split_groups(x, weight) if int4 else x[None]
    total = jnp.int32 if int8_activations else jnp.float32
    scales = (weight.scales,) if zeros is None else (weight.scales, zeros)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    with traced_for(chip):
        sums = pl.pallas_call(
            partial(body, config=config, group=group, total=total),
            grid=(pl.cdiv(tokens, config.tokens), pl.cdiv(outputs, config.outputs), config.splits),
            in_specs=[whole] * (2 + len(scales)),
            out_specs=whole,
            out_shape=jax.ShapeDtypeStruct((config.splits, tokens, outputs), total),
            compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
            interpret=interpret,
            name="quant_matmul_triton",
        )(halves, weight.values, *scales)
    y = jnp.sum(sums, axis=0).astype(jnp.float32)
    if row_scales is not None:
        y *= row_scales
    return (y if int4 else y * weight.scales).astype(out_dtype)
