"""Compiles a function for a chip of common/targets.py on a machine that has none.

report = compile_for("v5e", f, jax.ShapeDtypeStruct((8, 128), jnp.bfloat16))
assert report.temp_bytes == 0
"""

import atexit
import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax import export

from pallas_kernels.aot.targets import SETTINGS, abstract_mesh, missing
from pallas_kernels.aot.worker import Order, Report, captured_output, output_file
from pallas_kernels.common.targets import chip

KERNEL_CALLS = ("mosaic_gpu_v2", "mosaic_gpu", "tpu_custom_call", "__gpu$xla.gpu.triton", "triton_kernel_call")
ROOT = Path(__file__).parents[2]
WORKERS: dict[str, subprocess.Popen[bytes]] = {}


class CompileError(RuntimeError):
    """A compiler refused a program, in its own words."""


def compile_for(
    chip_name: str, f: Callable[..., Any], *args: Any, donate: int | Sequence[int] = (), options: dict[str, Any] | None = None
) -> Report:
    """f(*args) traced for this chip, and compiled for one device of it by a process that does nothing else. CompileError if it
    cannot be.

    args: trees of arrays or jax.ShapeDtypeStruct, of which only shapes and dtypes count; donate: which of them, as jax.jit's
    donate_argnums; options: of XLA.
    """
    reason = missing(chip_name)
    if reason is not None:
        raise ImportError(reason)
    donated = (donate,) if isinstance(donate, int) else tuple(donate)
    leaves, tree = jax.tree.flatten(args)
    owner = [i for i, arg in enumerate(args) for _ in jax.tree.leaves(arg)]
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    exported, traced = export_for(chip_name, lambda *flat: f(*jax.tree.unflatten(tree, flat)), shapes)
    order = Order(exported, tuple(i for i, arg in enumerate(owner) if arg in donated), options)
    return ask(chip_name, order, traced)


def export_for(chip_name: str, f: Callable[..., Any], shapes: Sequence[jax.ShapeDtypeStruct]) -> tuple[bytes, str]:
    """f as jax.export writes it for this chip, and what was printed meanwhile."""
    target = chip(chip_name)
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in KERNEL_CALLS]
    with tracing(target.platform), jax.sharding.use_abstract_mesh(abstract_mesh(target)), captured_output() as said:
        # keep_unused: arguments keep their numbers. f is new in every call, so that no trace for another chip is taken.
        exported = export.export(jax.jit(f, keep_unused=True), platforms=(target.platform,), disabled_checks=checks)(*shapes)
    return bytes(exported.serialize()), said[0]


@contextlib.contextmanager
def tracing(platform: str) -> Iterator[None]:
    """Kernels say what memory they ask for, and are written for the compiler of this very version."""
    flag = "jax_export_ignore_forward_compatibility"
    before, environment = getattr(jax.config, flag), dict(os.environ)
    jax.config.update(flag, True)
    os.environ.update(SETTINGS[platform])
    try:
        yield
    finally:
        jax.config.update(flag, before)
        for name in SETTINGS[platform].keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def ask(chip_name: str, order: Order, traced: str) -> Report:
    """The worker's answer; it is started when there is none."""
    worker = WORKERS.get(chip_name)
    if worker is None or worker.poll() is not None:
        worker = WORKERS[chip_name] = start(chip_name)
    assert worker.stdin is not None and worker.stdout is not None
    try:
        pickle.dump((order, traced), worker.stdin)
        worker.stdin.flush()
        answer = pickle.load(worker.stdout)
    except (EOFError, BrokenPipeError):
        code = worker.wait()
        said = output_file(worker.pid)
        last = said.read_text(encoding="utf-8", errors="replace")[-2000:] if said.exists() else ""
        said.unlink(missing_ok=True)
        close(WORKERS.pop(chip_name))
        raise CompileError(f"the compiler for {chip_name} ended its process with {code}: {last}") from None
    if isinstance(answer, str):
        close(WORKERS.pop(chip_name))  # after an error XLA:GPU can refuse the next program as well, whatever it is
        raise CompileError(answer)
    return answer


def start(chip_name: str) -> subprocess.Popen[bytes]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = SETTINGS[chip(chip_name).platform] | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", "import sys; from pallas_kernels.aot.worker import serve; serve(sys.argv[1])", chip_name]
    return subprocess.Popen(command, env=os.environ | settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def close(worker: subprocess.Popen[bytes]) -> None:
    """Ends it by the end of its input."""
    assert worker.stdin is not None and worker.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        worker.stdin.close()
    worker.wait()
    worker.stdout.close()


@atexit.register
def close_all() -> None:
    while WORKERS:
        close(WORKERS.popitem()[1])
