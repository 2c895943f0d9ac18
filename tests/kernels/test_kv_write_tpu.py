"""kv_write's kernel for TPU, in the interpreter of Pallas, against NumPy."""

import re
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common.counting import count_copies
from pallas_kernels.common.mosaic_tpu import round_up, sublanes
from pallas_kernels.common.spec import TYPICAL_WRITE, WriteSpec
from pallas_kernels.common.targets import CHIPS, chip
from pallas_kernels.kv_write import mosaic_tpu, reference
from pallas_kernels.kv_write.cases import CASES, Case
from tests.kernels.tpu_interpreter import PLAIN, RACES, interpreted, races


def make(case: Case, window: int | None = None, params=PLAIN, slots=None):
    """(the kernel as a function without arguments, what it has to give, the slots). slots: what the kernel is told instead."""
    rng = np.random.default_rng(len(case.name))
    shape = 3, case.blocks, 2, case.kv_heads, case.block_size
    kv = (rng.standard_normal((*shape, round_up(case.width, 128))) * 20).astype(jnp.dtype(case.dtype))
    kv_scales = {"none": None, "tensor": np.array([0.02, 0.4], np.float32), "token": rng.random(shape, np.float32)}[case.scales]
    right = case.slots()
    k, v = rng.standard_normal((2, len(right), case.kv_heads, case.width)).astype(np.float32)
    k[0, 0] = 0
    op = lambda kv, k, v, layer, slots, kv_scales: mosaic_tpu.write(
        kv, k, v, layer, slots, kv_scales=kv_scales, chip=chip("v6e"), config=window and mosaic_tpu.Config(window), interpret=params
    )
    kernel = interpreted(op, kv, k, v, np.int32(1), right if slots is None else slots, kv_scales)
    return kernel, reference(kv, k, v, 1, right, kv_scales), right


def check_same(case: Case, got, want) -> None:
    """All but the scrap block of the layer; quantized values may be rounded otherwise in few places."""
    want, want_scales = want
    if case.scales == "token":
        got, scales = got
        np.testing.assert_allclose(scales[:, 1:], want_scales[:, 1:], rtol=1e-6)
        np.testing.assert_array_equal(scales[[0, 2]], want_scales[[0, 2]])
    assert got.dtype == want.dtype
    off = (got != want)[:, 1:]
    assert off.mean() < (0 if case.scales == "none" else 0.001) or not off.any()
    got, want = (x.astype(np.float32) for x in (got, want))
    np.testing.assert_allclose(got[:, 1:], want[:, 1:], rtol=0.125, atol=1 if case.dtype == "int8" else 2.0**-9)
    np.testing.assert_array_equal(got[[0, 2], 0], want[[0, 2], 0])


def runs_of(case: Case, slots: np.ndarray) -> tuple[int, int]:
    """Tiles that are touched, and those of them that the new tokens fill."""
    tiles = [slot // sublanes(case.dtype) for slot in slots if slot >= case.block_size]
    return len(set(tiles)), sum(tiles.count(tile) == sublanes(case.dtype) for tile in set(tiles))


MIXED = ((0, 1), (15, 1), (16, 1), (33, 40), (0, 64), (31, 2), (5, 12))
SHARP = (
    (Case("decode", ((0, 1), (15, 1), (16, 1), (77, 1)), padding=2, block_size=32, width=80, dtype="bfloat16"), None),
    (Case("mixed, across windows", MIXED, padding=3, block_size=32, width=200, dtype="bfloat16", kv_heads=1), 16),
    (Case("e4m3 by tensor", ((3, 2), (5, 80)), block_size=64, width=128, dtype="float8_e4m3fn", scales="tensor", kv_heads=1), 16),
    (Case("int8 by token", ((3, 2), (125, 40)), block_size=128, width=128, dtype="int8", scales="token", padding=3), 16),
)


@pytest.mark.parametrize(("case", "window"), SHARP, ids=[case.name for case, _ in SHARP])
def test_agrees_with_numpy_and_reads_no_tile_that_it_fills(case, window):
    with count_copies() as copies:
        kernel, want, slots = make(case, window)
        got = kernel()
    check_same(case, got, want)
    touched, filled = runs_of(case, slots)
    tile = 2 * case.kv_heads * sublanes(case.dtype) * round_up(case.width, 128) * jnp.dtype(case.dtype).itemsize
    of_values = [copy for copy in copies if copy.bytes == tile]
    assert sum(copy.what == "write" for copy in of_values) == touched
    assert sum(copy.what == "read" for copy in of_values) == touched - filled
    if case.name == "mixed, across windows":
        assert filled >= 5  # or the count above says little
        np.testing.assert_array_equal(kernel(), got)
    if case.scales == "token":
        assert sum(copy.what == "write" for copy in copies if copy.bytes != tile) == len(set(slots[slots >= 128] // 128))


def test_many_tokens_go_in_several_calls(monkeypatch: pytest.MonkeyPatch):
    """Of 64 tokens at most here: runs that two calls share, and a last call that writes some tokens again."""
    monkeypatch.setattr(mosaic_tpu, "NEW_BYTES", 64 * 2 * 128 * 4)
    case = Case("several calls", ((0, 150), (7, 3)), block_size=128, width=128, dtype="int8", scales="token", kv_heads=1)
    with count_copies() as copies:
        kernel, want, slots = make(case)
        got = kernel()
    assert len(slots) == 153 and sum(copy.what == "write" for copy in copies) > len(set(slots // 32)) + len(set(slots // 128))
    check_same(case, got, want)


RACY = Case("races", ((15, 20), (0, 1), (40, 3)), block_size=32, width=128, dtype="bfloat16", kv_heads=1)


def test_has_no_race(capfd):
    """The control breaks the rule that no block belongs to two rows: the second run in a tile reads what the first one writes."""
    kernel, want, slots = make(RACY, 8, RACES)
    check_same(RACY, kernel(), want)
    assert not races(kernel, capfd)
    slots = slots.copy()
    slots[-3:] = [slots[0] - 5, slots[0] - 3, slots[0] - 1]
    kernel, *_ = make(RACY, 32, RACES, slots)
    assert races(kernel, capfd)


def test_a_slot_outside_the_pool_would_be_seen():
    kernel, *_ = make(RACY, slots=np.full(24, 100_000, np.int32))
    with pytest.raises(Exception, match="Out-of-bounds"):
        kernel()


def spec(**changes) -> WriteSpec:
    pool = {name: changes.pop(name) for name in ("width", "block_size", "kv_heads") if name in changes}
    return replace(TYPICAL_WRITE, pool=TYPICAL_WRITE.pool._replace(**pool), **changes)


REFUSED = {
    "takes pools of bfloat16, float32, int8, float8_e4m3fn; got float16": spec(dtype="float16"),
    "stored in multiples of 128 .*; got 64": spec(width=64),
    "multiple of 16 tokens of bfloat16; got block_size 8": spec(block_size=8),
    "multiple of 128 tokens for scales per token; got block_size 64": spec(dtype="int8", scales="token"),
    "bytes of VMEM for 1024 heads of width 256, .* more shards": spec(kv_heads=1024, width=256),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refuses_with_the_numbers_and_the_remedy(reason):
    assert re.search(reason, mosaic_tpu.supports(REFUSED[reason], chip("v6e")) or "")
    assert mosaic_tpu.supports(TYPICAL_WRITE, chip("v6e")) is None


@pytest.mark.parametrize("one", [c for c in CHIPS if c.platform == "tpu"], ids=lambda one: one.name)
@pytest.mark.parametrize(("tokens", "kv_heads", "width"), [(1, 1, 128), (64, 8, 128), (8192, 8, 128), (512, 32, 256)])
def test_the_windows_fit(one, tokens, kv_heads, width):
    for dtype in ("float32", "bfloat16", "int8"):
        call = replace(spec(kv_heads=kv_heads, width=width), tokens=tokens, dtype=dtype)
        for config in mosaic_tpu.candidates(call, one):
            assert config.window % 8 == 0
            assert mosaic_tpu.bytes_of(call, config) <= one.fast_memory // 2


def fitting(case: Case) -> Case:
    return case._replace(block_size=round_up(case.block_size, 128 if case.scales == "token" else sublanes(case.dtype)))


@pytest.mark.kernels_full
@pytest.mark.parametrize("window", [None, 8, 32])
@pytest.mark.parametrize("case", [fitting(case) for case in CASES if case.dtype != "float16"], ids=lambda case: case.name)
def test_the_whole_matrix(case, window):
    kernel, want, _ = make(case, window)
    check_same(case, kernel(), want)
