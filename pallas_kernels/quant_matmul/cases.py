"""Cases for the tests of quant_matmul."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quant_matmul.weights import Weight, quantize_int4, quantize_int8


class Case(NamedTuple):
    name: str
    tokens: int = 5
    inputs: int = 256
    outputs: int = 192
    dtype: str = "bfloat16"
    out_dtype: str = "float32"
    group: int = 0  # 0: int8
    zeros: bool = False
    int8_activations: bool = False


CASES = (
    Case("int8 f32", dtype="float32"),
    Case("int8"),
    Case("int8 one row", tokens=1),
    Case("int8 odd sizes", tokens=17, inputs=200, outputs=77),
    Case("int8 to bf16", tokens=33, out_dtype="bfloat16"),
    Case("int8 long", tokens=9, inputs=2304, outputs=320),
    Case("w8a8", int8_activations=True),
    Case("w8a8 one row f32", tokens=1, dtype="float32", int8_activations=True),
    Case("w8a8 odd sizes", tokens=17, inputs=200, outputs=77, int8_activations=True),
    Case("w8a8 long", tokens=9, inputs=2304, outputs=320, int8_activations=True),
    Case("int4 128", group=128),
    Case("int4 128 zeros", group=128, zeros=True, out_dtype="bfloat16"),
    Case("int4 64 one row", tokens=1, group=64),
    Case("int4 64 zeros f32", group=64, zeros=True, dtype="float32"),
    Case("int4 32", tokens=33, group=32),
    Case("int4 32 zeros", group=32, zeros=True, inputs=512),
    Case("int4 64 odd sizes", tokens=17, inputs=200, outputs=77, group=64, zeros=True),
    Case("int4 128 long", tokens=9, inputs=2304, outputs=320, group=128),
)


def make(case: Case) -> tuple[jax.Array, Weight]:
    """x and a weight: rows of very different sizes, a row and a group of zeros, and an x with a row of zeros."""
    rng = np.random.default_rng(len(case.name))
    w = rng.standard_normal((case.outputs, case.inputs)).astype(np.float32)
    w *= np.exp(rng.standard_normal((case.outputs, 1))).astype(np.float32)
    w[1] = 0
    w[2, :64] = 0
    x = rng.standard_normal((case.tokens, case.inputs)).astype(np.float32) * 3
    if case.tokens > 2:
        x[2] = 0
    weight = quantize_int4(w, group=case.group, zeros=case.zeros) if case.group else quantize_int8(w)
    return jnp.asarray(x, case.dtype), jax.tree.map(jnp.asarray, weight)
