"""Kernels that Numba compiles, as what XLA calls by a name: compiled apart, or by an earlier process."""

import ctypes
import pickle
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import llvmlite.binding as llvm
from numba.core.registry import cpu_target
from numba.core.runtime.nrt import rtsys

from pallas_kernels.common.machine_code import Recipe, Target, registered, wait
from pallas_kernels.common.numba_ffi import compile_target, joining_symbol

# The package without its own imports: JAX takes seconds, and kernels for Numba do not need it.
CHILD = """
import pickle, sys, types
sys.path[:] = sys.argv[2:]
package = types.ModuleType("pallas_kernels")
package.__path__ = [sys.argv[1]]
sys.modules["pallas_kernels"] = package
from pallas_kernels.common.numba_ffi import compile_target
pickle.dump(compile_target(*pickle.load(sys.stdin.buffer)), sys.stdout.buffer)
"""

_threads = ThreadPoolExecutor(1, "kernels")
_made: dict[str, Future[Target]] = {}  # by name of the target
_code: list[Any] = []  # of the targets; it must not go
_lock = threading.Lock()


def ensure(name: str, recipe: Recipe) -> None:
    """XLA can call the kernel by this name when it compiles (`machine_code.wait`). The first time it is compiled, which takes
    seconds, in another thread."""

    def register() -> None:
        target = made.result()
        with _lock:
            if name not in registered:
                _register(target)

    with _lock:
        if name in registered:
            return
        made = _made.get(name) or _made.setdefault(name, _threads.submit(_make, name, recipe))
    wait(register)


def _make(name: str, recipe: Recipe) -> Target:
    return compile_apart(name, recipe) or compile_target(name, recipe)


def compile_apart(name: str, recipe: Recipe) -> Target | None:
    """What compile_target gives, by a process of its own: Numba and LLVM keep some hundred MiB of what they used. None where no
    such process can do it, as in a program that is no Python."""
    command = [sys.executable or "", "-c", CHILD, str(Path(__file__).parents[1]), *sys.path]
    try:
        done = subprocess.run(command, input=pickle.dumps((name, recipe)), capture_output=True, check=False)
    except OSError:
        return None
    return pickle.loads(done.stdout) if done.returncode == 0 else None


def restore(target: Target) -> None:
    """As `ensure`, with what another process compiled on the same kind of processor with the same Numba."""
    with _lock:
        if target.name not in registered:
            _register(target)


def _register(target: Target) -> None:
    rtsys.initialize(cpu_target.target_context)
    llvm.add_symbol(joining_symbol(target.name), _load(target.joining))
    address = ctypes.c_void_p(_load(target.calling))
    jax.ffi.register_ffi_target(target.name, jax.ffi.pycapsule(address), platform="cpu")
    registered[target.name] = target


def _load(function: tuple[str, bytes]) -> int:
    """The address of a function that Numba compiled. Each gets a linker of its own: the kernels of two targets may have one name,
    and a linker that knew both would take the first."""
    entry, code = function
    linker = llvm.create_mcjit_compiler(llvm.parse_assembly(""), llvm.Target.from_default_triple().create_target_machine())
    linker.add_object_file(llvm.ObjectFileRef.from_data(code))
    linker.finalize_object()
    _code.append(linker)
    return linker.get_function_address(entry)
