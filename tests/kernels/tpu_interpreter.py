"""Kernels for TPU in the interpreter of Pallas on a CPU: a copy happens when somebody waits for it, unwritten memory is NaN,
and a read outside of an array is an error."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

PLAIN = pltpu.InterpretParams()
# Each copy has a random place in the clocks. There are two by default, so that all copies would seem to be one after the other.
RACES = pltpu.InterpretParams(detect_races=True, vector_clock_size=256)
FAST = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}  # it runs once; compiling is what takes time


def races(call: Callable[[], Any], capfd: pytest.CaptureFixture) -> bool:
    """Whether the interpreter finds a race. It prints what it finds; since JAX 0.12 the call fails as well."""
    capfd.readouterr()
    try:
        call()
    except Exception as problem:
        if "RACE DETECTED" not in str(problem):
            raise
        return True
    return "RACE DETECTED" in capfd.readouterr().out


def interpreted(op: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """op(*args) as a function that gives NumPy arrays, compiled once."""
    arrays = jax.tree.map(jnp.asarray, args)
    compiled = jax.jit(op).lower(*arrays).compile(compiler_options=FAST)

    def call() -> Any:
        try:
            got = jax.tree.map(np.asarray, compiled(*arrays))
            jax.effects_barrier()
            return got
        except Exception:
            pltpu.reset_tpu_interpret_mode_state()
            raise

    return call
