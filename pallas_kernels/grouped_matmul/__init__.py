"""grouped_matmul: rows sorted by expert, each times its expert's weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.dispatch import Backend, Op, kernel, run
from pallas_kernels.common.layout import check, check_ints, result_dtype
from pallas_kernels.common.sharding import Split, over, split_of
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
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """Row t of lhs times the transpose of its expert's weights, [T, out], in out_dtype (float32 or bfloat16; None: that of lhs);
    sums are f32.

    lhs [T, in] and rhs [E, out, in], both f32 or both bf16; group_sizes i32[E], how many rows each expert has: the first
    group_sizes[0] rows are expert 0's, and so on; none may be negative, and their sum is at most T. Rows past the sum give 0
    and may hold anything, NaN included; so may the weights of an expert without rows. backend, platform: as in `dispatch.run`.
    sharding: how rhs is sharded over a mesh: by outputs, as the result then is, by inputs, as lhs then is, or by experts; the last
    two add what the shards have in f32. None: as rhs itself says (`sharding.split_of`).
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
    out = result_dtype(out_dtype, lhs.dtype)
    split = split_of("rhs", rhs, sharding, {0: "experts", 1: "outputs", 2: "inputs"})
    if split is not None:
        return over_shards(split, lhs, rhs, group_sizes, out, {"backend": backend, "platform": platform})
    spec = GroupedSpec(tokens, inputs, rhs.shape[1], rhs.shape[0], str(lhs.dtype), out)

    def call(entry, lhs, rhs, group_sizes, chip):
        return entry(lhs, rhs, group_sizes, chip=chip, out_dtype=spec.out_dtype)

    def in_xla(lhs, rhs, group_sizes, chip):
        config = tuned(OP.name, "xla", chip, grouped_key(spec), xla.default_config(spec))
        return xla.matmul(lhs, rhs, group_sizes, chip=chip, out_dtype=spec.out_dtype, config=config)

    functions = OP.entries("matmul", call) | {"xla": in_xla}
    return run(OP, functions, spec, (lhs, rhs, group_sizes), backend=backend, platform=platform)


def over_shards(
    split: Split, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, out_dtype: str, options: dict[str, Any]
) -> jax.Array:
    """grouped_matmul of weights that are sharded."""

    def local(lhs, rhs, group_sizes):
        if split.axis in (None, 1):
            return grouped_matmul(lhs, rhs, group_sizes, out_dtype=out_dtype, **options)
        first = jnp.int32(0)
        if split.axis == 0:  # the rows of this shard's experts come first, and go back to their places
            mine = rhs.shape[0] * lax.axis_index(split.names)
            first = jnp.sum(jnp.where(jnp.arange(group_sizes.shape[0]) < mine, group_sizes, 0))
            group_sizes = lax.dynamic_slice_in_dim(group_sizes, mine, rhs.shape[0])
            lhs = jnp.roll(lhs, -first, axis=0)
        part = grouped_matmul(lhs, rhs, group_sizes, out_dtype="float32", **options)
        return lax.psum(jnp.roll(part, first, axis=0), split.names).astype(out_dtype)

    by_inputs = split.spec(1) if split.axis == 2 else P()
    specs = by_inputs, split.spec(split.axis or 0), P()
    return over(split, local, (lhs, rhs, group_sizes), specs, split.spec(1) if split.axis == 1 else P())
