"""Calls for tuners and benchmarks: numbers that look random, every block used once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.workload import Attention, Write, fill
from pallas_kernels.workload_matmul import Grouped, Quantized


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_numbers_have_no_pattern(dtype: str):
    x = np.asarray(fill(jax.ShapeDtypeStruct((3, 4, 64, 32), jnp.dtype(dtype)), 0), np.float32)
    top = 128 if dtype == "int8" else 2
    assert np.abs(x).max() <= top and abs(x.mean()) < 0.03 * top
    assert np.abs(x).mean() == pytest.approx(top / 2, rel=0.05)
    for axis in range(4):  # neighbours have nothing in common
        a, b = (np.take(x, range(i, x.shape[axis] - 1 + i), axis).ravel() for i in (0, 1))
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.05
    again = np.asarray(fill(jax.ShapeDtypeStruct((3, 4, 64, 32), jnp.dtype(dtype)), 1), np.float32)
    assert abs(np.corrcoef(x.ravel(), again.ravel())[0, 1]) < 0.05


@pytest.mark.parametrize(
    "load",
    [
        Attention(3, 50, block_size=16, width=16, kv_heads=2),
        Attention(3, 50, block_size=16, width=16, kv_heads=2, new=5, dtype="int8", scales="token"),
        Attention(3, 50, block_size=16, width=16, kv_heads=2, ragged=True, dtype="int8", scales="tensor"),
        Write(3, 50, block_size=16, width=16, kv_heads=2, new=5, dtype="float8_e4m3fn", scales="token"),
    ],
    ids=lambda load: f"{load.op} {load.name}",
)
def test_arguments_are_what_shapes_say(load):
    args = load.arguments()
    assert [(x.shape, x.dtype) for x in args] == [(x.shape, x.dtype) for x in load.shapes()]
    assert sorted(load.tables().ravel()) == list(range(1, 13))
    if load.op == "kv_write":
        slots = np.asarray(args[3]).reshape(3, 5)
        place = np.arange(45, 50)
        np.testing.assert_array_equal(slots, load.tables()[:, place // 16] * 16 + place % 16)
    out = jax.eval_shape(load.function("xla_tokens" if load.op == "kv_write" else "xla"), *load.shapes())
    assert jax.tree.leaves(out)[0].shape == load.shapes()[0 if load.op == "kv_write" else 1].shape
    assert load.spec.dtype == load.dtype and load.spec.tokens == 3 * load.new
    assert dataclasses.replace(load, rows=4).name != load.name


@pytest.mark.parametrize(
    ("load", "floor"),
    [
        (Quantized(3, 100, 40), 2 * 3 * 140 + 40 * 100 + 4 * 40),
        (Quantized(3, 100, 40, "float32", int8_activations=True), 4 * 3 * 140 + 40 * 100 + 4 * 40),
        (Quantized(3, 100, 40, group=32, zeros=True), 2 * 3 * 140 + 40 * 64 + 2 * 2 * 40 * (4 + 1)),
        (Grouped(2, 100, 40, experts=1), 2 * 2 * 140 + 2 * 100 * 40 + 4),
    ],
    ids=lambda x: getattr(x, "name", str(x)),
)
def test_products(load, floor: int):
    assert load.bytes_floor == floor and load.flops == 2 * load.tokens * 100 * 40
    args = load.arguments()
    assert jax.tree.map(lambda x: (x.shape, x.dtype), args) == jax.tree.map(lambda x: (x.shape, x.dtype), load.shapes())
    got = jax.jit(load.function(None))(*args)
    assert got.shape == (load.tokens, 40) and got.dtype == load.dtype and np.isfinite(np.asarray(got, np.float32)).all()
    assert load.spec.tokens == load.tokens == load.key.size
    assert dataclasses.replace(load, inputs=101).name != load.name


def test_tokens_of_experts_are_counted_and_experts_without_any_cost_nothing():
    load = Grouped(5, 16, 8, experts=64)
    used = int((load.sizes() > 0).sum())
    assert load.sizes().sum() == 5 and 1 < used <= 5
    assert load.bytes_floor == 2 * 5 * 24 + used * 2 * 16 * 8 + 4 * 64
