"""The Hopper kernels in Pallas' GPU interpreter, against float64; a few sharp cases, and all of them under the marker kernels_full.

Every slot that no token was written to is NaN, and so is shared memory before it is written. Entries of the tables past a row's
length name no block.
"""

from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from kernels.gpu_interpreter import (
    HOPPER,
    check_attention,
    check_decode,
    count_copies,
    gpu_callbacks,
    inputs,
    interpret,
)
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import hopper
from pallas_kernels.common.layout import PoolShape
from pallas_kernels.common.spec import TYPICAL_ATTENTION, TYPICAL_DECODE
from pallas_kernels.common.targets import chip
from pallas_kernels.paged_attention import cases as attention_cases
from pallas_kernels.paged_attention import mosaic_gpu as attention
from pallas_kernels.paged_attention.cases import Case as A
from pallas_kernels.paged_decode import cases as decode_cases
from pallas_kernels.paged_decode import mosaic_gpu as decode
from pallas_kernels.paged_decode.cases import Case as D

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
    check_decode(replace_case(decode_cases.CASES[-1], lens=(0, 3, 50, 150), group=7, kv_heads=1, stored_width=80, width=72))


def test_decode_of_8_bits_with_scales_of_tokens():
    case = D("int8", (1, 31, 32, 33, 130), dtype="int8", scales="token", block_size=32, group=5, kv_heads=1, width=96)
    check_decode(case, races=True)


def test_decode_of_blocks_larger_than_a_tile():
    check_decode(D("large", (255, 257, 300), dtype="float8_e4m3fn", scales="tensor", block_size=256, window=100, kv_heads=1))


def test_attention_of_mixed_rows():
    check_attention(replace_case(attention_cases.CASES[3], dtype="bfloat16", group=3, kv_heads=1), races=True, again=True)


def test_attention_of_long_rows_with_every_option():
    rows = (33, 1), (200, 150), (7, 3), (0, 0)
    options = {"window": 50, "soft_cap": 3.0, "sinks": True}
    check_attention(A("long", rows, 160, num_decode=1, dtype="bfloat16", group=4, kv_heads=1, width=80, block_size=32, **options))


def test_attention_of_8_bits_with_scales_of_tokens():
    rows = (130, 70), (16, 16)
    check_attention(A("int8", rows, 90, dtype="int8", scales="token", kv_heads=1, group=2, width=32, sinks=True))


def replace_case(case, **changes):
    return case._replace(**changes)


# --- what the interpreter would see -----------------------------------------------------------------------------------------


def test_a_planted_race_is_found(monkeypatch: pytest.MonkeyPatch):
    """A slot of the ring that is given back before its values are read: the producer may overwrite them."""
    case = D("race", (300,), dtype="int8", scales="tensor", kv_heads=1, block_size=64)
    call = {"races": True, "num_splits": 1, "config": decode.Config(64, 2)}
    check_decode(case, **call)

    def early(walk, memory, slot, bounds, i, wg):
        plgpu.barrier_wait(memory["v_full"].at[slot])
        plgpu.barrier_arrive(memory["v_free"].at[slot])
        hopper.widen(walk, memory["v_ring"].at[slot], memory["v_wide"], None)
        return memory["v_wide"], None

    monkeypatch.setattr(hopper, "values", early)
    with pytest.raises(Exception, match="[Rr]ace"):
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
