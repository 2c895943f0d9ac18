"""grouped_matmul: the XLA path against the reference, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import grouped_matmul
from pallas_kernels.grouped_matmul.cases import CASES, Case, make
from pallas_kernels.grouped_matmul.reference import error_bound, reference

run_xla = jax.jit(lambda *args, out_dtype: grouped_matmul(*args, out_dtype=out_dtype, backend="xla"), static_argnames="out_dtype")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla(case: Case):
    args = make(case)
    got = np.asarray(run_xla(*args, out_dtype=case.out_dtype))
    assert got.dtype == case.out_dtype and not got[sum(case.sizes) :].any()
    assert (np.abs(got.astype(np.float64) - reference(*args)) <= error_bound(*args, case.out_dtype)).all()
    assert (np.asarray(run_xla(*args, out_dtype=case.out_dtype)) == got).all()


def test_the_bound_sees_a_row_of_the_wrong_expert():
    """The control."""
    lhs, rhs, sizes = make(Case("control", (5, 7, 4)))
    moved = np.asarray(sizes) + np.array([1, -1, 0])
    wrong = np.abs(reference(lhs, rhs, moved) - reference(lhs, rhs, sizes)) > error_bound(lhs, rhs, sizes, "bfloat16")
    assert wrong.any(axis=1).tolist() == [row == 5 for row in range(16)]


def test_sizes_are_data():
    """One program for all sizes, and no temporary as large as the weights."""
    lhs, rhs = jnp.ones((72, 512), jnp.bfloat16), jnp.ones((8, 1024, 512), jnp.bfloat16)
    program = jax.jit(lambda *args: grouped_matmul(*args)).lower(lhs, rhs, jnp.zeros(8, jnp.int32)).compile()
    for sizes in ((4,) * 8, (0, 32, 0, 0, 0, 0, 0, 0), (1, 2, 3, 0, 0, 0, 0, 7)):
        got = program(lhs, rhs, jnp.asarray(sizes, jnp.int32))
        assert (np.asarray(got[:, 0], np.float32) == np.where(np.arange(72) < sum(sizes), 512, 0)).all()
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 4 << 20 < rhs.nbytes


LHS, RHS, SIZES = jnp.ones((6, 8)), jnp.ones((2, 4, 8)), jnp.array([2, 3], jnp.int32)


@pytest.mark.parametrize(
    ("args", "options", "match"),
    [
        ((LHS[0], RHS, SIZES), {}, r"lhs must be \[tokens, in\], none of them 0; got \(8,\)"),
        ((LHS[:0], RHS, SIZES), {}, r"lhs must be \[tokens, in\], none of them 0; got \(0, 8\)"),
        ((LHS.astype(jnp.int8), RHS, SIZES), {}, "lhs must be float32 or bfloat16; got int8"),
        ((LHS, RHS[0], SIZES), {}, r"rhs must be \[experts, out, 8\], none of them 0; got \(4, 8\)"),
        ((LHS, RHS[..., :7], SIZES), {}, r"rhs must be \[experts, out, 8\], none of them 0; got \(2, 4, 7\)"),
        ((LHS, RHS[:0], SIZES[:0]), {}, r"rhs must be .*; got \(0, 4, 8\)"),
        ((LHS, RHS[:, :0], SIZES), {}, r"rhs must be .*; got \(2, 0, 8\)"),
        ((LHS, RHS.astype(jnp.bfloat16), SIZES), {}, "rhs must be float32, as lhs; got bfloat16"),
        ((LHS, RHS, SIZES[:1]), {}, r"group_sizes must be i32\[2\]; got int32\[1\]"),
        ((LHS, RHS, SIZES * 1.0), {}, r"group_sizes must be i32\[2\]; got float32\[2\]"),
        ((LHS, RHS, SIZES), {"out_dtype": "float16"}, "out_dtype must be float32 or bfloat16; got float16"),
        ((LHS, RHS, SIZES), {"backend": "none"}, "backend of grouped_matmul must be .*xla; got none"),
    ],
)
def test_what_is_refused(args, options, match):
    with pytest.raises(ValueError, match=match):
        grouped_matmul(*args, **options)
