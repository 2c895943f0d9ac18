"""paged_decode's kernel for TPU, in the interpreter of Pallas, against float64."""

import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pallas_kernels import paged_decode
from pallas_kernels.common import tpu_stream
from pallas_kernels.common.counting import Copy, count_copies
from pallas_kernels.common.layout import PoolShape
from pallas_kernels.common.mosaic_tpu import round_up, vmem_of
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.spec import TYPICAL_DECODE
from pallas_kernels.common.targets import CHIPS, Chip, chip
from pallas_kernels.common.testing import Context, make_context, share, tolerance
from pallas_kernels.common.tpu_stream import Config
from pallas_kernels.paged_decode import mosaic_tpu, reference
from pallas_kernels.paged_decode.cases import CASES, Case
from tests.kernels.tpu_interpreter import PLAIN, RACES, interpreted, races


def arguments(case: Case, config: Config | None, one: Chip, *, splits=None, params=PLAIN, groups=None):
    """(the kernel, its arguments, what float64 gives, the pool). groups: rows with the same first blocks."""
    rng = np.random.default_rng(len(case.name))
    context = make_context(
        rng,
        case.lens,
        kv_heads=case.kv_heads,
        block_size=case.block_size,
        width=case.width,
        stored_width=round_up(case.width, 128),
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
    static = {"chip": one, "config": config, "num_splits": splits, "interpret": params}
    op = lambda *args: mosaic_tpu.decode(*args, **static, **options)
    want = reference(q, context.kv, 1, context.block_tables, context.context_lens, **options)
    return op, [q, context.kv, jnp.int32(1), context.block_tables, context.context_lens], want, context


def make(case: Case, config: Config | None = None, *, spoil=None, **options):
    """(the kernel as a function without arguments, what float64 gives, the pool). spoil: of the block tables."""
    op, args, want, context = arguments(case, config, chip("v6e"), **options)
    if spoil is not None:
        args[3] = spoil(args[3])
    return interpreted(op, *args), want, context


def check_near(got, want, context: Context) -> None:
    near = tolerance(context)
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=near)
    assert np.abs(got[0] - want[0]).mean() <= near / 8
    np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-4)
    empty = context.context_lens == 0
    assert not got[0][empty].any() and np.isneginf(got[1][empty]).all()


def check_copies(copies: list[Copy], context: Context, case: Case) -> None:
    """One copy for each row and block that it sees a token of, of the whole block, and nothing else."""
    wanted = Counter()
    for row, n in enumerate(case.lens):
        begin = 0 if case.window is None else max(0, n - case.window)
        for block in range(begin // case.block_size, -(-n // case.block_size)):
            wanted[1, int(context.block_tables[row, block])] += 1
    arrays = {"block": context.kv} | ({"scales": context.kv_scales} if case.scales == "token" else {})
    for what, array in arrays.items():
        found = [copy for copy in copies if copy.what == what]
        assert Counter(copy.where for copy in found) == wanted
        assert {copy.bytes for copy in found} <= {array[0, 0].nbytes}
    assert {copy.what for copy in copies} <= set(arrays)


SHARP = (  # what is tried, the kernel's sizes, the parts of the context
    (Case("edges", (0, 1, 15, 0, 16, 17, 100, 0), group=3, width=128, dtype="bfloat16"), Config(1, 4, 2, 2), 1),
    (Case("all options", (0, 1, 50, 33, 0), group=5, width=80, soft_cap=2.0, sinks=True, window=20), Config(1, 1, 1, 3), 2),
    (Case("parts, some empty", (70, 3, 64, 0, 65, 30), kv_heads=1, window=40, width=192, dtype="bfloat16"), Config(1, 2, 1, 3), 4),
    (Case("int8", (200, 0, 129), kv_heads=1, block_size=128, width=128, dtype="int8", scales="token"), Config(1, 2, 2, 2), 1),
    (Case("e4m3", (33, 0, 32, 70), block_size=32, width=96, dtype="float8_e4m3fn", scales="tensor"), Config(1, 1, 1, 2), 1),
)


@pytest.mark.parametrize(("case", "config", "splits"), SHARP, ids=[case.name for case, *_ in SHARP])
def test_agrees_with_float64_and_reads_each_block_once(case, config, splits):
    with count_copies() as copies:
        kernel, want, context = make(case, config, splits=splits)
        got = kernel()
    check_near(got, want, context)
    check_copies(copies, context, case)
    if case.name == "edges":
        for again, first in zip(kernel(), got, strict=True):
            np.testing.assert_array_equal(again, first)


RACY = Case("races", (33, 0, 50), kv_heads=1, group=1, width=128, dtype="bfloat16")
ONE_BLOCK = Config(1, 1, 1, 3)


def test_has_no_race(monkeypatch, capfd):
    """Rows that share blocks, and chunks that are fetched ahead. The control: a ring in which all chunks go to one buffer, so that
    the next one may arrive while this one is read."""
    kernel, _, context = make(RACY, ONE_BLOCK, params=RACES, groups={(0, 2): 2})
    assert np.isfinite(kernel()[0]).all()
    assert not races(kernel, capfd)
    monkeypatch.setattr(tpu_stream, "slot_of", lambda number, buffers: number * 0)
    kernel, *_ = make(RACY, ONE_BLOCK, params=RACES, groups={(0, 2): 2})
    assert races(kernel, capfd)


def test_a_block_outside_the_pool_would_be_seen():
    def spoil(tables):
        tables = tables.copy()
        tables[2, 1] = 10_000
        return tables

    kernel, *_ = make(RACY, ONE_BLOCK, spoil=spoil)
    with pytest.raises(Exception, match="Out-of-bounds read"):
        kernel()


def pool(**changes) -> PoolShape:
    return TYPICAL_DECODE.pool._replace(**changes)


REFUSED = {
    "takes pools of bfloat16, float32, int8, float8_e4m3fn; got float16": replace(TYPICAL_DECODE, dtype="float16"),
    "stored in multiples of 128 .*; got 64": replace(TYPICAL_DECODE, pool=pool(width=64)),
    "multiple of 16 tokens of bfloat16; got block_size 8": replace(TYPICAL_DECODE, pool=pool(block_size=8)),
    "multiple of 32 tokens of int8; got block_size 16": replace(TYPICAL_DECODE, dtype="int8", pool=pool(block_size=16)),
    "multiple of 128 tokens for scales per token; got block_size 64: take 128, or scales per tensor": replace(
        TYPICAL_DECODE, dtype="int8", scales="token"
    ),
    "2106368 bytes of scalar memory for tables of 256 rows x 2048 blocks.* 524288 .*larger block_size": replace(
        TYPICAL_DECODE, rows=256, tokens=256, blocks=2048
    ),
    "bytes of VMEM for blocks of 64 heads x 2048 tokens": replace(TYPICAL_DECODE, pool=pool(kv_heads=64, block_size=2048)),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_with_the_numbers_and_the_remedy(reason):
    assert re.search(reason, mosaic_tpu.supports(REFUSED[reason], chip("v6e")) or "")
    assert mosaic_tpu.supports(TYPICAL_DECODE, chip("v6e")) is None


def test_a_refused_call_is_not_traced():
    like = lambda shape, dtype: jnp.zeros(shape, dtype)
    args = like((1, 2, 64), "bfloat16"), like((1, 2, 2, 2, 16, 64), "bfloat16"), 0, like((1, 1), "int32"), like(1, "int32")
    with pytest.raises(ValueError, match="paged_decode cannot run as mosaic_tpu: it needs head widths stored in multiples of 128"):
        paged_decode(*args, scale=1.0, backend="mosaic_tpu")


@pytest.mark.parametrize("one", [c for c in CHIPS if c.platform == "tpu"], ids=lambda one: one.name)
@pytest.mark.parametrize("shape", [(1, 1, 16), (8, 4, 64), (32, 1, 16), (2, 12, 128), (1, 16, 256), (64, 1, 64)])
def test_the_sizes_chosen_by_rule_fit(one, shape):
    kv_heads, group, block_size = shape
    for width, dtype in ((128, "bfloat16"), (256, "float32"), (256, "int8")):
        of = pool(kv_heads=kv_heads, block_size=block_size, width=width)
        spec = replace(TYPICAL_DECODE, heads=kv_heads * group, dtype=dtype, pool=of)
        for config in mosaic_tpu.candidates(spec, one):
            assert config.fetch % config.compute == 0
            assert vmem_of(spec, config, mosaic_tpu.rows_of(spec)) <= one.fast_memory // 2


def fitting(case: Case) -> Case:
    """The case with blocks that are large enough for the kernel."""
    least = 128 if case.scales == "token" else 4 * 8 // np.dtype(jnp.dtype(case.dtype)).itemsize
    return case._replace(block_size=round_up(case.block_size, least))


ROWS = (0, 17, 1, 40, 300)
QUANTIZED = [(dtype, scales) for dtype in ("int8", "float8_e4m3fn") for scales in ("tensor", "token")]
MATRIX = [
    *(fitting(case) for case in CASES if case.dtype != "float16"),
    *(Case(f"width {d}", ROWS, width=d, dtype="bfloat16") for d in (64, 80, 96, 128, 192, 256)),
    *(Case(f"group {g}", ROWS, group=g, width=128, dtype="bfloat16") for g in (1, 2, 4, 5, 7, 8, 16)),
    *(Case(f"heads {k}", ROWS, kv_heads=k, width=128) for k in (1, 2, 8)),
    *(Case(f"block {p}", (0, 1, p - 1, p, p + 1, 2 * p), block_size=p, width=128, dtype="bfloat16") for p in (16, 32, 128, 256)),
    *(Case(f"{d} {s}", ROWS, block_size=128, width=128, dtype=d, scales=s, soft_cap=5.0, window=140) for d, s in QUANTIZED),
]


@pytest.mark.kernels_full
@pytest.mark.parametrize("case", MATRIX, ids=lambda case: case.name)
def test_the_whole_matrix(case):
    for config in (None, Config(1, 2, 2, 2)):
        with count_copies() as copies:
            kernel, want, context = make(case, config)
            got = kernel()
        check_near(got, want, context)
        check_copies(copies, context, case)


@pytest.mark.kernels_full
@pytest.mark.parametrize("splits", range(1, 17))
def test_any_number_of_parts(splits):
    case = Case("parts", (0, 1, 16, 50, 200), kv_heads=1, width=128, dtype="bfloat16", sinks=True)
    kernel, want, context = make(case, Config(1, 2, 1, 3), splits=splits)
    check_near(kernel(), want, context)


@pytest.mark.kernels_full
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("shards", [2, 4])
def test_heads_in_shards(shards, kind):
    """The kernel inside shard_map, each shard with its own kv heads."""
    case = Case("shards", (40, 0, 17), kv_heads=4, width=128, dtype="bfloat16")
    op, args, want, context = arguments(case, Config(1, 2, 1, 2), chip("v6e"))
    mesh = jax.make_mesh((shards,), ("model",), axis_types=(kind,))
    head, pool = jax.P(None, "model", None), jax.P(None, None, None, "model", None, None)
    local = jax.shard_map(
        op, mesh=mesh, in_specs=(head, pool, jax.P(), jax.P(), jax.P()), out_specs=(head, jax.P(None, "model")), check_vma=False
    )
    placed = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(args, (head, pool, *[jax.P()] * 3), strict=True)]
    check_near([np.asarray(x) for x in jax.jit(local)(*placed)], want, context)
