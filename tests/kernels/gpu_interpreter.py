"""Calls of the Hopper kernels in Pallas' GPU interpreter, and what they copy.

The interpreter runs each warpgroup in a thread that XLA:CPU has to have: with three warpgroups it stands still where XLA has two.
tests/conftest.py gives it eight.
"""

import dataclasses
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.targets import chip
from pallas_kernels.common.testing import Context, make_context, tolerance
from pallas_kernels.paged_attention import mosaic_gpu as attention
from pallas_kernels.paged_attention import reference as attention_reference
from pallas_kernels.paged_attention.cases import Case as AttentionCase
from pallas_kernels.paged_decode import mosaic_gpu as decode
from pallas_kernels.paged_decode import reference as decode_reference
from pallas_kernels.paged_decode.cases import Case as DecodeCase

HOPPER = chip("sm_90a")
FAST = {"xla_backend_optimization_level": "0"}  # half of the compile time; the work is small
NOWHERE = 1 << 20  # an entry of a table that is no block
# After a race: an error would end one thread, and the others would wait for it for ever. JAX 0.11 has no choice, and goes on.
GO_ON: Any = {"on_race": "warn"} if "on_race" in {f.name for f in dataclasses.fields(plgpu.InterpretGPUParams)} else {}
RACE = r"RACE DETECTED|a race, printed above"  # what a call with a race ends with; no other error says so


def inputs(case: DecodeCase | AttentionCase, lens: tuple[int, ...], tokens: int) -> tuple[np.ndarray, Context, dict[str, Any]]:
    """(q, the context, options). Entries of the tables past a row's length, and before its window, name no block."""
    rng = np.random.default_rng(len(case.name))
    names = "kv_heads", "block_size", "width", "stored_width", "dtype", "scales"
    context = make_context(rng, lens, **{name: getattr(case, name) for name in names})
    place = np.arange(context.block_tables.shape[1]) * case.block_size
    outside = place >= context.context_lens[:, None]
    tables = np.where(outside, NOWHERE, context.block_tables).astype(np.int32)
    heads = case.kv_heads * case.group
    q = rng.standard_normal((tokens, heads, case.width)).astype(compute_dtype(case.dtype))
    options = {
        "scale": case.width**-0.5,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": rng.standard_normal(heads).astype(np.float32) if case.sinks else None,
        "kv_scales": context.kv_scales,
    }
    return q, context._replace(block_tables=tables), options


def no_race() -> bool:
    """Of the calls, with detect_races, since the interpreter was made anew; an AssertionError where there was one."""
    assert not gpu_callbacks.get_races().races_found, "a race, printed above"
    return True


def interpret(f: Any, *args: Any, races: bool = False, again: bool = False, **options: Any) -> Any:
    """f(*args, …) interpreted for Hopper; memory that nobody wrote is NaN. A race is an error if `races` is set; a second run that
    gives other bits, if `again` is."""
    params = plgpu.InterpretGPUParams(detect_races=races, **GO_ON)
    call = jax.jit(lambda *a: f(*a, chip=HOPPER, interpret=params, **options), compiler_options=FAST)
    got = jax.tree.map(np.asarray, call(*args))
    assert not races or no_race()
    if again:
        jax.tree.map(np.testing.assert_array_equal, call(*args), got)
    return got


def run_decode(case: DecodeCase, **more: Any) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], Context]:
    """(out and lse of the kernel, those in float64, the context)."""
    q, context, options = inputs(case, case.lens, len(case.lens))
    rows = context.block_tables, context.context_lens
    want = decode_reference(q, context.kv, 1, *rows, **options)
    return interpret(decode.decode, q, context.kv, jnp.int32(1), *rows, **options, **more), want, context


def check_decode(case: DecodeCase, **more: Any) -> tuple[np.ndarray, np.ndarray]:
    """Asserts that the kernel agrees with float64; returns what it gave."""
    (out, lse), (want, want_lse), context = run_decode(case, **more)
    assert out.dtype == np.float32 and lse.dtype == np.float32
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance(context))
    assert np.abs(out - want).mean() <= tolerance(context) / 8
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=2e-4)
    empty = context.context_lens == 0
    assert not out[empty].any() and np.isneginf(lse[empty]).all()
    return out, lse


def check_attention(case: AttentionCase, **more: Any) -> np.ndarray:
    """Asserts that the kernel agrees with float64; returns what it gave."""
    lens, counts = zip(*case.rows, strict=True)
    q, context, options = inputs(case, lens, case.tokens)
    query_start = np.cumsum([0, *counts]).astype(np.int32)
    rows = context.block_tables, context.context_lens, query_start
    out = interpret(attention.attend, q, context.kv, jnp.int32(1), *rows, np.array([case.num_decode], np.int32), **options, **more)
    want = attention_reference(q, context.kv, 1, *rows, **options)
    assert out.dtype == np.float32
    np.testing.assert_allclose(out, want, rtol=0, atol=tolerance(context))
    assert not out[query_start[-1] :].any()
    return out


class Copies(Counter[tuple[int, ...]]):
    """Copies from a pool to shared memory by what they copy: (layer, block, 0 or 1, head, first token in the block)."""

    bytes = 0


def count_copies(monkeypatch: Any, pool: tuple[int, ...], itemsize: int) -> Copies:
    """Counts, from now on, what kernels copy from arrays that are indexed as a pool of this shape is."""
    found, original = Copies(), gpu_callbacks.copy_gmem_to_smem

    def copy(*args: Any, src_transforms: Any, **kwargs: Any) -> Any:
        indices = [i for t in src_transforms for i in getattr(t, "indices", ())]
        if len(indices) == len(pool):
            start, size = getattr(indices[4], "start", 0), getattr(indices[4], "size", pool[4])
            found[(*(int(np.asarray(i)) for i in indices[:4]), int(np.asarray(start)))] += 1
            found.bytes += int(np.asarray(size)) * pool[5] * itemsize
        return original(*args, src_transforms=src_transforms, **kwargs)

    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", copy)
    return found
