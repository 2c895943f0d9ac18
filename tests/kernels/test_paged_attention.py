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


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("context_lens", (1 << 30, 20)),
        ("context_lens", (-(1 << 31), 20)),
        ("block_tables", ((1 << 24, -7), (1, -(1 << 31)))),
        ("layer", 1 << 20),
        ("layer", -9),
        ("query_start", (0, 3, 1 << 30)),
        ("query_start", (-50, 1 << 20, 2)),
        ("query_start", (2, 3, 4)),
    ],
    ids=str,
)
def test_on_cpu_no_number_leads_outside_of_the_arrays(name, values):
    """A trace cannot check them. They count as the nearest that there is, blocks as the scrap block; tokens of no row give 0."""
    context = make_context(np.random.default_rng(0), (8, 7), kv_heads=1, block_size=4, width=8)
    kv = np.nan_to_num(context.kv)
    lens, (layers, blocks) = np.array([8, 7]), kv.shape[:2]
    right = {"layer": 1, "block_tables": context.block_tables, "context_lens": lens, "query_start": (0, 3, 5)}
    wrong = np.asarray(values)
    near = {
        "layer": lambda: np.clip(wrong, 0, layers - 1),
        "block_tables": lambda: np.where((wrong >= 0) & (wrong < blocks), wrong, 0),
        "context_lens": lambda: np.clip(wrong, 0, 8),
        "query_start": lambda: np.clip(wrong, 0, 5),
    }[name]()
    q = np.random.default_rng(1).standard_normal((5, 2, 8)).astype(np.float32)

    @jax.jit
    def call(*numbers):
        layer, *rows = (jnp.asarray(x, jnp.int32) for x in numbers)
        return paged_attention(q, kv, layer, *rows, jnp.zeros(1, jnp.int32), scale=1.0, backend="numba_cpu")

    got, want = (np.asarray(call(*(right | {name: x}).values())) for x in (wrong, near))
    np.testing.assert_array_equal(got, want)
    starts = near if name == "query_start" else right["query_start"]
    none = [t for t in range(5) if not any(starts[i] <= t < starts[i + 1] for i in (0, 1))]
    assert np.isfinite(got).all() and not got[none].any()
