"""compile_for: what it says of a program is the compiler's own, for the chip that was asked for."""

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.aot import compile as aot
from pallas_kernels.aot.compile import CompileError, ask, compile_for
from pallas_kernels.aot.targets import DESCRIPTIONS, TOPOLOGIES, missing
from pallas_kernels.aot.worker import Order, captured_output, output_file
from pallas_kernels.common.targets import CHIPS, chip_for

BIG = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
TPU = [pytest.mark.aot_tpu, pytest.mark.skipif(missing("v5e") is not None, reason=str(missing("v5e")))]
GPU = [pytest.mark.aot_gpu, pytest.mark.skipif(missing("sm_90a") is not None, reason=str(missing("sm_90a")))]
EVERYWHERE = [pytest.param(c.name, marks=TPU if c.platform == "tpu" else GPU) for c in CHIPS]


def test_every_chip_of_the_table_can_be_compiled_for():
    assert TOPOLOGIES.keys() | DESCRIPTIONS.keys() == {c.name for c in CHIPS}


def test_output_of_other_languages_is_caught(capfd: pytest.CaptureFixture[str]):
    with captured_output() as said:
        subprocess.run([sys.executable, "-c", "import os; os.write(1, b'one'); os.write(2, b'two')"], check=True)
        os.write(2, b"three")
    assert said == ["onetwothree"]
    os.write(1, b"after")
    assert capfd.readouterr() == ("after", "")
    assert not output_file(os.getpid()).exists()


def test_a_compiler_that_ends_its_process_is_an_error(monkeypatch: pytest.MonkeyPatch):
    path = str(output_file(0)).replace("0", "%d")

    def start(chip: str) -> subprocess.Popen[bytes]:
        code = "import os, sys; open(sys.argv[1] % os.getpid(), 'w').write('no such op'); sys.exit(7)"
        return subprocess.Popen([sys.executable, "-c", code, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    monkeypatch.setattr(aot, "start", start)
    with pytest.raises(CompileError, match="the compiler for sm_90a ended its process with 7: no such op"):
        ask("sm_90a", Order(b"", (), None), "")
    assert "sm_90a" not in aot.WORKERS


def test_what_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert missing("v5e") == "compiles ahead of time: needs flatbuffers (make aot)"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "flatbuffers" or None)
    with pytest.raises(ImportError, match="needs libtpu"):
        compile_for("v6e", jnp.sin, BIG)
    with pytest.raises(ImportError, match="needs jax-cuda13-plugin"):
        compile_for("sm_100", jnp.sin, BIG)


@pytest.mark.parametrize("chip", EVERYWHERE)
def test_a_trace_is_for_the_chip_and_donated_memory_is_an_alias(chip: str):
    seen = []

    def f(unused, tree):
        seen.extend(c.name for p in ("tpu", "cuda") if (c := chip_for(p)) is not None)
        return tree["x"].at[0].set(1)

    report = compile_for(chip, f, BIG, {"x": BIG}, donate=1)
    assert chip in seen and report.chip == chip
    assert report.alias_bytes == 4 << 20 and report.temp_bytes < 1 << 20 and report.seconds > 0
    assert compile_for(chip, f, BIG, {"x": BIG}).alias_bytes == 0  # the control


@pytest.mark.parametrize("rows", [256, 512])
@pytest.mark.parametrize("chip", [pytest.param("v5e", marks=TPU)])
def test_vmem_is_what_a_kernel_asks_for(chip: str, rows: int):
    def kernel(x_ref, o_ref, buffer, sem):
        copy = pltpu.make_async_copy(x_ref.at[pl.ds(0, rows)], buffer, sem)
        copy.start()
        copy.wait()
        o_ref[...] = buffer[:8]

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 1024), jnp.float32),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM((rows, 1024), jnp.float32), pltpu.SemaphoreType.DMA],
    )
    vmem = compile_for(chip, call, BIG).vmem_bytes
    assert vmem is not None and 0 <= vmem - rows * 4096 < 1 << 20


def add_one(x: jax.Array, copies: int, hopper: bool) -> jax.Array:
    """A Mosaic GPU kernel with so many arrays in shared memory, for every chip or (barriers of TMA) for Hopper and newer."""

    def body(x_ref, o_ref, *smem):
        if hopper:
            plgpu.set_max_registers(232, action="increase")
        for array in smem:
            array[...] = x_ref[...] + 1
        o_ref[...] = smem[-1][...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return plgpu.kernel(body, out_type=shape, scratch_types=[plgpu.SMEM((256,), jnp.float32)] * copies)(x)


@pytest.mark.parametrize("chip", [pytest.param(name, marks=GPU) for name in DESCRIPTIONS])
def test_kernels_for_gpu_tell_registers_spills_and_shared_memory(chip: str):
    x = jax.ShapeDtypeStruct((256,), jnp.float32)
    few = compile_for(chip, lambda x: add_one(x, 1, False), x)
    assert few.shared_bytes == 1024 and few.spill_bytes == 0 and few.registers is not None and 0 < few.registers < 100
    assert compile_for(chip, lambda x: add_one(x, 3, False), x).shared_bytes == 3072


@pytest.mark.parametrize("chip", [pytest.param("sm_80", marks=GPU)])
def test_a_kernel_for_another_chip_is_refused(chip: str):
    """Also when the same kernel has been compiled for the right one: nothing is taken over from there."""
    x = jax.ShapeDtypeStruct((256,), jnp.float32)
    assert compile_for("sm_90a", lambda x: add_one(x, 1, True), x).spill_bytes == 0
    with pytest.raises(CompileError):
        compile_for(chip, lambda x: add_one(x, 1, True), x)
    assert chip not in aot.WORKERS and "sm_90a" in aot.WORKERS
    assert compile_for(chip, lambda x: add_one(x, 1, False), x).spill_bytes == 0  # by a new process
