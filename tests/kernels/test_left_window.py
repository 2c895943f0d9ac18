"""Blocks that end before the window of a row's first query are never read: what their table entries name does not matter."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, paged_decode
from pallas_kernels.common.testing import make_context
from pallas_kernels.paged_attention.cases import CASES as ATTENTION
from pallas_kernels.paged_decode.cases import CASES as DECODE


def attended(case, rows: Sequence[tuple[int, int]], op: Callable[..., jax.Array]) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """What op gives for rows of (context length, query tokens) with the case's tables; with 0, a block full of NaN, for each
    block that left its row's window; with one 0 more in each row that is long enough; and how many entries had left."""
    rng = np.random.default_rng(3)
    options = {"kv_heads": case.kv_heads, "block_size": case.block_size, "width": case.width, "stored_width": case.stored_width}
    context = make_context(rng, tuple(n for n, _ in rows), dtype=case.dtype, **options)
    left = [max(0, (n - count + 1 - case.window) // case.block_size) for n, count in rows]
    freed, wrong = context.block_tables.copy(), context.block_tables.copy()
    for s, blocks in enumerate(left):
        freed[s, :blocks] = 0
        wrong[s, : blocks + 1] = 0
    q = rng.standard_normal((sum(count for _, count in rows), case.kv_heads * case.group, case.width), np.float32)
    whole, without, more = (np.asarray(op(q, context.kv, x, context.context_lens)) for x in (context.block_tables, freed, wrong))
    return whole, without, more, sum(left)


def check(whole: np.ndarray, without: np.ndarray, more: np.ndarray) -> None:
    assert np.isfinite(whole).all() and np.array_equal(whole, without)
    assert not np.isfinite(more).all()


@pytest.mark.parametrize("case", [case for case in DECODE if case.window and case.scales == "none"], ids=lambda case: case.name)
def test_decode(case):
    op = jax.jit(lambda q, kv, tables, lens: paged_decode(q, kv, 1, tables, lens, scale=0.1, window=case.window))
    *outputs, left = attended(case, [(n, 1) for n in case.lens], op)
    check(*outputs)
    assert (left > 0) == (case.name != "window over lengths")


@pytest.mark.parametrize("case", [case for case in ATTENTION if case.window and case.scales == "none"], ids=lambda case: case.name)
def test_prefill_and_decode(case):
    counts = [count for _, count in case.rows]
    starts, decode = jnp.asarray(np.cumsum([0, *counts]), jnp.int32), jnp.asarray([case.num_decode], jnp.int32)
    op = jax.jit(lambda q, kv, tables, lens: paged_attention(q, kv, 1, tables, lens, starts, decode, scale=0.1, window=case.window))
    *outputs, left = attended(case, case.rows, op)
    check(*outputs)
    assert (left > 0) == (case.name != "window over lengths")
