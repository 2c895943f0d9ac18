"""quant_matmul for TPU: the grid walks over tiles of rows and tiles of outputs, each with all of its inputs in VMEM; weights come
as they are stored, once for each tile of rows, and are expanded some columns at a time on their way to the matrix unit."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.targets import MIB, Chip
from pallas_kernels.common.tuning import tuned
from pallas_kernels.quant_matmul.spec import MatmulSpec, matmul_key
from pallas_kernels.quant_matmul.weights import Int4Weight, Weight, quantize_rows, split_groups

LANES, SUBLANES = 128, 32  # of a tile of int8
CHUNK = 512  # columns expanded at a time
INT8_UNITS = ("v5e", "v5p", "v6e")  # chips that multiply int8
EXACT = 1024  # products of two int8 that f32 sums without rounding: 127 * 127 * 1024 < 2^24


@dataclass(frozen=True)
class Config:
    rows: int  # of activations in a tile
    outputs: int  # of a tile


def vmem_bytes(spec: MatmulSpec, config: Config) -> int:
    """What a tile needs, with two buffers for all that is copied."""
    rows, outputs = min(config.rows, spec.tokens), min(config.outputs, spec.outputs)
    inputs = spec.columns * (2 if spec.group else 1)
    x = rows * inputs * (1 if spec.int8_activations else 2)
    scales = 4 * outputs * (8 if spec.group == 0 else 2 * (spec.columns // spec.group + 7) * (1 + spec.zeros))
    out = rows * outputs * jnp.dtype(spec.out_dtype).itemsize
    return 2 * (x + outputs * spec.columns + scales + out) + 4 * rows * outputs + 10 * outputs * CHUNK


def choose_config(spec: MatmulSpec, chip: Chip) -> Config:
    """The largest tiles that fit half of VMEM: outputs before rows, as rows are few when weights are what is waited for."""
    options = (Config(rows, outputs) for rows in (256, 128, 64, 32) for outputs in (512, 256, 128))
    return next((config for config in options if fits(spec, config, chip)), Config(32, LANES))


def fits(spec: MatmulSpec, config: Config, chip: Chip) -> bool:
    return vmem_bytes(spec, config) <= chip.fast_memory // 2


def candidates(spec: MatmulSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    if chip is None:
        return []
    default = choose_config(spec, chip)
    others = [Config(rows, outputs) for rows in (32, 64, 128, 256, 512) for outputs in (128, 256, 512, 1024)]
    some = (c for c in others if c.rows < 2 * max(32, spec.tokens) and c.outputs < 2 * spec.outputs)
    return [default, *(c for c in some if c != default and fits(spec, c, chip))]


def config_of(spec: MatmulSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if this one fits into it."""
    default = choose_config(spec, chip)
    config = tuned("quant_matmul", "mosaic_tpu", chip, matmul_key(spec), default)
    whole = config.rows % SUBLANES == 0 and config.outputs % LANES == 0
    return config if whole and fits(spec, config, chip) else default


def supports(spec: MatmulSpec, chip: Chip | None) -> str | None:
    if chip is None:
        return "must know its chip"
    if spec.dtype != "bfloat16" and not spec.int8_activations:
        return f"takes bfloat16 activations; got {spec.dtype}: cast them, or quantize them with int8_activations"
    needed, half = vmem_bytes(spec, choose_config(spec, chip)), chip.fast_memory // 2
    if needed > half:
        return f"needs {needed / MIB:.0f} MiB of VMEM for {spec.inputs} inputs, where {half // MIB} may be used: split the inputs"
    return None


def matmul(
    x: jax.Array,
    weight: Weight,
    *,
    int8_activations: bool,
    out_dtype: str,
    chip: Chip,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """out_dtype[T, out]; as in the op."""
    (tokens, inputs), outputs = x.shape, weight.values.shape[0]
    int4 = isinstance(weight, Int4Weight)
    spec = MatmulSpec(
        tokens,
        inputs,
        outputs,
        str(x.dtype),
        out_dtype,
        weight.group if int4 else 0,
        int4 and weight.zeros is not None,
        int8_activations,
    )
    config = config or config_of(spec, chip)
    rows, outs = min(config.rows, tokens), min(config.outputs, outputs)
    of_rows = lambda width: pl.BlockSpec((rows, width), lambda t, o: (t, 0))
    of_outputs = lambda width: pl.BlockSpec((outs, width), lambda t, o: (o, 0))
    weights = of_outputs(weight.values.shape[1])
    along = pl.BlockSpec((1, outs), lambda t, o: (0, o))
    if int4:
        halves = split_groups(x, weight)
        pairs = pl.BlockSpec((2, weight.scales.shape[1], outs), lambda t, o: (0, 0, o))
        args = [halves, weight.values, weight.scales]
        in_specs = [pl.BlockSpec((2, rows, halves.shape[2]), lambda t, o: (0, t, 0)), weights, pairs]
        if weight.zeros is not None:
            args.append(weight.zeros.astype(jnp.float32))
            in_specs.append(pairs)
        kernel = int4_kernel(weight.group)
    elif int8_activations:
        q, row_scales = quantize_rows(x)
        args = [q, row_scales, weight.values, weight.scales[None]]
        in_specs = [of_rows(inputs), of_rows(1), weights, along]
        kernel = w8a8_kernel(chip.name in INT8_UNITS)
    else:
        args = [x, weight.values, weight.scales[None]]
        in_specs = [of_rows(inputs), weights, along]
        kernel = int8_kernel
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(tokens, rows), pl.cdiv(outputs, outs)),
        in_specs=in_specs,
        out_specs=pl.BlockSpec((rows, outs), lambda t, o: (t, o)),
        out_shape=jax.ShapeDtypeStruct((tokens, outputs), out_dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=chip.fast_memory * 3 // 4
        ),
        interpret=interpret,
        name="quant_matmul",
    )(*args)


def accumulate(width: int, step: int, add: Callable[..., jax.Array], acc: jax.Array) -> jax.Array:
    """acc after add(acc, columns) for `step` columns at a time of `width`, the rest last."""
    whole = width // step
    acc = lax.fori_loop(0, whole, lambda i, acc: add(acc, pl.ds(pl.multiple_of(i * step, step), step)), acc)
    return add(acc, pl.ds(whole * step, width % step)) if width % step else acc


def product(a: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """a [rows, in] times the transpose of b [out, in]."""
    return lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=dtype)


def int8_kernel(x_ref, w_ref, scale_ref, o_ref):
    add = lambda acc, columns: acc + product(x_ref[:, columns], w_ref[:, columns].astype(jnp.bfloat16), jnp.float32)
    acc = accumulate(w_ref.shape[1], CHUNK, add, jnp.zeros(o_ref.shape, jnp.float32))
    o_ref[...] = (acc * scale_ref[...]).astype(o_ref.dtype)


def w8a8_kernel(int8_unit: bool) -> Callable[..., None]:
    """int32 sums: of the matrix unit, or else of its f32 sums, so few products each that these are exact."""

    def kernel(x_ref, row_ref, w_ref, scale_ref, o_ref):
        def add(acc, columns):
            x, w = x_ref[:, columns], w_ref[:, columns]
            if int8_unit:
                return acc + product(x, w, jnp.int32)
            return acc + product(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), jnp.float32).astype(jnp.int32)

        acc = accumulate(w_ref.shape[1], EXACT, add, jnp.zeros(o_ref.shape, jnp.int32))
        o_ref[...] = (acc.astype(jnp.float32) * row_ref[...] * scale_ref[...]).astype(o_ref.dtype)

    return kernel


def int4_kernel(group: int) -> Callable[..., None]:
    """A product for each group, of values as they are (which bfloat16 holds exactly), then scaled: scales lie along the outputs,
    as the results do. Groups of less than 128 columns share a line of lanes, and the activations of the others are set to 0."""

    def kernel(x_ref, w_ref, scale_ref, *rest):
        *zeros, o_ref = rest

        def add(acc, columns):
            packed = w_ref[:, columns].astype(jnp.int32)
            for half, values in enumerate(((packed << 28) >> 28, packed >> 4)):
                line, w = x_ref[half, :, columns], values.astype(jnp.bfloat16)
                lane = lax.broadcasted_iota(jnp.int32, line.shape, 1)
                for i in range(columns.size // group):
                    x = line if columns.size == group else jnp.where((lane >= i * group) & (lane < (i + 1) * group), line, 0)
                    at = half, pl.ds(lax.div(columns.start, group) + i, 1)
                    part = product(x, w, jnp.float32)
                    if zeros:
                        part -= jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True) * zeros[0][at]
                    acc += part * scale_ref[at]
            return acc

        acc = accumulate(w_ref.shape[1], LANES, add, jnp.zeros(o_ref.shape, jnp.float32))
        o_ref[...] = acc.astype(o_ref.dtype)

    return kernel
