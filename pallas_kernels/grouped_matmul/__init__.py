"""grouped_matmul: rows sorted by expert, each times its expert's weights."""

import jax
import jax.numpy as jnp

from pallas_kernels.common.dispatch import Backend, Op, kernel, run
from pallas_kernels.common.layout import check, check_ints
from pallas_kernels.common.tuning import tuned
from pallas_kernels.grouped_matmul import xla
from pallas_kernels.grouped_matmul.reference import reference
from pallas_kernels.grouped_matmul.spec import TYPICAL_GROUPED, GroupedSpec, grouped_key

__all__ = ["OP", "grouped_matmul", "reference"]

OP = Op(
    "grouped_matmul",
    (
        kernel(__name__, "mosaic_tpu", ("tpu",), "visits tiles of rows expert by expert, whose weights stay in VMEM"),
        kernel(__name__, "mosaic_gpu", ("cuda",), "visits tiles of rows of one expert, with TMA and wgmma"),
        kernel(__name__, "triton", ("cuda",), "a stop-gap where Mosaic's kernel does not take the call: the same visits"),
        Backend(
            "xla",
            (),
            "a loop over experts, blocks of weights and tiles of rows; few rows with every expert at once",
            candidates=xla.candidates,
        ),
    ),
    TYPICAL_GROUPED,
)
DTYPES = (jnp.float32, jnp.bfloat16)


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    out_dtype: str | None = None,
    backend: str | None = None,
    platform: str | None = None,
) -> jax.Array:
    """Row t of lhs times the transpose of its expert's weights, [T, out], in out_dtype (float32 or bfloat16; None: that of lhs);
    sums are f32.

    lhs [T, in] and rhs [E, out, in], both f32 or both bf16; group_sizes i32[E], how many rows each expert has: the first
    group_sizes[0] rows are expert 0's, and so on; none may be negative, and their sum is at most T. Rows past the sum give 0
    and may hold anything, NaN included; so may the weights of an expert without rows. backend, platform: as in `dispatch.run`.
    """
    lhs, rhs, group_sizes = (jnp.asarray(x) for x in (lhs, rhs, group_sizes))
    check(lhs.ndim == 2 and min(lhs.shape) >= 1, f"lhs must be [tokens, in], none of them 0; got {lhs.shape}")
    check(lhs.dtype in DTYPES, f"lhs must be float32 or bfloat16; got {lhs.dtype}")
    tokens, inputs = lhs.shape
    check(
        rhs.ndim == 3 and rhs.shape[2] == inputs and min(rhs.shape) >= 1,
        f"rhs must be [experts, out, {inputs}], none of them 0; got {rhs.shape}",
    )
    check(rhs.dtype == lhs.dtype, f"rhs must be {lhs.dtype}, as lhs; got {rhs.dtype}")
    check_ints("group_sizes", group_sizes, rhs.shape[:1])
    out = jnp.dtype(out_dtype or lhs.dtype)
    check(out in DTYPES, f"out_dtype must be float32 or bfloat16; got {out}")
    spec = GroupedSpec(tokens, inputs, rhs.shape[1], rhs.shape[0], str(lhs.dtype), str(out))

    def call(entry, lhs, rhs, group_sizes, chip):
        return entry(lhs, rhs, group_sizes, chip=chip, out_dtype=spec.out_dtype)

    def in_xla(lhs, rhs, group_sizes, chip):
        config = tuned(OP.name, "xla", chip, grouped_key(spec), xla.default_config(spec))
        return xla.matmul(lhs, rhs, group_sizes, chip=chip, out_dtype=spec.out_dtype, config=config)

    functions = OP.entries("matmul", call) | {"xla": in_xla}
    return run(OP, functions, spec, (lhs, rhs, group_sizes), backend=backend, platform=platform)
