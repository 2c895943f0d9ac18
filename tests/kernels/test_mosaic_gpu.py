"""The Hopper kernels in Pallas' GPU interpreter, against float64; a few sharp cases, and all of them under the marker kernels_full.

Every slot that no token was written to is NaN, and so is shared memory before it is written. Entries of the tables past a row's
length name no block.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import hopper
from pallas_kernels.common.layout import PoolShape
from pallas_kernels.common.spec import TYPICAL_ATTENTION, TYPICAL_DECODE, AttentionSpec
from pallas_kernels.common.targets import chip
from pallas_kernels.paged_attention import cases as attention_cases
from pallas_kernels.paged_attention import mosaic_gpu as attention
from pallas_kernels.paged_attention.cases import Case as A
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import mosaic_gpu as decode
from pallas_kernels.paged_decode.cases import Case as D
from tests.kernels.gpu_interpreter import (
    HOPPER,
    RACE,
    check_attention,
    check_decode,
    count_copies,
    gpu_callbacks,
    inputs,
    interpret,
)

EIGHT = ("int8", "float8_e4m3fn")


@pytest.fixture(autouse=True)
def fresh_interpreter() -> Iterator[None]:
    """It must be reset after an error."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


# --- against float64 --------------------------------------------------------------------------------------------------------


def test_decode_in_parts_some_of_them_empty():
    case = D("parts", (0, 1, 15, 16, 17, 150), dtype="bfloat16", group=3, kv_heads=1)
    check_decode(case, races=True, again=True, num_splits=3, config=decode.Config(64, 2))


def test_decode_with_every_option():
    check_decode(decode_cases.CASES[-1]._replace(lens=(0, 3, 50, 150), group=7, kv_heads=1, stored_width=80, width=72))


def test_decode_of_8_bits_with_scales_of_tokens():
    case = D("int8", (1, 31, 32, 33, 130), dtype="int8", scales="token", block_size=32, group=5, kv_heads=1, width=96)
    check_decode(case, races=True)


def test_decode_of_blocks_larger_than_a_tile():
    check_decode(D("large", (255, 257, 300), dtype="float8_e4m3fn", scales="tensor", block_size=256, window=100, kv_heads=1))


def test_attention_of_mixed_rows():
    check_attention(attention_cases.CASES[3]._replace(dtype="bfloat16", group=3, kv_heads=1), races=True, again=True)


def test_attention_of_long_rows_with_every_option():
    rows = (33, 1), (200, 150), (7, 3), (0, 0)
    options = {"window": 50, "soft_cap": 3.0, "sinks": True}
    check_attention(A("long", rows, 160, num_decode=1, dtype="bfloat16", group=4, kv_heads=1, width=80, block_size=32, **options))


def test_attention_of_8_bits_with_scales_of_tokens():
    rows = (130, 70), (16, 16)
    check_attention(A("int8", rows, 90, dtype="int8", scales="token", kv_heads=1, group=2, width=32, sinks=True))


# --- what the interpreter would see -----------------------------------------------------------------------------------------


def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch):
    """A slot of the ring that is given back before its values are read: the producer may overwrite them."""
    case = D("race", (300,), dtype="int8", scales="tensor", kv_heads=1, block_size=64)
    call = {"races": True, "num_splits": 1, "config": decode.Config(64, 2)}
    check_decode(case, **call)

    def early(walk, memory, slot, bounds, i, wg):
        plgpu.barrier_arrive(memory["v_free"].at[slot])
        hopper.widen(walk, memory["v_ring"].at[slot], memory["v_wide"], None)
        return memory["v_wide"]

    monkeypatch.setattr(hopper, "values", early)
    with pytest.raises(Exception, match=RACE):
        check_decode(case, **call)


def test_a_planted_read_outside_is_found():
    """A row that is longer than its table."""
    case = D("outside", (300,), dtype="bfloat16", kv_heads=1, block_size=64)
    q, context, options = inputs(case, case.lens, 1)
    with pytest.raises(Exception, match="Out-of-bounds read"):
        interpret(decode.decode, q, context.kv, jnp.int32(1), context.block_tables[:, :4], context.context_lens, **options)


def test_every_block_is_copied_once_and_none_outside_the_window(monkeypatch: pytest.MonkeyPatch):
    case = D("copies", (100, 33, 0), dtype="bfloat16", kv_heads=2, block_size=16, window=40)
    _, context, _ = inputs(case, case.lens, 3)
    copies = count_copies(monkeypatch, context.kv.shape, 2)
    check_decode(case, num_splits=2)
    live = [(row, block) for row, n in enumerate(case.lens) for block in range(max(0, n - 40) // 16, -(-n // 16))]
    want = {(1, int(context.block_tables[at]), which, head, 0) for at in live for which in (0, 1) for head in (0, 1)}
    assert set(copies) == want and set(copies.values()) == {1}
    assert copies.bytes == len(live) * 2 * 2 * 16 * 64 * 2


# --- what they take, and the sizes they choose ------------------------------------------------------------------------------


def of_decode(**changes: Any) -> AttentionSpec:
    """The typical call with other fields, of the spec or of its pool."""
    pool = {name: value for name, value in changes.items() if name in PoolShape._fields}
    spec = {name: value for name, value in changes.items() if name not in pool}
    return replace(TYPICAL_DECODE, pool=TYPICAL_DECODE.pool._replace(**pool), **spec)


REFUSED = [
    ({"dtype": "float32"}, "takes pools of bfloat16, float16, int8 or float8_e4m3fn; got float32"),
    ({"heads": 8 * 65}, "takes up to 64 query heads a kv head; got 65"),
    ({"block_size": 48}, "takes blocks of 8, 16, 32, 64, 128 or 256 tokens; got 48"),
    ({"width": 72}, r"multiples of 32; got 72 \(store 96\)"),
    ({"width": 512}, r"got 512 \(store 256\)"),
    ({"blocks": 1 << 24}, "counts heads of blocks in 31 bits"),
]


@pytest.mark.parametrize(("changes", "why"), REFUSED, ids=str)
def test_what_a_kernel_cannot_take_is_said(changes, why):
    reason = decode.supports(of_decode(**changes), HOPPER)
    assert reason is not None and re.search(why, reason), reason
    assert attention.supports(of_decode(**changes), HOPPER) == reason


def test_they_take_what_they_are_for():
    for dtype, scales in (("bfloat16", "none"), ("float16", "none"), ("int8", "token"), ("float8_e4m3fn", "tensor")):
        for width in (64, 96, 128, 192, 256):
            pool = TYPICAL_DECODE.pool._replace(width=width)
            for op, spec in ((decode, TYPICAL_DECODE), (attention, TYPICAL_ATTENTION)):
                assert op.supports(replace(spec, dtype=dtype, scales=scales, pool=pool), HOPPER) is None
    assert decode.supports(replace(TYPICAL_DECODE, pool=TYPICAL_DECODE.pool._replace(width=80)), HOPPER) is None
    for other in (chip("sm_80"), chip("sm_100"), None):
        assert "is for sm_90a" in (decode.supports(TYPICAL_DECODE, other) or "")


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("op", [decode, attention], ids=["decode", "attention"])
def test_sizes_to_try_fit_into_shared_memory_and_the_first_is_the_own(op, dtype: str):
    spec = replace(TYPICAL_DECODE, dtype=dtype, scales="token" if dtype == "int8" else "none")
    shape = spec.pool.block_size, spec.pool.width, dtype, dtype == "int8"
    found = op.candidates(spec, HOPPER)
    assert len(found) > 2 and found[0] == op.heuristic(*shape, HOPPER) and len(set(found)) == len(found)
    for config in found:
        walk = op.walk_of(config, *shape)
        assert hopper.shared_bytes(walk, spec.pool.width if op is decode else 64) < HOPPER.fast_memory
        assert walk.consumers == 1 or dtype == "bfloat16"
    assert op.candidates(replace(spec, dtype="float32", scales="none"), HOPPER) == []


def test_queries_of_a_group_fill_the_rows_of_a_warpgroup():
    """Each query's heads lie together, and copies of queries begin at multiples of 8 rows."""
    for group in range(1, hopper.ROWS + 1):
        pack = attention.packing(group)
        assert pack.group >= group and pack.queries >= 1 and pack.queries * pack.group <= hopper.ROWS
        assert pack.queries % pack.align == 0 and pack.align * pack.group % 8 == 0


# --- in full ----------------------------------------------------------------------------------------------------------------


def taken(cases):
    """Those that the kernels take, in bfloat16 where they are in float32."""
    named = [case._replace(dtype="bfloat16", name=f"{case.name} as bf16") if case.dtype == "float32" else case for case in cases]
    return [case for case in named if (case.stored_width or case.width) % (32 if case.dtype in EIGHT else 16) == 0]


FULL_WIDTHS = [
    D(f"width {width} {dtype}", (0, 1, 33, 150), width=width, group=group, dtype=dtype, scales=scales, kv_heads=1)
    for width, group in ((64, 1), (80, 7), (96, 5), (128, 16), (192, 3), (256, 2))
    for dtype, scales in (("bfloat16", "none"), ("int8", "token"), ("float8_e4m3fn", "tensor"))
    if width % 32 == 0 or dtype == "bfloat16"
]
FULL_BLOCKS = [
    D(f"blocks of {size}", (size - 1, size, size + 1, 3 * size), block_size=size, window=window, dtype="bfloat16")
    for size in (8, 16, 32, 64, 128, 256)
    for window in (None, size, 20)
]


@pytest.mark.kernels_full
@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("case", [*taken(decode_cases.CASES), *FULL_WIDTHS, *FULL_BLOCKS], ids=lambda case: case.name)
def test_decode_in_full(case: D, splits: int):
    check_decode(case, num_splits=splits, races=splits == 2)


FULL_MIXED = [
    A(f"mixed {c.name}", attention_cases.MIXED, 72, num_decode=3, width=c.width, group=c.group, dtype=c.dtype, scales=c.scales)
    for c in FULL_WIDTHS
]


@pytest.mark.kernels_full
@pytest.mark.parametrize("case", [*taken(attention_cases.CASES), *FULL_MIXED], ids=lambda case: case.name)
def test_attention_in_full(case: A):
    check_attention(case, races=True)
