"""paged_decode against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_decode
from pallas_kernels.common.testing import make_context, tolerance
from pallas_kernels.paged_decode import reference
from pallas_kernels.paged_decode.cases import CASES, Case


def run(case: Case):
    """(the op's out and lse, the reference's, the pool)."""
    rng = np.random.default_rng(len(case.name))
    context = make_context(
        rng,
        case.lens,
        kv_heads=case.kv_heads,
        block_size=case.block_size,
        width=case.width,
        stored_width=case.stored_width,
        dtype=case.dtype,
    )
    heads = case.kv_heads * case.group
    q = rng.standard_normal((len(case.lens), heads, case.width)).astype(context.kv.dtype)
    options = {
        "scale": case.width**-0.5,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": rng.standard_normal(heads).astype(np.float32) if case.sinks else None,
    }

    @jax.jit
    def op(q, kv, layer, tables, lens):
        return paged_decode(q, kv, layer, tables, lens, return_lse=True, **options)

    got = op(q, context.kv, jnp.int32(1), context.block_tables, context.context_lens)
    return got, reference(q, context.kv, 1, context.block_tables, context.context_lens, **options), context


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_float64(case):
    (out, lse), (want, want_lse), context = run(case)
    assert out.dtype == jnp.float32 and lse.dtype == jnp.float32
    near = tolerance(case.dtype, context.kv)
    np.testing.assert_allclose(np.asarray(out), want, rtol=0, atol=near)
    np.testing.assert_allclose(np.asarray(lse), want_lse, rtol=1e-5, atol=1e-4)
    empty = context.context_lens == 0
    assert not np.asarray(out)[empty].any() and np.isneginf(np.asarray(lse)[empty]).all()
