"""The GPU kernels that run everywhere, compiled ahead of time to machine code for an A100, an H200 and a B200: what ptxas and XLA
say of registers, spills, temporaries and aliases."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import kv_write, paged_attention, paged_decode
from pallas_kernels.aot.compile import Report, compile_for, missing
from pallas_kernels.common import mma
from pallas_kernels.common.spec import TYPICAL_DECODE
from pallas_kernels.common.targets import chip

pytestmark = [
    pytest.mark.aot_gpu,
    pytest.mark.skipif(missing("sm_80") is not None, reason=f"{missing('sm_80')}: install the extra aot-gpu"),
]

TARGETS = ["sm_80", "sm_90a", "sm_100"]
LAYERS, BLOCKS, KV_HEADS, BLOCK, ROWS = 4, 256, 8, 64, 64
i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)


def pool_of(width: int, dtype: str, block: int = BLOCK, blocks: int = BLOCKS) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((LAYERS, blocks, 2, KV_HEADS, block, width), jnp.dtype(dtype))


def size(x: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(x.shape)) * x.dtype.itemsize


def compiled(
    op: str, backend: str, target: str, width: int = 128, dtype: str = "bfloat16", group: int = 4, scales: bool = False, **pool
) -> Report:
    """Of paged_decode, or (with any other name) of paged_attention for a chunk of 1024 tokens."""
    kv = pool_of(width, dtype, **pool)
    tokens = ROWS if op == "decode" else 1024
    options = {"scale": 0.1, "window": 1000, "soft_cap": 30.0, "backend": backend, "platform": "cuda"}
    table = i32(), i32(ROWS, 128), i32(ROWS)
    q = jax.ShapeDtypeStruct((tokens, KV_HEADS * group, width), jnp.float32)
    given = f32(*kv.shape[:-1]) if scales else None
    if op == "decode":
        return compile_for(target, lambda *args: paged_decode(*args[:5], kv_scales=args[5], **options), q, kv, *table, given)
    call = lambda *args: paged_attention(*args[:7], kv_scales=args[7], **options)
    return compile_for(target, call, q, kv, *table, i32(ROWS + 1), i32(1), given)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("op", ["decode", "attention"])
def test_nothing_is_spilled(op: str, target: str):
    report = compiled(op, "mosaic_gpu_sm80", target)
    assert report.spill_bytes == 0
    assert report.registers is not None and report.registers <= 255
    assert report.shared_bytes is not None and report.shared_bytes <= chip(target).fast_memory // 2


@pytest.mark.kernels_full
@pytest.mark.parametrize("width", [64, 80, 96, 192, 256])
@pytest.mark.parametrize("group", [1, 7, 16, 64])
def test_other_widths_spill_nothing(width: int, group: int):
    for op in ("decode", "attention"):
        assert compiled(op, "mosaic_gpu_sm80", "sm_80", width, group=group).spill_bytes == 0


def least_block(width: int, target: str) -> int:
    """The smallest block size that is not refused."""
    spec = lambda block: replace(TYPICAL_DECODE, pool=TYPICAL_DECODE.pool._replace(width=width, block_size=block), width=width)
    return next(n for n in (8, 16, 32) if mma.supports(spec(n), chip(target)) is None)


@pytest.mark.parametrize(("width", "target"), [(64, "sm_80"), (80, "sm_80"), (16, "sm_100")])
def test_the_smallest_blocks(width: int, target: str):
    assert compiled("decode", "mosaic_gpu_sm80", target, width, block=least_block(width, target)).spill_bytes == 0


@pytest.mark.kernels_full
@pytest.mark.parametrize("block", [16, 32, 128, 256])
@pytest.mark.parametrize("width", [16, 48, 64, 80, 96, 112, 128, 192, 208])
def test_other_block_sizes(width: int, block: int):
    for target in ("sm_80", "sm_100"):
        if block >= least_block(width, target):
            assert compiled("decode", "mosaic_gpu_sm80", target, width, "float16", block=block).spill_bytes == 0


TRITON = [("sm_80", "int8"), ("sm_90a", "float8_e4m3fn"), ("sm_100", "float32")]


@pytest.mark.parametrize(("target", "dtype"), TRITON)
@pytest.mark.parametrize("op", ["decode", "attention"])
def test_triton_compiles(op: str, target: str, dtype: str):
    report = compiled(op, "triton", target, width=80, dtype=dtype, group=5, scales=dtype in ("int8", "float8_e4m3fn"))
    assert "gpu.triton" in report.text or "triton" in report.text
    assert report.temp_bytes < size(pool_of(80, dtype)) / LAYERS


@pytest.mark.parametrize("backend", ["mosaic_gpu_sm80", "triton"])
def test_a_pool_of_more_than_two_billion_numbers(backend: str):
    report = compiled("decode", backend, "sm_80", blocks=1 << 13)
    assert LAYERS * (1 << 13) * 2 * KV_HEADS * BLOCK * 128 > 2**31
    assert report.temp_bytes < 1 << 26


@pytest.mark.parametrize("backend", ["mosaic_gpu", "xla_tokens"])
@pytest.mark.parametrize(
    ("target", "dtype"), [("sm_80", "bfloat16"), ("sm_80", "int8"), ("sm_90a", "float8_e4m3fn"), ("sm_100", "int8")]
)
def test_kv_write_is_in_place(target: str, dtype: str, backend: str):
    kv = pool_of(128, dtype)
    scales = None if dtype == "bfloat16" else f32(*kv.shape[:-1])
    new = jax.ShapeDtypeStruct((ROWS, KV_HEADS, 128), jnp.float32)

    def write(kv, k, v, layer, slots, kv_scales):
        return kv_write(kv, k, v, layer, slots, num_rows=ROWS, kv_scales=kv_scales, backend=backend, platform="cuda")

    report = compile_for(target, write, kv, new, new, i32(), i32(ROWS), scales, donate=(0, 5))
    assert report.alias_bytes == size(kv) + (0 if scales is None else size(scales))
    assert report.temp_bytes <= (0 if backend == "mosaic_gpu" or scales is None else 8 * ROWS * KV_HEADS)  # XLA: the scales
    if backend == "mosaic_gpu":
        assert report.spill_bytes == 0


def step(kv, q, k, v, slots, tables, lens):
    def layer(carry, index):
        kv, q = carry
        kv = kv_write(kv, k, v, index, slots, num_rows=ROWS, platform="cuda")
        assert isinstance(kv, jax.Array)
        return (kv, q + paged_decode(q, kv, index, tables, lens, scale=0.1, platform="cuda")), None

    return lax.scan(layer, (kv, q), jnp.arange(LAYERS))[0]


@pytest.mark.parametrize("target", ["sm_80", "sm_100"])
def test_the_pool_is_not_copied_in_a_step(target: str):
    kv, new = pool_of(128, "bfloat16"), f32(ROWS, KV_HEADS, 128)
    report = compile_for(target, step, kv, f32(ROWS, 4 * KV_HEADS, 128), new, new, i32(ROWS), i32(ROWS, 128), i32(ROWS), donate=0)
    assert report.alias_bytes >= size(kv)
    assert report.temp_bytes < size(kv) / LAYERS
    assert report.text.count("mosaic_gpu") >= 2
