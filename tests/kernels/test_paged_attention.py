"""paged_attention against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.testing import make_context, share, tolerance
from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.cases import CASES, Case

# Those for CPU. Each kernel that Numba compiles takes seconds: most of those for other dtypes are for make kernels.
BACKENDS = ("xla", "numba_cpu")
SELDOM = [c for c in CASES if c.dtype not in ("float32", "bfloat16") and c.name != "int8 and everything"]
EVERY = [
    pytest.param(c, b, id=f"{c.name}-{b}", marks=[pytest.mark.kernels_full] if b == "numba_cpu" and c in SELDOM else [])
    for c in CASES
    for b in BACKENDS
]


def run(case: Case, groups=None, backend=None):
    """(the op's out, the reference's, the pool). groups: rows that share so many first blocks (`share`)."""
    rng = np.random.default_rng(len(case.name))
    context = make_context(
        rng,
        tuple(n for n, _ in case.rows),
        kv_heads=case.kv_heads,
        block_size=case.block_size,
        width=case.width,
        stored_width=case.stored_width,
        dtype=case.dtype,
        scales=case.scales,
    )
    share(context, groups or {})
    heads = case.kv_heads * case.group
    q = rng.standard_normal((case.tokens, heads, case.width)).astype(compute_dtype(case.dtype))
    query_start = np.cumsum([0, *(n for _, n in case.rows)]).astype(np.int32)
    options = {
        "scale": case.width**-0.5,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "kv_scales": context.kv_scales,
        "sinks": rng.standard_normal(heads).astype(np.float32) if case.sinks else None,
    }

    @jax.jit
    def op(q, kv, layer, tables, lens, query_start, num_decode):
        return paged_attention(q, kv, layer, tables, lens, query_start, num_decode, backend=backend, **options)

    num_decode = np.array([case.num_decode], np.int32)
    out = op(q, context.kv, jnp.int32(1), context.block_tables, context.context_lens, query_start, num_decode)
    return out, reference(q, context.kv, 1, context.block_tables, context.context_lens, query_start, **options), context


@pytest.mark.parametrize(("case", "backend"), EVERY)
def test_agrees_with_float64(case, backend):
    out, want, context = run(case, backend=backend)
    assert out.dtype == jnp.float32 and out.shape == want.shape
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=tolerance(context))
    owned = sum(n for _, n in case.rows)
    assert not np.asarray(out)[owned:].any()


# Decode rows, a chunk of several tiles, short ones, one without cached tokens, padding.
ROWS = ((70, 1), (49, 1), (20, 1), (400, 300), (100, 30), (81, 1), (16, 16), (60, 12), (0, 0))
SHARED = {
    "none": {},
    "one block": {(0, 1, 2, 3, 4, 5, 7): 1},
    "several": {(0, 1, 3, 4, 7): 3},
    "prefill alone": {(3, 4, 5, 7): 3},
    "decode alone": {(0, 1, 2, 5): 1},
    "two groups": {(0, 1, 2, 5): 1, (3, 4, 7, 6): 1},
}


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "sinks": True}, {"dtype": "bfloat16"}], ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_rows_that_begin_with_the_same_blocks(name, options):
    case = Case(name, ROWS, 400, num_decode=3, width=16, **options)
    out, want, context = run(case, SHARED[name], "numba_cpu")
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=tolerance(context))
