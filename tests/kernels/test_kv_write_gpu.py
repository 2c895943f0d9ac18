"""kv_write in Mosaic GPU, in its interpreter with race detection, against NumPy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import kv_write
from pallas_kernels.common.spec import TYPICAL_WRITE, WriteSpec
from pallas_kernels.common.targets import chip
from pallas_kernels.kv_write import mosaic_gpu, reference
from pallas_kernels.kv_write.cases import CASES, Case


def check(case: Case) -> None:
    rng = np.random.default_rng(len(case.name))
    shape = 3, case.blocks, 2, case.kv_heads, case.block_size
    kv = (rng.standard_normal((*shape, case.stored_width)) * 20).astype(jnp.dtype(case.dtype))
    kv_scales = {"none": None, "tensor": np.array([0.02, 0.4], np.float32), "token": rng.random(shape, np.float32)}[case.scales]
    slots = case.slots()
    k, v = rng.standard_normal((2, len(slots), case.kv_heads, case.width)).astype(np.float32)
    k[0, 0], k[0, -1] = 0, 300  # the second is too large for some of the scales
    options = {"chip": chip("sm_90a"), "interpret": plgpu.InterpretGPUParams(detect_races=True)}
    call = jax.jit(lambda *args: mosaic_gpu.write(*args[:5], kv_scales=args[5], **options))
    got = call(kv, k, v, np.int32(1), slots, kv_scales)
    want, want_scales = reference(kv, k, v, 1, slots, kv_scales)
    if case.scales == "token":
        got, scales = got
        assert want_scales is not None
        np.testing.assert_allclose(np.asarray(scales)[:, 1:], want_scales[:, 1:], rtol=1e-6)
    got = np.asarray(got)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got[:, 0], kv[:, 0])  # padding writes nothing
    if case.scales == "none":
        np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
    else:  # x / scale may be rounded differently: by one step of the stored numbers, in few places
        got, want = (x.astype(np.float32) for x in (got, want))
        assert (got[:, 1:] != want[:, 1:]).mean() < 0.01
        np.testing.assert_allclose(got[:, 1:], want[:, 1:], rtol=0.125, atol=1 if case.dtype == "int8" else 2.0**-9)


# The kernel wants widths that are multiples of 16.
WIDER = [case if case.stored_width % 16 == 0 else case._replace(stored_width=16) for case in CASES]
SHARP = [case for case in WIDER if case.name in ("across blocks bf16", "int8 by token", "e4m3 by token", "int8 by tensor")]


@pytest.mark.parametrize("case", SHARP, ids=lambda case: case.name)
def test_agrees_with_numpy(case):
    check(case)


WIDTHS = [
    Case(f"width {w} heads {h}", ((3, 5),), width=w, stored_width=w, kv_heads=h, dtype=d)
    for w in (16, 64, 80, 96, 128, 192, 256)
    for h, d in ((1, "bfloat16"), (2, "float16"), (6, "float32"), (8, "bfloat16"))
]


@pytest.mark.kernels_full
@pytest.mark.parametrize("case", [*WIDER, *WIDTHS], ids=lambda case: case.name)
def test_agrees_with_numpy_in_full(case):
    check(case)


@pytest.mark.parametrize("target", ["sm_80", "sm_90a", "sm_100"])
@pytest.mark.parametrize("dtype", ["float64", "float8_e4m3fn", "int8"])
def test_what_it_refuses(target: str, dtype: str):
    pool = TYPICAL_WRITE.pool
    reason = mosaic_gpu.supports(WriteSpec(64, 64, 128, pool, dtype), chip(target))
    expected = {"float64": "takes pools of float32.*got float64", "int8": None}.get(
        dtype, "no float8_e4m3fn on sm_80" if target == "sm_80" else None
    )
    assert reason is None if expected is None else re.search(expected, reason or "")
    narrow = mosaic_gpu.supports(WriteSpec(64, 64, 8, pool._replace(width=8), dtype), chip(target))
    assert narrow == "takes head widths that are multiples of 16, as the pool stores them; got 8"


@pytest.mark.parametrize("shards", [1, 2])
def test_it_lowers_for_a_gpu_on_a_machine_without_one(shards: int):
    """Under a mesh, too, with the heads in shards as the engine has them."""
    pool = jax.ShapeDtypeStruct((1, 4, 2, 2, 16, 16), jnp.bfloat16)
    new, slots = jax.ShapeDtypeStruct((4, 2, 16), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32)
    op = lambda kv, k, slots: kv_write(kv, k, k, 0, slots, num_rows=2, platform="cuda")
    mesh = jax.make_mesh((shards,), ("model",), devices=jax.devices()[:shards], axis_types=(jax.sharding.AxisType.Auto,))
    heads, whole = jax.P(None, None, None, "model"), jax.P()
    call = jax.shard_map(op, mesh=mesh, in_specs=(heads, jax.P(None, "model"), whole), out_specs=heads, check_vma=False)
    text = jax.jit(call).trace(pool, new, slots).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "output_operand_alias" in text
