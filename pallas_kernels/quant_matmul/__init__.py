"""quant_matmul: activations times quantized weights."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.dispatch import Backend, Op, kernel, run
from pallas_kernels.common.layout import check
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
) -> jax.Array:
    """x times the transpose of the weight, [T, out], in out_dtype (float32 or bfloat16; None: that of x); sums are f32.

    x [T, in] f32 or bf16; weight an Int8Weight of [out, in] or an Int4Weight made of one. int8_activations (with int8 weights
    alone) rounds each row of x to multiples of max|x| / 127, multiplies in int8 and sums in i32. Without it int8 weights lose
    nothing more, and int4 weights are rounded to x's dtype before they are multiplied. An Int4Weight does not keep how many
    inputs it was made of: x may have as many as fill the same groups. backend, platform: as in `dispatch.run`.
    """
    x = jnp.asarray(x)
    check(x.ndim == 2 and min(x.shape) >= 1, f"x must be [tokens, in], none of them 0; got {x.shape}")
    check(x.dtype in DTYPES, f"x must be float32 or bfloat16; got {x.dtype}")
    check(isinstance(weight, Weight), f"weight must be an Int8Weight or an Int4Weight; got {type(weight).__name__}")
    weight = jax.tree.map(jnp.asarray, weight, is_leaf=lambda part: isinstance(part, list))
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
    out = jnp.dtype(out_dtype or x.dtype)
    check(out in DTYPES, f"out_dtype must be float32 or bfloat16; got {out}")
    spec = MatmulSpec(
        x.shape[0],
        x.shape[1],
        weight.values.shape[0],
        dtype=str(x.dtype),
        out_dtype=str(out),
        group=weight.group if isinstance(weight, Int4Weight) else 0,
        zeros=isinstance(weight, Int4Weight) and weight.zeros is not None,
        int8_activations=int8_activations,
    )
    check_weight(weight, spec)
    options = {"int8_activations": int8_activations, "out_dtype": spec.out_dtype}

    def call(entry, x, weight, chip):
        return entry(x, weight, chip=chip, **options)

    def in_xla(x, weight, chip):
        config = tuned(OP.name, "xla", chip, matmul_key(spec), xla.DEFAULT)
        return xla.matmul(x, weight, chip=chip, config=config, **options)

    functions = OP.entries("matmul", call) | {"xla": in_xla}
    return run(OP, functions, spec, (x, weight), backend=backend, platform=platform)


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
