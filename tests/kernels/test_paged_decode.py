"""paged_decode against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.testing import make_context, share, tolerance
from pallas_kernels.paged_decode import reference
from pallas_kernels.paged_decode.cases import CASES, Case

# Those for CPU. Each kernel that Numba compiles takes seconds: most of those for other dtypes are for make kernels.
BACKENDS = ("xla", "numba_cpu")
SELDOM = [c for c in CASES if c.dtype not in ("float32", "bfloat16") and c.name != "int8 and everything"]
EVERY = [
    pytest.param(c, b, id=f"{c.name}-{b}", marks=[pytest.mark.kernels_full] if b == "numba_cpu" and c in SELDOM else [])
    for c in CASES
    for b in BACKENDS
]


def run(case: Case, groups=None, backend=None):
    """(the op's out and lse, the reference's, the pool). groups: rows that share so many first blocks (`share`)."""
    rng = np.random.default_rng(len(case.name))
    context = make_context(
        rng,
        case.lens,
        kv_heads=case.kv_heads,
        block_size=case.block_size,
        width=case.width,
        stored_width=case.stored_width,
        dtype=case.dtype,
        scales=case.scales,
    )
    share(context, groups or {})
    heads = case.kv_heads * case.group
    q = rng.standard_normal((len(case.lens), heads, case.width)).astype(compute_dtype(case.dtype))
    options = {
        "scale": case.width**-0.5,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "kv_scales": context.kv_scales,
        "sinks": rng.standard_normal(heads).astype(np.float32) if case.sinks else None,
    }

    @jax.jit
    def op(q, kv, layer, tables, lens):
        return paged_decode(q, kv, layer, tables, lens, return_lse=True, backend=backend, **options)

    got = op(q, context.kv, jnp.int32(1), context.block_tables, context.context_lens)
    return got, reference(q, context.kv, 1, context.block_tables, context.context_lens, **options), context


@pytest.mark.parametrize(("case", "backend"), EVERY)
def test_agrees_with_float64(case, backend):
    (out, lse), (want, want_lse), context = run(case, backend=backend)
    assert out.dtype == jnp.float32 and lse.dtype == jnp.float32
    near = tolerance(context)
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=near)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-5, atol=1e-4)
    empty = context.context_lens == 0
    assert not np.asarray(out)[empty].any() and np.isneginf(np.asarray(lse)[empty]).all()


SHARED = {  # lengths of rows, and which of them begin with the same how many blocks of 16
    "none": ((70, 40, 17, 33, 50), {}),
    "all, one block": ((70, 40, 17, 33, 50), {(0, 1, 2, 3, 4): 1}),
    "all, several": ((70, 49, 81, 65, 50), {(0, 1, 2, 3, 4): 3}),
    "more than a chunk": ((200, 180, 161, 170, 250), {(0, 1, 2, 3, 4): 10}),
    "some rows": ((70, 49, 0, 81, 20, 65, 50), {(0, 1, 3, 5): 3}),
    "two groups": ((70, 49, 81, 65, 50, 90, 91, 92, 93, 94), {(0, 1, 2, 3, 4): 2, (5, 6, 7, 8, 9): 4}),
    "rows without tokens": ((70, 0, 49, 81, 0, 65), {(0, 1, 2, 3, 4, 5): 3}),
    "a first row without": ((0, 70, 49, 0, 0), {(1, 0, 2): 2}),
    "one inside another": ((70, 70, 70, 70, 70, 70), {(0, 1, 2, 3, 4, 5): 1, (1, 2, 3, 4): 3}),
}


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "sinks": True}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_rows_that_begin_with_the_same_blocks(name, options):
    lens, groups = SHARED[name]
    (out, lse), (want, want_lse), context = run(Case(name, lens, **options), groups, "numba_cpu")
    near = tolerance(context)
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=near)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-5, atol=1e-4)


def test_only_blocks_that_are_the_same_are_shared():
    """The control of the test above: rows with the same first block and others behind it read their own."""
    rng = np.random.default_rng(0)
    context = make_context(rng, (70, 49, 81, 65), kv_heads=2, block_size=16, width=8)
    q = rng.standard_normal((4, 4, 8)).astype(np.float32)
    context.block_tables[:, 0] = context.block_tables[0, 0]
    call = lambda tables: np.asarray(paged_decode(q, context.kv, 1, tables, context.context_lens, scale=0.3, backend="numba_cpu"))
    broken = context.block_tables.copy()
    broken[2, 1] = 0  # NaN
    got = call(broken)
    assert np.isnan(got[2]).all()
    np.testing.assert_array_equal(np.delete(got, 2, 0), np.delete(call(context.block_tables), 2, 0))
