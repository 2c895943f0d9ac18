"""The attention ops compiled to machine code for an H200 on this machine: registers, spills and shared memory as the compiler tells
them, no copy of the pool."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import paged_attention, paged_decode
from pallas_kernels.aot.compile import compile_for
from pallas_kernels.aot.targets import missing
from pallas_kernels.common import hopper
from pallas_kernels.common.targets import chip
from pallas_kernels.paged_attention import mosaic_gpu as attention
from pallas_kernels.paged_decode import mosaic_gpu as decode

pytestmark = [pytest.mark.aot_gpu, pytest.mark.skipif(missing("sm_90a") is not None, reason=str(missing("sm_90a")))]

HOPPER = chip("sm_90a")
ROWS, TOKENS, TABLE, LAYERS, BLOCKS, KV_HEADS = 64, 512, 128, 32, 4096, 8
EIGHT = "float8_e4m3fn"
STORED = [("bfloat16", "none"), ("float16", "none"), ("int8", "tensor"), ("int8", "token"), (EIGHT, "none"), (EIGHT, "tensor")]
full = pytest.mark.kernels_full
full_options = {"window": 500, "soft_cap": 30.0}


def array(dtype, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def compiled(op: str, width: int, dtype: str, group: int, block: int, scales: str = "none", blocks: int = BLOCKS, **options):
    """(what the compiler says, bytes of the keys and values of a layer)"""
    pool = LAYERS, blocks, 2, KV_HEADS, block, width
    kv_scales = {"none": None, "tensor": array("float32", 2), "token": array("float32", *pool[:-1])}[scales]
    options |= {"scale": width**-0.5, "backend": "mosaic_gpu", "platform": "cuda"}
    rows = array("int32", ROWS, TABLE), array("int32", ROWS)
    sinks = array("float32", KV_HEADS * group)

    def run(q, kv, layer, tables, lens, query_start, num_decode, sinks, kv_scales):
        more = {"sinks": sinks, "kv_scales": kv_scales, **options}
        if op == "decode":
            return paged_decode(q, kv, layer, tables, lens, **more)
        return paged_attention(q, kv, layer, tables, lens, query_start, num_decode, **more)

    q = array("bfloat16", ROWS if op == "decode" else TOKENS, KV_HEADS * group, width)
    more = array("int32", ROWS + 1), array("int32", 1), sinks, kv_scales
    report = compile_for("sm_90a", run, q, array(dtype, *pool), array("int32"), *rows, *more)
    return report, 2 * blocks * KV_HEADS * block * width * jnp.dtype(dtype).itemsize


CASES = [
    ("decode", 128, "bfloat16", 4, 64, "none", {}),
    ("decode", 128, EIGHT, 4, 32, "token", full_options),
    ("attention", 128, "bfloat16", 4, 64, "none", full_options),
    *(pytest.param(op, 128, dtype, 4, block, scales, options, marks=full)
      for op in ("decode", "attention")
      for dtype, scales in STORED
      for block in (16, 256)
      for options in ({}, full_options)),
    *(pytest.param(op, width, dtype, group, 64, "token" if dtype == "int8" else "none", {}, marks=full)
      for op in ("decode", "attention")
      for width, group in ((64, 1), (64, 8), (80, 7), (96, 5), (112, 3), (192, 16), (256, 2))
      for dtype in ("bfloat16", "int8") if not (dtype == "int8" and width % 32)),
]  # fmt: skip


@pytest.mark.parametrize(("op", "width", "dtype", "group", "block", "scales", "options"), CASES)
def test_kernels_fit_and_do_not_copy_the_pool(op, width, dtype, group, block, scales, options):
    report, layer = compiled(op, width, dtype, group, block, scales, **options)
    assert report.registers is not None and report.registers <= 255
    assert report.temp_bytes < layer / 4
    assert width > 128 or report.spill_bytes == 0
    shape = block, width, dtype, scales == "token"
    configs = [decode.heuristic(*shape, HOPPER), attention.heuristic(*shape, HOPPER)]
    widths = [hopper.columns(width)[0][1], attention.out_width(width)]
    walks = [decode.walk_of(configs[0], *shape), attention.walk_of(configs[1], *shape)]
    fits = [hopper.shared_bytes(walk, out) for walk, out in zip(walks, widths, strict=True)]
    assert (
        report.shared_bytes is not None and report.shared_bytes <= (fits[0] if op == "decode" else max(fits)) <= HOPPER.fast_memory
    )


def test_a_pool_of_more_than_2_to_the_31_elements_compiles():
    blocks = 1 << 17
    assert LAYERS * blocks * 2 * KV_HEADS * 64 * 128 > 1 << 36
    report, layer = compiled("decode", 128, "bfloat16", 4, 64, blocks=blocks)
    assert report.temp_bytes < layer / 4 and report.spill_bytes == 0


def test_a_kernel_that_asks_for_too_much_shared_memory_is_refused_by_the_compiler():
    """The control of the estimates: one stage more than fits."""
    shape = 64, 128, "bfloat16", False
    most = decode.heuristic(*shape, HOPPER)
    config = decode.Config(128, most.stages + 1)
    assert hopper.shared_bytes(decode.walk_of(config, *shape), 128) > HOPPER.fast_memory

    def run(q, kv, layer, tables, lens):
        options = {"scale": 0.1, "window": None, "soft_cap": None, "sinks": None, "kv_scales": None}
        return decode.decode(q, kv, layer, tables, lens, chip=HOPPER, config=config, **options)

    pool = array("bfloat16", 2, 16, 2, 1, 64, 128)
    with pytest.raises(Exception, match="[Ss]hared memory|smem|SMEM"):
        compile_for("sm_90a", run, array("bfloat16", 2, 4, 128), pool, array("int32"), array("int32", 2, 8), array("int32", 2))
