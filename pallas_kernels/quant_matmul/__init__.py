"""quant_matmul: activations times quantized weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.dispatch import Backend, Op, kernel, run
from pallas_kernels.common.layout import check, pad_axis, result_dtype
from pallas_kernels.common.sharding import Split, over, split_of
from pallas_kernels.common.tuning import tuned
from pallas_kernels.quant_matmul import xla
from pallas_kernels.quant_matmul.reference import reference
from pallas_kernels.quant_matmul.spec import TYPICAL_MATMUL, MatmulSpec, matmul_key
from pallas_kernels.quant_matmul.weights import GROUPS, Int4Weight, Int8Weight, Weight, quantize_int4, quantize_int8

__all__ = ["OP", "Int4Weight", "Int8Weight", "quant_matmul", "quantize_int4", "quantize_int8", "reference"]

OP = Op(
    "quant_matmul",
    (
        kernel(__name__, "mosaic_tpu", ("tpu",), "weights are read as they are stored and expanded in VMEM"),
        kernel(__name__, "mosaic_gpu", ("cuda",), "weights are read as they are stored and expanded in registers"),
        kernel(
            __name__, "triton", ("cuda",), "a stop-gap where Mosaic's kernel does not take the call: expands weights in registers"
        ),
        Backend("xla", (), "a product with weights expanded block by block", candidates=xla.candidates),
    ),
    TYPICAL_MATMUL,
)
DTYPES = (jnp.float32, jnp.bfloat16)
MOST_INPUTS = ((1 << 31) - 1) // 127**2  # whose products of int8 an i32 holds the sum of


def quant_matmul(
    x: jax.Array,
    weight: Weight,
    *,
    int8_activations: bool = False,
    out_dtype: str | None = None,
    backend: str | None = None,
    platform: str | None = None,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """x times the transpose of the weight, [T, out], in out_dtype (float32 or bfloat16; None: that of x); sums are f32.

    x [T, in] f32 or bf16; weight an Int8Weight of [out, in] or an Int4Weight made of one. int8_activations (with int8 weights
    alone) rounds each row of x to multiples of max|x| / 127, multiplies in int8 and sums in i32. Without it int8 weights lose
    nothing more, and int4 weights are rounded to x's dtype before they are multiplied. An Int4Weight does not keep how many
    inputs it was made of: x may have as many as fill the same groups. backend, platform: as in `dispatch.run`. sharding: how the
    weight's values are sharded over a mesh, by outputs, as the result then is, or by inputs (int4: pairs of groups), as x then is:
    the shards' sums are added in f32, and with int8_activations each rounds its own part of a row; None: as the values say
    (`sharding.split_of`).
    """
    x = jnp.asarray(x)
    check(isinstance(weight, Weight), f"weight must be an Int8Weight or an Int4Weight; got {type(weight).__name__}")
    weight = jax.tree.map(jnp.asarray, weight, is_leaf=lambda part: isinstance(part, list))
    spec = checked(x, weight, int8_activations, out_dtype)
    options = {"int8_activations": int8_activations, "out_dtype": spec.out_dtype}
    split = split_of("values of the weight", weight.values, sharding, {0: "outputs", 1: "inputs"})
    if split is not None:
        more: dict[str, Any] = {"int8_activations": int8_activations, "backend": backend, "platform": platform}
        return over_shards(split, x, weight, spec.out_dtype, more)

    def call(entry, x, weight, chip):
        return entry(x, weight, chip=chip, **options)

    def in_xla(x, weight, chip):
        config = tuned(OP.name, "xla", chip, matmul_key(spec), xla.DEFAULT)
        return xla.matmul(x, weight, chip=chip, config=config, **options)

    functions = OP.entries("matmul", call) | {"xla": in_xla}
    return run(OP, functions, spec, (x, weight), backend=backend, platform=platform)


def checked(x: jax.Array, weight: Weight, int8_activations: bool, out_dtype: str | None) -> MatmulSpec:
    """What a call is, or ValueError where it cannot be made."""
    check(x.ndim == 2 and min(x.shape) >= 1, f"x must be [tokens, in], none of them 0; got {x.shape}")
    check(x.dtype in DTYPES, f"x must be float32 or bfloat16; got {x.dtype}")
    values, scales = weight.values, weight.scales
    check(
        values.ndim == 2 and min(values.shape) >= 1, f"values of the weight must be [out, in], none of them 0; got {values.shape}"
    )
    wide = 1 if isinstance(weight, Int8Weight) else 3
    check(
        scales.ndim == wide and min(scales.shape) >= 1,
        f"scales of the weight must have {wide} axes, none of them 0; got {scales.shape}",
    )
    check(
        not int8_activations or x.shape[1] <= MOST_INPUTS,
        f"x must have at most {MOST_INPUTS} inputs with int8_activations, whose sums are i32; got {x.shape[1]}",
    )
    out = result_dtype(out_dtype, x.dtype)
    spec = MatmulSpec(
        x.shape[0],
        x.shape[1],
        values.shape[0],
        dtype=str(x.dtype),
        out_dtype=out,
        group=weight.group if isinstance(weight, Int4Weight) else 0,
        zeros=isinstance(weight, Int4Weight) and weight.zeros is not None,
        int8_activations=int8_activations,
    )
    check_weight(weight, spec)
    return spec


def over_shards(split: Split, x: jax.Array, weight: Weight, out_dtype: str, options: dict[str, Any]) -> jax.Array:
    """quant_matmul of weights that are sharded by outputs or by inputs."""
    by_inputs, outputs = split.axis == 1, split.spec(0) if split.axis == 0 else P()

    def local(x, weight):
        if not by_inputs:
            return quant_matmul(x, weight, out_dtype=out_dtype, **options)
        return lax.psum(quant_matmul(x, weight, out_dtype="float32", **options), split.names).astype(out_dtype)

    values: Any = split.spec(split.axis or 0)
    if isinstance(weight, Int8Weight):
        parts = Int8Weight(values, outputs)  # pyright: ignore[reportArgumentType]
    else:
        pairs = weight.scales.shape[1]
        scales: Any = split.spec(1 if by_inputs else 2)
        parts = Int4Weight(values, scales, scales)
        if by_inputs:  # a shard has whole pairs of groups, and x all of their columns
            check(
                pairs % split.shards == 0,
                f"pairs of groups of the weight must be a multiple of the {split.shards} shards; got {pairs}",
            )
            x = pad_axis(x, 1, 2 * pairs * weight.group)
    specs = split.spec(1) if by_inputs else P(), parts
    return over(split, local, (x, weight), specs, P() if by_inputs else split.spec(1))


def check_weight(weight: Weight, spec: MatmulSpec) -> None:
    """ValueError where the arrays of a weight do not fit each other or the activations."""
    outputs, values = weight.values.shape[0], weight.values
    check(
        values.shape == (outputs, spec.columns) and values.dtype == jnp.int8,
        f"values of the weight must be int8[out, {spec.columns}] for {spec.inputs} inputs; got {values.dtype}{list(values.shape)}",
    )
    if isinstance(weight, Int8Weight):
        wanted, zeros = (outputs,), None
    else:
        check(weight.group in GROUPS, f"the group of an Int4Weight must be 32, 64 or 128; got {weight.group}")
        check(not spec.int8_activations, "int8_activations must be False with int4 weights; got True")
        wanted, zeros = (2, spec.columns // weight.group, outputs), weight.zeros
    scales = weight.scales
    check(
        scales.shape == wanted and scales.dtype == jnp.float32,
        f"scales of the weight must be f32{list(wanted)}; got {scales.dtype}{list(scales.shape)}",
    )
    check(
        zeros is None or (zeros.shape == wanted and zeros.dtype == jnp.int8),
        f"zeros of the weight must be int8{list(wanted)}; got {None if zeros is None else f'{zeros.dtype}{list(zeros.shape)}'}",
    )
