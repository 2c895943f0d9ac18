"""Kernels that Numba compiles: XLA's threads share a call, and another process loads what was compiled."""

import dataclasses
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numba
import numpy as np
import pytest

from pallas_kernels import paged_decode
from pallas_kernels.common import machine_code, numba_attention, numba_ffi, numba_targets
from pallas_kernels.common.machine_code import Recipe
from pallas_kernels.common.spec import TYPICAL_DECODE
from pallas_kernels.paged_attention import numba_cpu

RECIPE = Recipe(__name__, "count_items", "make_square", ())
COUNT = 1000


@numba.njit
def count_items(frame):
    return numba_ffi.argument(frame, 0)[1][0]


def make_square():
    @numba.njit
    def square(frame, job):
        address, dims = numba_ffi.argument(frame, 0)
        x = numba_ffi.array(address, (dims[0],), np.float32)
        out = numba_ffi.array(numba_ffi.result(frame, 0)[0], (dims[0], 2), np.float32)
        turn = 0
        while True:
            item = numba_ffi.take(job)
            if item < 0:
                break
            turn += 1
            out[item, 0], out[item, 1] = x[item] * x[item], turn

    return square


def call(x: jax.Array) -> jax.Array:
    return jax.ffi.ffi_call("test_square", jax.ShapeDtypeStruct((*x.shape, 2), jnp.float32))(x)


def test_each_item_is_done_once_by_some_thread():
    numba_targets.ensure("test_square", RECIPE)
    x = np.arange(COUNT, dtype=np.float32)
    for _ in range(50):
        squares, turns = np.asarray(jax.jit(call)(x)).T
        np.testing.assert_array_equal(squares, x * x)
        # Each thread counts the items it takes from 1 on, so that each number comes at most as often as the one before.
        held = np.bincount(turns.astype(int))[1:]
        assert held.sum() == COUNT and (np.diff(held) <= 0).all()
    assert np.asarray(jax.jit(call)(np.zeros(0, np.float32))).shape == (0, 2)


def test_what_is_lowered_need_not_wait_for_its_kernel(monkeypatch: pytest.MonkeyPatch):
    """It is lowered while the kernel is compiled; XLA compiles it when the kernel is there, and not before: the control."""
    gate, make = threading.Event(), numba_targets._make

    def slow(name: str, recipe: Recipe) -> machine_code.Target:
        assert gate.wait(60)
        return make(name, recipe)

    def late(x: jax.Array) -> jax.Array:
        numba_targets.ensure("test_late", RECIPE)
        return jax.ffi.ffi_call("test_late", jax.ShapeDtypeStruct((*x.shape, 2), jnp.float32))(x)

    monkeypatch.setattr(numba_targets, "_make", slow)
    x = np.arange(COUNT, dtype=np.float32)
    with machine_code.deferring() as waits:
        lowered = jax.jit(late).lower(x)
    assert len(waits) == 1 and "test_late" not in machine_code.registered
    with pytest.raises(jax.errors.JaxRuntimeError, match="test_late"):
        lowered.compile()
    gate.set()
    waits[0]()
    np.testing.assert_array_equal(np.asarray(lowered.compile()(x))[:, 0], x * x)
    numba_targets.ensure("test_late", RECIPE)  # there already: nothing to wait for


def test_another_process_loads_what_was_compiled(tmp_path: Path):
    numba_targets.ensure("test_square", RECIPE)
    program = jax.jit(call).lower(jax.ShapeDtypeStruct((COUNT,), jnp.float32)).as_text().encode()
    targets = machine_code.targets_in(program)
    assert [target.name for target in targets] == ["test_square"] and machine_code.targets_in(b"") == []
    (tmp_path / "targets").write_bytes(pickle.dumps(targets))
    script = f"""
import pickle, sys
import jax, jax.numpy as jnp, numpy as np
from numba.core import event
from pallas_kernels.common.numba_targets import restore
with event.install_recorder("numba:compile") as compilations:
    for target in pickle.load(open({str(tmp_path / "targets")!r}, "rb")):
        restore(target)
        restore(target)
    x = jnp.arange({COUNT}, dtype=jnp.float32)
    out = jax.ffi.ffi_call("test_square", jax.ShapeDtypeStruct((*x.shape, 2), jnp.float32))(x)
np.testing.assert_array_equal(out[:, 0], x * x)
assert not compilations.buffer
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_targets_whose_functions_have_one_name_are_kept_apart(monkeypatch: pytest.MonkeyPatch):
    """Two processes begin to count, for the names that they give, at the same number; the order of flags in a name is by chance."""
    sizes = ((8, 8, 4), (16, 16, 4))
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        made = [
            numba_targets.compile_apart(
                f"test_{a[0]}", Recipe(numba_cpu.KERNEL, "item_count", "make_kernel", (*a, "float32", False))
            )
            for a in sizes
        ]
    assert made[0] is not None and made[1] is not None and made[0].calling[0] == made[1].calling[0], "the case at hand"
    for target in made:
        assert target is not None
        numba_targets.restore(target)
    rng = np.random.default_rng(0)
    for target, (width, _, block_size) in zip(made, sizes, strict=True):
        assert target is not None
        kv = rng.standard_normal((1, 5, 2, 1, block_size, width)).astype(np.float32)
        q = rng.standard_normal((1, 1, width)).astype(np.float32)
        rows = np.array([[3, 1]], np.int32), np.array([6], np.int32)
        shapes = jax.ShapeDtypeStruct(q.shape, jnp.float32), jax.ShapeDtypeStruct((1, 1), jnp.float32)
        more = (
            np.array([0, 0], np.int32),
            np.array([0.25, 0], np.float32),
            *rows,
            np.array([0, 1], np.int32),
            np.array([-np.inf], np.float32),
            np.ones(2, np.float32),
        )
        out, _ = jax.ffi.ffi_call(target.name, shapes)(q, kv, *more)
        np.testing.assert_allclose(out, paged_decode(q, kv, 0, *rows, scale=0.25, backend="xla"), rtol=0, atol=1e-5)


def test_a_process_of_its_own_compiles_what_it_can_import(monkeypatch: pytest.MonkeyPatch):
    attention = Recipe(numba_cpu.KERNEL, "item_count", "make_kernel", (8, 8, 4, "float32", False))
    target = numba_targets.compile_apart("test_attention", attention)
    assert target is not None and target.name == "test_attention"
    assert numba_targets.compile_apart("test_square", Recipe("no.such.module", "", "", ())) is None
    monkeypatch.setattr(sys, "executable", "")
    assert numba_targets.compile_apart("test_attention", attention) is None


@numba.njit
def exps(x):
    out = np.empty_like(x)
    for i in range(x.size):
        out[i] = numba_attention.exp(x[i])
    return out


def test_exp_agrees_with_float64():
    x = -np.geomspace(1e-6, 86.9, 200_000).astype(np.float32)
    want = np.exp(x.astype(np.float64))
    assert (np.abs(exps(x) - want) <= 5 * np.spacing(want.astype(np.float32))).all()


@numba.njit
def numbers(convert, bits, out):
    for i in range(bits.size):
        out[i] = convert(bits[i])


@pytest.mark.parametrize("dtype", numba_attention.DTYPES)
def test_every_number_of_8_and_16_bits_is_read_as_it_is(dtype: str):
    raw, convert = numba_attention.DTYPES[dtype]
    size = np.dtype(raw).itemsize
    bits = np.arange(1 << 16 if size > 1 else 1 << 8).astype({1: np.uint8, 2: np.uint16, 4: np.uint32}[size])
    out = np.empty(bits.size, np.float32)
    numbers(convert, bits.view(raw), out)
    np.testing.assert_array_equal(out, bits.view(jnp.dtype(dtype)).astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "least"), [("float8_e4m3fn", 2.0**-9), pytest.param("float16", 2.0**-24, marks=pytest.mark.kernels_full)]
)
def test_numbers_below_the_normal_ones_are_not_taken_for_0(dtype: str, least: float):
    """XLA's threads take subnormal numbers of f32 for 0."""
    kv = np.full((1, 2, 2, 1, 4, 8), 3 * least, np.float32).astype(dtype)
    assert 0 < kv.astype(np.float32).max() < float(jnp.finfo(dtype).smallest_normal)
    q = np.ones((1, 1, 8), np.float32)
    out = paged_decode(q, kv, 0, np.array([[1]], np.int32), np.array([3], np.int32), scale=1.0, backend="numba_cpu")
    np.testing.assert_allclose(out, 3 * least, rtol=1e-6)


def test_with_64_bit_numbers_enabled_it_is_the_same():
    """Where JAX's own arrays are float64 unless told otherwise."""
    q, kv = np.ones((1, 2, 8), np.float32), np.random.default_rng(0).standard_normal((1, 2, 2, 1, 4, 8)).astype(np.float32)
    call = lambda: np.asarray(
        paged_decode(q, kv, 0, np.array([[1]], np.int32), np.array([3], np.int32), scale=1.0, backend="numba_cpu")
    )
    want = call()
    with jax.enable_x64(True):
        np.testing.assert_array_equal(call(), want)


def test_other_dtypes_are_refused():
    assert numba_cpu.supports(dataclasses.replace(TYPICAL_DECODE, dtype="float8_e5m2"), None) == (
        "takes pools of float32, bfloat16, float16, int8, float8_e4m3fn; got float8_e5m2"
    )


def test_without_numba_the_call_is_refused(monkeypatch: pytest.MonkeyPatch):
    assert numba_cpu.supports(TYPICAL_DECODE, None) is None
    monkeypatch.setattr(numba_cpu.importlib.util, "find_spec", lambda name: None)
    assert numba_cpu.supports(TYPICAL_DECODE, None) == "needs Numba, which is not installed"
