"""Calls for tuners and benchmarks: numbers that look random, every block used once."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.workload import Attention, Write, fill


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
    out = jax.eval_shape(load.function(None), *load.shapes())
    assert jax.tree.leaves(out)[0].shape == load.shapes()[0 if load.op == "kv_write" else 1].shape
    assert load.spec.dtype == load.dtype and load.spec.tokens == 3 * load.new
    assert dataclasses.replace(load, rows=4).name != load.name
