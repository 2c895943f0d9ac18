"""paged_attention's kernel for TPU, in the interpreter of Pallas, against float64."""

import functools
import re
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest

from pallas_kernels.common import tpu_stream
from pallas_kernels.common.counting import count_copies
from pallas_kernels.common.mosaic_tpu import round_up, sublanes, vmem_of
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.spec import TYPICAL_ATTENTION
from pallas_kernels.common.targets import CHIPS, chip
from pallas_kernels.common.testing import make_context, tolerance
from pallas_kernels.common.tpu_stream import CLOSES, OPENS, Config
from pallas_kernels.paged_attention import mosaic_tpu, reference
from pallas_kernels.paged_attention.cases import CASES, MIXED, Case
from tests.kernels.tpu_interpreter import PLAIN, RACES, interpreted, races


def make(case: Case, config: Config | None = None, *, name="v6e", params=PLAIN):
    """(the kernel as a function without arguments, what float64 gives, the pool)."""
    rng = np.random.default_rng(len(case.name))
    context = make_context(
        rng,
        tuple(n for n, _ in case.rows),
        kv_heads=case.kv_heads,
        block_size=case.block_size,
        width=case.width,
        stored_width=round_up(case.width, 128),
        dtype=case.dtype,
        scales=case.scales,
    )
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
    op = lambda *args: mosaic_tpu.attend(*args, chip=chip(name), config=config, interpret=params, **options)
    rows = context.block_tables, context.context_lens, query_start, np.array([case.num_decode], np.int32)
    kernel = interpreted(op, q, context.kv, np.int32(1), *rows)
    return kernel, reference(q, context.kv, 1, *rows[:3], **options), context


def check_near(case: Case, got, want, context) -> None:
    near = tolerance(context)
    np.testing.assert_allclose(got, want, rtol=0, atol=near)
    assert np.abs(got - want).mean() <= near / 8
    assert not got[sum(n for _, n in case.rows) :].any()


def wanted_copies(case: Case, context, tile: int) -> Counter:
    """Of each row and tile that has tokens of it, the blocks that these see tokens of; of each decode row, its blocks."""
    wanted, token = Counter(), 0
    for row, (length, count) in enumerate(case.rows):
        each = {}
        for t in range(count):
            each.setdefault(0 if row < case.num_decode else (token + t) // tile, []).append(length - count + t)
        for seen in each.values():
            begin = 0 if case.window is None else max(0, seen[0] + 1 - case.window)
            for block in range(begin // case.block_size, seen[-1] // case.block_size + 1):
                wanted[1, int(context.block_tables[row, block])] += 1
        token += count
    return wanted


SHARP = (
    (Case("mixed", MIXED, 72, num_decode=3, kv_heads=1, group=3, width=128, dtype="bfloat16"), Config(16, 2, 1, 3), "v6e"),
    (
        Case("all options, two cores", MIXED, 72, num_decode=3, window=20, sinks=True, soft_cap=3.0, width=80),
        Config(32, 2, 2, 2),
        "v5p",
    ),
)


@pytest.mark.parametrize(("case", "config", "name"), SHARP, ids=[case.name for case, *_ in SHARP])
def test_agrees_with_float64_and_reads_the_blocks_of_each_tile_once(case, config, name):
    with count_copies() as copies:
        kernel, want, context = make(case, config, name=name)
        got = kernel()
    check_near(case, got, want, context)
    assert Counter(copy.where for copy in copies) == wanted_copies(case, context, config.tokens)
    np.testing.assert_array_equal(kernel(), got)


ROWS = (MIXED, ((300, 300),), ((0, 0), (5, 5), (9, 2)), ((40, 1),) * 20 + ((90, 77), (3, 3)), ((0, 0),))


@pytest.mark.parametrize(("tile", "cores"), [(16, 1), (32, 2)])
def test_jobs_cover_each_token_once_and_open_and_close_each_tile(tile, cores):
    make_jobs = jax.jit(functools.partial(mosaic_tpu.jobs_of, tokens=300, tile=tile, window=None, block_size=16, cores=cores))
    for rows in ROWS:
        num_decode = min(3, len(rows) - 1)
        lens, counts = np.array([*rows, *[(0, 0)] * (24 - len(rows))], np.int32).T
        start = np.cumsum([0, *counts], dtype=np.int32)
        check_jobs(rows, [np.asarray(x) for x in make_jobs(lens, start, np.array([num_decode], np.int32))], num_decode, tile, cores)


def check_jobs(rows, jobs, num_decode: int, tile: int, cores: int) -> None:
    tiles, row, first, count, base, begin, end, state = jobs
    seen, start = Counter(), np.cumsum([0, *(n for _, n in rows)])
    for c in range(cores):
        assert (np.diff(tiles[c]) >= 0).all() and (tiles[c] % cores == c).all()
        for j in np.flatnonzero(count[c]):
            length, new = rows[row[c, j]]
            for t in range(begin[c, j], end[c, j]):
                at = tiles[c, j] * tile + t
                assert base[c, j] + t == length - new + at - start[row[c, j]]
                seen[row[c, j], at] += 1
            assert first[c, j] == 0 and count[c, j] == -(-(base[c, j] + end[c, j]) // 16)
        of_tile = {tile: state[c, (tiles[c] == tile) & (count[c] > 0)] for tile in tiles[c][count[c] > 0]}
        for bits in of_tile.values():
            assert [b & OPENS for b in bits] == [OPENS] + [0] * (len(bits) - 1)
            assert [b & CLOSES for b in bits] == [0] * (len(bits) - 1) + [CLOSES]
        assert not state[c, count[c] == 0].any()
    assert seen == Counter((s, t) for s in range(num_decode, len(rows)) for t in range(start[s], start[s + 1]))


def test_refuses_with_the_numbers_and_the_remedy():
    spec = replace(TYPICAL_ATTENTION, rows=256, blocks=2048)
    refused = mosaic_tpu.supports(spec, chip("v6e"))
    assert re.search(r"needs \d+ bytes of scalar memory for tables of 256 rows x 2048 blocks.* 524288 .*larger block_size", refused)
    spec = replace(TYPICAL_ATTENTION, pool=TYPICAL_ATTENTION.pool._replace(kv_heads=64, block_size=1024), heads=64)
    assert re.search(r"needs \d+ bytes of VMEM for blocks of 64 heads x 1024 tokens", mosaic_tpu.supports(spec, chip("v6e")))
    assert mosaic_tpu.supports(TYPICAL_ATTENTION, chip("v6e")) is None


@pytest.mark.parametrize("one", [c for c in CHIPS if c.platform == "tpu"], ids=lambda one: one.name)
@pytest.mark.parametrize("shape", [(1, 1, 16), (8, 4, 64), (32, 1, 16), (2, 12, 128), (1, 71, 256), (64, 1, 64)])
def test_the_sizes_chosen_by_rule_fit(one, shape):
    kv_heads, group, block_size = shape
    for width, dtype in ((128, "bfloat16"), (256, "bfloat16"), (256, "int8")):
        pool = TYPICAL_ATTENTION.pool._replace(kv_heads=kv_heads, block_size=block_size, width=width)
        spec = replace(TYPICAL_ATTENTION, heads=kv_heads * group, dtype=dtype, pool=pool)
        for config in mosaic_tpu.candidates(spec, one):
            assert config.fetch % config.compute == 0 and config.tokens % 16 == 0
            assert vmem_of(spec, config, group) <= one.fast_memory // 2


def fitting(case: Case) -> Case:
    return case._replace(block_size=round_up(case.block_size, 128 if case.scales == "token" else sublanes(case.dtype)))


@pytest.mark.kernels_full
@pytest.mark.parametrize("name", ["v6e", "v5p"])
@pytest.mark.parametrize("case", [fitting(case) for case in CASES if case.dtype != "float16"], ids=lambda case: case.name)
def test_the_whole_matrix(case, name):
    for config in (None, Config(16, 2, 1, 3)):
        kernel, want, context = make(case, config, name=name)
        check_near(case, kernel(), want, context)


def test_has_no_race(monkeypatch, capfd):
    """The control: a ring in which all chunks go to one buffer, so that the next one may arrive while this one is read."""
    case = Case("races", ((20, 1), (40, 30)), 31, num_decode=1, kv_heads=1, group=2, width=128, dtype="bfloat16")
    kernel, want, context = make(case, Config(16, 1, 1, 2), params=RACES)
    check_near(case, kernel(), want, context)
    assert not races(kernel, capfd)
    monkeypatch.setattr(tpu_stream, "slot_of", lambda number, buffers: number * 0)
    kernel, *_ = make(case, Config(16, 1, 1, 2), params=RACES)
    assert races(kernel, capfd)
