"""Cases for the tests of grouped_matmul."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Case(NamedTuple):
    name: str
    sizes: tuple[int, ...]
    past: int = 0  # rows past the sum, which hold NaN
    inputs: int = 128
    outputs: int = 192
    dtype: str = "bfloat16"
    out_dtype: str = "float32"


CASES = (
    Case("even f32", (16, 16, 16), dtype="float32"),
    Case("uneven", (5, 0, 17, 1), past=9),
    Case("first and last empty", (0, 0, 40, 24, 0, 0)),
    Case("all in one", (0, 70, 0), past=2),
    Case("nothing", (0, 0, 0), past=20),
    Case("one row", (0, 0, 1)),
    Case("many small to bf16", tuple(i % 4 for i in range(24)), out_dtype="bfloat16", past=1),
    Case("odd sizes", (33, 2, 0, 64, 30), past=40, inputs=200, outputs=77),
    Case("long", (100, 0, 3, 160), past=30, inputs=640, outputs=320),
)


def make(case: Case) -> tuple[jnp.ndarray, jnp.ndarray, jnp.ndarray]:
    """(lhs, rhs, group_sizes); rhs of experts without rows is NaN."""
    rng = np.random.default_rng(len(case.name))
    tokens = sum(case.sizes) + case.past
    lhs = rng.standard_normal((tokens, case.inputs))
    lhs[sum(case.sizes) :] = np.nan
    rhs = rng.standard_normal((len(case.sizes), case.outputs, case.inputs))
    rhs[np.array(case.sizes) == 0] = np.nan
    return jnp.asarray(lhs, case.dtype), jnp.asarray(rhs, case.dtype), jnp.asarray(case.sizes, jnp.int32)
