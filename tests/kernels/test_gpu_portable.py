"""The GPU kernels that run everywhere, interpreted, against float64: Triton's, and Mosaic's of single warps with copies by TMA (the
interpreter has none by cp.async, and there is no other difference). A few sharp cases, and all under the marker kernels_full."""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import paged_attention, paged_decode
from pallas_kernels.common import mma
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.spec import TYPICAL_DECODE, AttentionSpec, Scales
from pallas_kernels.common.splits import default_splits, merge, tile_span
from pallas_kernels.common.targets import chip
from pallas_kernels.common.testing import make_context, tolerance
from pallas_kernels.common.tiles import places_in, tiles_of
from pallas_kernels.paged_attention import cases as attention_cases
from pallas_kernels.paged_attention import mosaic_gpu_sm80 as attention_warps
from pallas_kernels.paged_attention import reference as attention_reference
from pallas_kernels.paged_attention import triton as attention_triton
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import mosaic_gpu_sm80 as decode_warps
from pallas_kernels.paged_decode import reference as decode_reference
from pallas_kernels.paged_decode import triton as decode_triton
from tests.kernels.gpu_interpreter import GO_ON, RACE, no_race

FAST = {"xla_backend_optimization_level": "0"}  # half of the compile time; the work is small


@pytest.fixture(autouse=True)
def fresh_interpreter() -> Iterator[None]:
    """It must be reset after an error."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


class Kernel(NamedTuple):
    decode: Callable[..., Any]
    attend: Callable[..., Any]
    supports: Callable[..., str | None]
    decode_config: Any  # small
    attend_config: Any
    chip: str
    interpret: Any


SMALL = decode_triton.Config(tile=16)
TRITON = Kernel(
    decode_triton.decode,
    attention_triton.attend,
    decode_triton.supports,
    SMALL,
    attention_triton.Config(16, 16),
    "sm_90a",
    True,
)
WARPS = Kernel(
    decode_warps.decode,
    attention_warps.attend,
    mma.supports,
    mma.Config(32, 2),
    mma.Config(32, 2),
    "sm_100",
    plgpu.InterpretGPUParams(detect_races=True, **GO_ON),
)
KERNELS = {"triton": TRITON, "warps": WARPS}


def inputs(case, lens: tuple[int, ...], counts: tuple[int, ...], tokens: int):
    """(q, pool, layer, tables, lengths), the options, and the largest error that is allowed. Entries of the tables that no query
    sees name no block at all: who reads one is out of bounds."""
    rng = np.random.default_rng(len(case.name))
    pool = {"kv_heads": case.kv_heads, "block_size": case.block_size, "width": case.width, "stored_width": case.stored_width}
    context = make_context(rng, lens, dtype=case.dtype, scales=case.scales, **pool)
    heads = case.kv_heads * case.group
    q = rng.standard_normal((tokens, heads, case.width)).astype(compute_dtype(case.dtype))
    options = {
        "scale": case.width**-0.5,
        "window": case.window,
        "soft_cap": case.soft_cap,
        "kv_scales": context.kv_scales,
        "sinks": rng.standard_normal(heads).astype(np.float32) if case.sinks else None,
    }
    start = np.arange(context.block_tables.shape[1]) * case.block_size
    first = context.context_lens - counts + 1 - (case.window or 1 << 20)  # that a query sees
    seen = (start < context.context_lens[:, None]) & (start + case.block_size > first[:, None])
    tables = np.where(seen, context.block_tables, 1 << 20).astype(np.int32)
    return (q, context.kv, np.int32(1), tables, context.context_lens), options, tolerance(context)


def check_decode(kernel: Kernel, case, splits: int, config: Any = None):
    args, options, near = inputs(case, case.lens, (1,) * len(case.lens), len(case.lens))
    fixed = {"chip": chip(kernel.chip), "config": config, "num_splits": splits, "interpret": kernel.interpret}
    call = jax.jit(lambda *args: kernel.decode(*args, **options, **fixed), compiler_options=FAST)
    out, lse = (np.asarray(x) for x in call(*args))
    want, want_lse = decode_reference(*args, **options)
    np.testing.assert_allclose(out, want, rtol=0, atol=near)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=2e-4)
    empty = args[-1] == 0
    assert not out[empty].any() and np.isneginf(lse[empty]).all()
    for again, first in zip(call(*args), (out, lse), strict=True):
        np.testing.assert_array_equal(np.asarray(again), first)
    assert kernel is not WARPS or no_race()


def check_attention(kernel: Kernel, case, config: Any = None):
    lens, counts = (tuple(x) for x in zip(*case.rows, strict=True))
    args, options, near = inputs(case, lens, counts, case.tokens)
    starts = np.cumsum([0, *(n for _, n in case.rows)]).astype(np.int32)
    fixed = {"chip": chip(kernel.chip), "config": config, "interpret": kernel.interpret}
    call = jax.jit(lambda *args: kernel.attend(*args, **options, **fixed), compiler_options=FAST)
    out = np.asarray(call(*args, starts, np.array([case.num_decode], np.int32)))
    assert kernel is not WARPS or no_race()
    np.testing.assert_allclose(out, attention_reference(*args, starts, **options), rtol=0, atol=near)
    assert not out[starts[-1] :].any()


D, A = decode_cases.Case, attention_cases.Case
BF16 = {"dtype": "bfloat16", "kv_heads": 1, "group": 3, "sinks": True, "soft_cap": 3.0}
SHARP = {
    "everything": ("triton", decode_cases.CASES[-1], 3),
    "edges, more splits than tiles": ("triton", D("edges", (0, 1, 15, 16, 17, 100)), 16),
    "width of pieces": ("triton", D("pieces", (5, 40), width=80, group=7, kv_heads=1), 2),
    "int8 and everything": ("triton", decode_cases.CASES[-2], 2),
    "e4m3 by tensor": ("triton", D("e4m3", (3, 40), dtype="float8_e4m3fn", width=16, group=3, scales="tensor"), 1),
    "warps": ("warps", D("warps", (0, 150), window=140, **BF16), 2),
}


@pytest.mark.parametrize("name", SHARP)
def test_decode(name):
    kernel, case, splits = SHARP[name]
    check_decode(KERNELS[kernel], case, splits, KERNELS[kernel].decode_config)


MIXED = {
    "everything": ("triton", attention_cases.CASES[-1]),
    "int8 and everything": ("triton", attention_cases.CASES[-2]),
    "warps": ("warps", A("warps", ((33, 1), (100, 23), (0, 0)), 26, num_decode=1, window=60, **BF16)),
}


@pytest.mark.parametrize("name", MIXED)
def test_attention(name):
    kernel, case = MIXED[name]
    check_attention(KERNELS[kernel], case, KERNELS[kernel].attend_config)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="the interpreter of JAX 0.11 does not see it")
def test_a_race_would_be_seen(monkeypatch):
    """The control of the kernels of warps: without the wait for a copy they read what may not be there."""
    monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
    with pytest.raises(Exception, match=RACE):
        check_decode(WARPS, D("race", (40,), **BF16), 1, WARPS.decode_config)


def count_copies(monkeypatch, block_size: int) -> Counter[int]:
    """Counts, from now on, copies from the pool to shared memory, by the line of the pool seen as a matrix that they begin at."""
    found, original = Counter(), gpu_callbacks.copy_gmem_to_smem

    def copy(*args, src_transforms, **kwargs):
        (index,) = [t.indices[0] for t in src_transforms if hasattr(t, "indices")]
        found[int(np.asarray(index.start)) // block_size * block_size] += 1
        return original(*args, src_transforms=src_transforms, **kwargs)

    monkeypatch.setattr(gpu_callbacks, "copy_gmem_to_smem", copy)
    return found


@pytest.mark.parametrize(("block", "begin", "extra"), [(32, None, 0), (16, None, 2), (32, 0, 0)])
def test_blocks_outside_the_window_are_not_copied_and_others_once(monkeypatch, block, begin, extra):
    """extra: stand-ins for blocks outside of the first and the last tile. The control begins its walk too early."""
    case = D("copies", (0, 100), kv_heads=2, group=1, dtype="bfloat16", block_size=block, window=40)
    args, _, _ = inputs(case, case.lens, (1, 1), 2)
    if begin is not None:
        monkeypatch.setattr(decode_warps, "tile_span", lambda begin, *rest: tile_span(jnp.int32(0), *rest))
        early = lambda original, *args: original(*args[:5], jnp.int32(0), *args[6:])
        monkeypatch.setattr(mma, "fetch", partial(early, mma.fetch))
    copies = count_copies(monkeypatch, block)
    fixed = {"chip": chip("sm_100"), "config": mma.Config(32, 2), "num_splits": 2, "interpret": plgpu.InterpretGPUParams()}
    options = {"scale": 1.0, "window": 40, "soft_cap": None, "sinks": None, "kv_scales": None}
    jax.block_until_ready(jax.jit(lambda *args: decode_warps.decode(*args, **options, **fixed), compiler_options=FAST)(*args))
    blocks, live = args[1].shape[1], args[3][1, 60 // block : -(-100 // block)]
    want = {((2 * (blocks + int(x)) + which) * 2 + head) * block for x in live for which in (0, 1) for head in (0, 1)}
    assert (set(copies) == want) == (begin is None)
    if begin is None:
        assert copies.total() == len(want) + 4 * extra


def every(kernel: str, cases):
    spec = lambda c: AttentionSpec(1, 1, 1, c.kv_heads * c.group, c.width, pool(c), c.dtype)
    pool = lambda c: TYPICAL_DECODE.pool._replace(kv_heads=c.kv_heads, block_size=c.block_size, width=c.stored_width or c.width)
    return [(kernel, c) for c in cases if KERNELS[kernel].supports(spec(c), chip(KERNELS[kernel].chip)) is None]


KINDS: tuple[tuple[int, str, Scales], ...] = (
    (1, "bfloat16", "none"),
    (5, "float16", "none"),
    (8, "int8", "token"),
    (16, "float8_e4m3fn", "tensor"),
)
WIDTHS = [
    D(f"width {w} {d}", (0, 1, 33, 70), width=w, group=g, dtype=d, scales=s, block_size=32)
    for w in (64, 80, 96, 128, 192, 256)
    for g, d, s in KINDS
]
BLOCKS = [
    D(f"block {p} window {w}", (p - 1, p, p + 1, 3 * p), block_size=p, window=w, dtype="bfloat16")
    for p in (16, 32, 64, 128, 256)
    for w in (None, 7, p, 10 * p)
]
RAGGED = [
    A(f"{c.name}", attention_cases.MIXED, 72, 3, width=c.width, group=c.group, dtype=c.dtype, scales=c.scales, block_size=32)
    for c in WIDTHS
]
name_of = lambda x: getattr(x, "name", None) or str(x)


@pytest.mark.kernels_full
@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize(
    ("kernel", "case"), [x for k in KERNELS for x in every(k, [*decode_cases.CASES, *WIDTHS, *BLOCKS])], ids=name_of
)
def test_decode_in_full(kernel, case, splits):
    check_decode(KERNELS[kernel], case, splits)


@pytest.mark.kernels_full
@pytest.mark.parametrize(("kernel", "case"), [x for k in KERNELS for x in every(k, [*attention_cases.CASES, *RAGGED])], ids=name_of)
def test_attention_in_full(kernel, case):
    check_attention(KERNELS[kernel], case)


def test_tiles_hold_each_token_behind_the_decode_rows_once():
    starts, lens = jnp.array([0, 1, 1, 8, 9, 9]), jnp.array([5, 0, 20, 4, 0])
    tiles = tiles_of(starts, lens, jnp.array([1]), 12, 3)
    real = [tuple(int(x) for x in tile) for tile in zip(*tiles, strict=True) if tile[3]]
    assert real == [(2, 1, 13, 3), (2, 4, 16, 3), (2, 7, 19, 1), (3, 8, 3, 1)]
    assert len(tiles.row) == 12 // 3 + 5 and all(0 <= int(x) < 12 for x in tiles.start)
    np.testing.assert_array_equal(places_in(tiles, 12, 3), [-1, 0, 1, 2, 3, 4, 5, 6, 9, -1, -1, -1])


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


TARGETS = ["sm_80", "sm_90a", "sm_100"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
def test_tiles_fit_in_half_of_the_shared_memory(target, width):
    half = chip(target).fast_memory // 2
    for dtype in ("float32", "bfloat16"):
        config = decode_triton.heuristic(width, dtype, chip(target))
        assert 2 * config.stages * config.tile * width * jnp.dtype(dtype).itemsize <= half or config.tile == 16
    for rows in (16, 64):
        assert mma.shared_bytes(rows, width, mma.heuristic(rows, width, chip(target))) <= half


def test_candidates_begin_with_the_rule_and_fit():
    for module in (decode_triton, decode_warps, attention_triton, attention_warps):
        for target in TARGETS:
            found = module.candidates(TYPICAL_DECODE, chip(target))
            assert len(found) > 3 and len(set(found)) == len(found) and module.candidates(TYPICAL_DECODE, None) == []
    for rows, found in ((16, decode_warps), (64, attention_warps)):
        configs = found.candidates(TYPICAL_DECODE, chip("sm_80"))
        assert configs[0] == mma.heuristic(rows, 128, chip("sm_80"))
        assert all(mma.shared_bytes(rows, 128, c) <= chip("sm_80").fast_memory for c in configs)


def with_pool(dtype: str, group: int = 4, **changes) -> AttentionSpec:
    pool = TYPICAL_DECODE.pool._replace(**changes)
    return AttentionSpec(64, 64, 128, group * pool.kv_heads, min(128, pool.width), pool, dtype)


@pytest.mark.parametrize(
    ("kernel", "spec", "match"),
    [
        ("triton", with_pool("bfloat16", width=8), "widths that are multiples of 16.*got 8"),
        ("triton", with_pool("float64"), "takes pools of float32.*got float64"),
        ("triton", with_pool("float8_e4m3fn"), "no float8_e4m3fn on sm_80"),
        ("triton", with_pool("int8", layers=2, blocks=8192), "counts the 2147483648 bytes of this pool in 32 bits"),
        ("warps", with_pool("int8"), "takes pools of bfloat16 or float16.*got int8"),
        ("warps", with_pool("bfloat16", width=72), "widths that are multiples of 16 up to 256.*got 72"),
        ("warps", with_pool("bfloat16", width=512), "widths that are multiples of 16 up to 256.*got 512"),
        ("warps", with_pool("bfloat16", block_size=48), "block sizes of 8, 16, 32 and multiples of 64; got 48"),
        ("warps", with_pool("bfloat16", width=80, block_size=16), "heads of width 80 in blocks of at least 32 tokens.*got 16"),
        ("warps", with_pool("bfloat16", group=65), "at most 64 query heads for one kv head; got 65"),
        ("warps", with_pool("bfloat16", blocks=1 << 16), "in 32 bits, at most 2147483647; got 2147483648"),
    ],
)
def test_what_they_refuse(kernel: str, spec: AttentionSpec, match: str):
    reason = KERNELS[kernel].supports(spec, chip("sm_80"))
    assert reason is not None and re.search(match, reason)
    assert KERNELS[kernel].supports(TYPICAL_DECODE, chip("sm_80")) is None


@pytest.mark.parametrize(("backend", "target"), [("triton", "__gpu$xla.gpu.triton"), ("mosaic_gpu_sm80", "mosaic_gpu")])
def test_they_lower_for_a_gpu_on_a_machine_without_one(backend: str, target: str):
    pool = jax.ShapeDtypeStruct((1, 4, 2, 1, 16, 16), jnp.bfloat16)
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    q = jax.ShapeDtypeStruct((2, 3, 16), jnp.bfloat16)
    options = {"scale": 1.0, "backend": backend}
    for op, rest in ((paged_decode, ()), (paged_attention, (i32(3), i32(1)))):
        traced = jax.jit(lambda *args, op=op: op(*args, **options)).trace(q, pool, i32(), i32(2, 3), i32(2), *rest)
        assert target in traced.lower(lowering_platforms=("cuda",)).as_text()
