"""The Triton kernels, interpreted, against float64; a few sharp cases, and all of them under the marker kernels_full."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import paged_attention, paged_decode
from pallas_kernels.common.spec import TYPICAL_DECODE, AttentionSpec
from pallas_kernels.common.splits import default_splits, merge, tile_span
from pallas_kernels.common.targets import chip
from pallas_kernels.common.testing import make_context, tolerance
from pallas_kernels.paged_attention import cases as attention_cases
from pallas_kernels.paged_attention import reference as attention_reference
from pallas_kernels.paged_attention import triton as attention
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import reference as decode_reference
from pallas_kernels.paged_decode import triton as decode

CHIP = chip("sm_80")
FAST = {"xla_backend_optimization_level": "0"}  # half of the compile time; the work is small


def quantized(kv: np.ndarray, dtype: str, per_token: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the pool in 8 bits, its scales, the pool that they stand for), with NaN, where there is one, and scales of NaN where
    nothing was written."""
    most = 127.0 if dtype == "int8" else 448.0
    written = ~np.isnan(kv)
    top = np.nanmax(np.where(written, np.abs(kv), 0), axis=-1)
    if per_token:
        scales = np.where(written.any(-1), np.where(top == 0, 1, top / most), np.nan).transpose(0, 1, 2, 3, 4)
        by = scales[..., None]
    else:
        scales = (np.nanmax(top, axis=(0, 1, 3, 4)) / most) * np.array([1.0, 1.3])
        by = scales[None, None, :, None, None, None]
    stored = kv / by
    stored = np.where(written, np.round(stored) if dtype == "int8" else stored, 99 if dtype == "int8" else np.nan)
    stored = stored.astype(jnp.dtype(dtype))
    return stored, scales.astype(np.float32), stored.astype(np.float32) * by.astype(np.float32)


def inputs(case, lens, tokens: int, scales: str, seed: int):
    """(q, the pool as it is stored, its scales, the pool as it is meant, tables, lengths, options)"""
    rng = np.random.default_rng(seed)
    pool = {"kv_heads": case.kv_heads, "block_size": case.block_size, "width": case.width, "stored_width": case.stored_width}
    eight = case.dtype in ("int8", "float8_e4m3fn")
    context = make_context(rng, lens, dtype="float32" if eight else case.dtype, **pool)
    kv, kv_scales, real = quantized(context.kv, case.dtype, scales == "token") if eight else (context.kv, None, context.kv)
    heads = case.kv_heads * case.group
    q = rng.standard_normal((tokens, heads, case.width)).astype(jnp.bfloat16 if eight else context.kv.dtype)
    options = {
        "scale": case.width**-0.5,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "sinks": rng.standard_normal(heads).astype(np.float32) if case.sinks else None,
    }
    tables = np.where(
        np.arange(context.block_tables.shape[1]) * case.block_size < np.array(lens)[:, None], context.block_tables, 1 << 20
    )  # past a row's length: no block at all
    return q, kv, kv_scales, real, tables.astype(np.int32), context.context_lens, options


def check_decode(case, splits: int, scales: str = "token", config: decode.Config | None = None):
    q, kv, kv_scales, real, tables, lens, options = inputs(case, case.lens, len(case.lens), scales, len(case.name))
    more = {"chip": CHIP, "config": config, "num_splits": splits, "interpret": True, **options}
    call = jax.jit(lambda *args: decode.decode(*args[:5], kv_scales=args[5], **more), compiler_options=FAST)
    args = q, kv, jnp.int32(1), tables, lens, kv_scales
    out, lse = (np.asarray(x) for x in call(*args))
    want, want_lse = decode_reference(q, real, 1, tables, lens, **options)
    near = tolerance("bfloat16" if kv_scales is not None else case.dtype, real)
    np.testing.assert_allclose(out, want, rtol=0, atol=near)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=2e-4)
    assert not out[lens == 0].any() and np.isneginf(lse[lens == 0]).all()
    for again, first in zip(call(*args), (out, lse), strict=True):
        np.testing.assert_array_equal(np.asarray(again), first)


def check_attention(case, scales: str = "token", config: attention.Config | None = None):
    lens = tuple(n for n, _ in case.rows)
    q, kv, kv_scales, real, tables, lens, options = inputs(case, lens, case.tokens, scales, len(case.name))
    starts = np.cumsum([0, *(n for _, n in case.rows)]).astype(np.int32)
    more = {"chip": CHIP, "config": config, "interpret": True, **options}
    call = jax.jit(lambda *args: attention.attend(*args[:7], kv_scales=args[7], **more), compiler_options=FAST)
    out = np.asarray(call(q, kv, jnp.int32(1), tables, lens, starts, np.array([case.num_decode], np.int32), kv_scales))
    want = attention_reference(q, real, 1, tables, lens, starts, **options)
    near = tolerance("bfloat16" if kv_scales is not None else case.dtype, real)
    np.testing.assert_allclose(out, want, rtol=0, atol=near)
    assert not out[starts[-1] :].any()


D, A = decode_cases.Case, attention_cases.Case
SMALL = decode.Config(tile=16)
SHARP = {
    "everything": (decode_cases.CASES[-1], 3),
    "edges, more splits than tiles": (D("edges", (0, 1, 15, 16, 17, 100)), 16),
    "width of pieces": (D("pieces", (5, 40), width=80, group=7, kv_heads=1), 2),
    "int8, scales of tokens": (D("int8", (0, 31, 32, 70), block_size=32, group=5, dtype="int8", window=40, soft_cap=2.0), 2),
}


@pytest.mark.parametrize("name", SHARP)
def test_decode(name):
    case, splits = SHARP[name]
    check_decode(case, splits, config=SMALL)


def test_decode_with_scales_of_the_tensor():
    check_decode(D("e4m3", (3, 40), dtype="float8_e4m3fn", width=16, group=3), 1, scales="tensor", config=SMALL)


MIXED = {
    "everything": attention_cases.CASES[-1],
    "int8, scales of tokens": A(
        "int8", ((33, 1), (40, 40), (70, 5), (0, 0)), 50, num_decode=1, dtype="int8", sinks=True, window=30
    ),
}


@pytest.mark.parametrize("name", MIXED)
def test_attention(name):
    check_attention(MIXED[name], config=attention.Config(16, SMALL))


def every(cases):
    return [case for case in cases if (case.stored_width or case.width) % 16 == 0]


WIDTHS = [D(f"width {w} {d}", (0, 1, 33, 70), width=w, group=g, dtype=d) for w in (64, 80, 96, 128, 192, 256)
          for g, d in ((1, "bfloat16"), (5, "float16"), (8, "int8"), (16, "float8_e4m3fn"))]  # fmt: skip
BLOCKS = [D(f"block {p}", (p - 1, p, p + 1, 3 * p), block_size=p, window=w) for p in (16, 32, 64, 128, 256) for w in (None, p)]


@pytest.mark.kernels_full
@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("case", [*every(decode_cases.CASES), *WIDTHS, *BLOCKS], ids=lambda case: case.name)
def test_decode_in_full(case, splits):
    check_decode(case, splits)
    if case.dtype in ("int8", "float8_e4m3fn"):
        check_decode(case, splits, scales="tensor")


RAGGED = [A(f"width {c.width} {c.dtype}", attention_cases.MIXED, 72, num_decode=3, width=c.width, group=c.group, dtype=c.dtype)
          for c in WIDTHS]  # fmt: skip


@pytest.mark.kernels_full
@pytest.mark.parametrize("case", [*every(attention_cases.CASES), *RAGGED], ids=lambda case: case.name)
def test_attention_in_full(case):
    check_attention(case)
    if case.dtype in ("int8", "float8_e4m3fn"):
        check_attention(case, scales="tensor")


@pytest.mark.parametrize("splits", [1, 2, 3, 16])
def test_parts_hold_each_tile_of_the_window_once_and_no_other(splits):
    for begin, end in ((0, 0), (0, 1), (0, 33), (17, 48), (40, 41), (5, 5)):
        spans = [tile_span(jnp.int32(begin), jnp.int32(end), 16, jnp.int32(i), splits) for i in range(splits)]
        tiles = [tile for first, after in spans for tile in range(int(first), int(after))]
        assert tiles == (list(range(begin // 16, -(-end // 16))) if end > begin else [])


def test_merge_is_exact_where_parts_are_empty():
    rng = np.random.default_rng(0)
    s, v = rng.standard_normal((3, 8)) * 30, rng.standard_normal((8, 4))
    weight = np.exp(s - s.max(1, keepdims=True))
    want, want_lse = weight @ v / weight.sum(1, keepdims=True), np.log(weight.sum(1)) + s.max(1)
    out, lse = np.full((4, 3, 4), np.nan, np.float32), np.full((4, 3), -np.inf, np.float32)
    for part, (a, b) in {0: (0, 3), 2: (3, 8)}.items():
        w = np.exp(s[:, a:b] - s.max(1, keepdims=True))
        out[part], lse[part] = w @ v[a:b] / w.sum(1, keepdims=True), np.log(w.sum(1)) + s.max(1)
    got, got_lse = merge(jnp.asarray(out), jnp.asarray(lse), None)
    np.testing.assert_allclose(got, want, atol=1e-5)
    np.testing.assert_allclose(got_lse, want_lse, rtol=1e-6)
    none, none_lse = merge(jnp.asarray(out[1::2]), jnp.asarray(lse[1::2]), jnp.ones(3))
    assert not np.asarray(none).any() and np.isneginf(none_lse).all()


def test_the_context_is_split_only_as_far_as_there_is_something_to_do():
    assert default_splits(512, 1 << 20, 132) == 1
    assert default_splits(8, 1 << 20, 132) == 33
    assert default_splits(8, 1024, 132) == 4
    assert default_splits(8, 16, 132) == 1


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_fit_in_half_of_the_shared_memory(target, width, dtype):
    config = decode.heuristic(width, dtype, chip(target))
    item = jnp.dtype(dtype).itemsize
    assert 2 * config.stages * config.tile * width * item <= chip(target).fast_memory // 2 or config.tile == 16


def with_pool(dtype: str, **changes) -> AttentionSpec:
    return AttentionSpec(64, 64, 128, 32, 128, TYPICAL_DECODE.pool._replace(**changes), dtype)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (AttentionSpec(1, 1, 1, 8, 8, TYPICAL_DECODE.pool._replace(width=8), "bfloat16"), "widths that are multiples of 16.*got 8"),
        (with_pool("float64"), "takes pools of float32.*got float64"),
        (with_pool("float8_e4m3fn"), "no float8_e4m3fn on sm_80"),
        (with_pool("int8", layers=2, blocks=8192), "counts the 2147483648 bytes of this pool in 32 bits"),
    ],
)
def test_what_it_refuses(spec: AttentionSpec, match: str):
    for supports in (decode.supports, attention.supports):
        reason = supports(spec, CHIP)
        assert reason is not None and re.search(match, reason)
        assert supports(TYPICAL_DECODE, CHIP) is None


def test_it_lowers_for_a_gpu_on_a_machine_without_one():
    pool = jax.ShapeDtypeStruct((1, 4, 2, 1, 16, 16), jnp.bfloat16)
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    q = jax.ShapeDtypeStruct((2, 3, 16), jnp.bfloat16)
    options = {"scale": 1.0, "backend": "triton"}
    for op, rest in ((paged_decode, ()), (paged_attention, (i32(3), i32(1)))):
        traced = jax.jit(lambda *args, op=op: op(*args, **options)).trace(q, pool, i32(), i32(2, 3), i32(2), *rest)
        assert "__gpu$xla.gpu.triton" in traced.lower(lowering_platforms=("cuda",)).as_text()
