"""Every shape is compiled once, ahead of time, from abstract values. Nothing is compiled after that."""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pagedjax.buckets import Bucket
from pagedjax.device.blocks import read_block, write_block
from pagedjax.device.lanes import set_lane, set_mask
from pagedjax.device.programs import load_program, program_file, save_program
from pagedjax.device.sharding import block_in_host_memory, block_on_device, replicated, state_shardings
from pagedjax.device.step import StepSpec, run_step
from pagedjax.errors import UserError, check
from pagedjax.state import DeviceState, StepInput, StepOutput
from pagedjax.wire import lane_fields, size, split, step_fields
from pallas_kernels.common.machine_code import deferring

AHEAD = 2  # programs that are lowered, beside those that are compiled
Lower = partial[jax.stages.Lowered]  # one of the functions below and its arguments, which are all that the program depends on


@dataclass(frozen=True)
class Compiled:
    """An executable and what it cost."""

    call: Callable[..., Any]
    seconds: float
    temp_bytes: int
    alias_bytes: int


def open_compile_cache(folder: str, platform: str) -> None:
    """Makes the folder where compiled programs are kept; "" for none. UserError where nothing can be written there. On other
    platforms than CPU it becomes that of JAX's persistent cache, for every compilation however short (see programs.py)."""
    if folder:
        path = os.path.expanduser(folder)
        try:
            os.makedirs(path, mode=0o700, exist_ok=True)  # what is loaded from there is run
        except OSError as error:
            raise UserError(
                f"compile_cache must be a folder that can be made and written; got {folder} ({error.strerror})"
            ) from error
        check(os.access(path, os.W_OK | os.X_OK), f"compile_cache must be a folder that can be written; got {folder}")
        if platform != "cpu":
            jax.config.update("jax_compilation_cache_dir", path)
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
            jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def lower_step(spec: StepSpec, bucket: Bucket, params: Any, state: DeviceState, table_width: int) -> jax.stages.Lowered:
    """The step for one bucket. `params` and `state` may be abstract; state is donated, so that the pool is written in place."""
    fields = step_fields(bucket, spec.cfg.layer_groups.count, table_width)

    def step(params: Any, state: DeviceState, buffer: jax.Array) -> tuple[DeviceState, StepOutput]:
        return run_step(params, state, StepInput(**split(buffer, fields)), spec)

    shardings = state_shardings(state, spec.mesh)
    everywhere = replicated(spec.mesh)
    param_shardings = jax.tree.map(lambda p: p.sharding, params)
    jitted = jax.jit(
        step, donate_argnums=1, in_shardings=(param_shardings, shardings, everywhere), out_shardings=(shardings, everywhere)
    )
    return jitted.lower(params, state, jax.ShapeDtypeStruct((size(fields),), jnp.int32))


def lower_zero_state(state: DeviceState) -> jax.stages.Lowered:
    """() -> the state before the first step. Zeros, not undefined memory: what a masked slot holds must be finite."""
    shardings = jax.tree.map(lambda s: s.sharding, state)
    return jax.jit(lambda: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), state), out_shardings=shardings).lower()


def lower_set_lane(spec: StepSpec, state: DeviceState, max_model_len: int, vocab: int) -> jax.stages.Lowered:
    shardings, everywhere = state_shardings(state, spec.mesh), replicated(spec.mesh)
    write = partial(set_lane, max_model_len=max_model_len, vocab=vocab)
    jitted = jax.jit(write, donate_argnums=0, in_shardings=(shardings, everywhere, everywhere), out_shardings=shardings)
    fields = lane_fields(max_model_len, vocab)
    return jitted.lower(state, jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((size(fields),), jnp.int32))


def lower_set_mask(spec: StepSpec, state: DeviceState) -> jax.stages.Lowered:
    shardings, everywhere = state_shardings(state, spec.mesh), replicated(spec.mesh)
    jitted = jax.jit(set_mask, donate_argnums=0, in_shardings=(shardings, everywhere, everywhere), out_shardings=shardings)
    words = state.lanes.mask.shape[1]
    return jitted.lower(state, jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((words,), jnp.uint32))


def lower_read_block(state: DeviceState, mesh: Mesh) -> jax.stages.Lowered:
    """(pool, i32[1]) -> the block in host memory."""
    pool = state_shardings(state, mesh).kv
    jitted = jax.jit(read_block, in_shardings=(pool, replicated(mesh)), out_shardings=block_in_host_memory(mesh))
    return jitted.lower(state.kv, jax.ShapeDtypeStruct((1,), jnp.int32))


def lower_write_block(state: DeviceState, mesh: Mesh) -> jax.stages.Lowered:
    """(pool, i32[1], a block in host memory) -> the pool; it is donated."""
    pool, host = state_shardings(state, mesh).kv, block_in_host_memory(mesh)
    write = partial(write_block, on_device=block_on_device(mesh))
    jitted = jax.jit(write, donate_argnums=0, in_shardings=(pool, replicated(mesh), host), out_shardings=pool)
    data = jax.tree.map(lambda a: jax.ShapeDtypeStruct((a.shape[0], *a.shape[2:]), a.dtype, sharding=host), state.kv)
    return jitted.lower(state.kv, jax.ShapeDtypeStruct((1,), jnp.int32), data)


def compiler_options(platform: str) -> dict[str, Any]:
    """On CPU LLVM's level 1: half the time to compile of the default 3, and steps that are as fast (docs/benchmarks.md)."""
    return {"xla_backend_optimization_level": 1} if platform == "cpu" else {}


def compile_all(
    programs: Iterable[tuple[Any, Lower]],
    mesh: Mesh,
    folder: str,
    progress: Callable[[Any, Compiled], None] = lambda *_: None,
) -> dict[Any, Compiled]:
    """{key: Compiled} for the devices of `mesh`. A program that is kept in `folder` is loaded; the others are lowered one
    after the other (tracing is Python) and compiled in max(1, cores / 4) threads."""
    options = compiler_options(mesh.devices.flat[0].platform)

    def finish(key: Any, executable: jax.stages.Compiled, start: float) -> Compiled:
        memory = executable.memory_analysis()
        done = Compiled(
            call=executable,
            seconds=time.perf_counter() - start,
            temp_bytes=memory.temp_size_in_bytes if memory else 0,
            alias_bytes=memory.alias_size_in_bytes if memory else 0,
        )
        progress(key, done)
        return done

    def compile_lowered(key: Any, lowered: jax.stages.Lowered, file: Path | None, lowering_seconds: float) -> Compiled:
        for wait in tuple(waits):
            wait()
        start, known = time.perf_counter() - lowering_seconds, _counter.cached
        executable = lowered.compile(compiler_options=options)
        if file is not None and _counter.cached == known:  # saved again, what is from JAX's cache would lack its functions
            save_program(file, executable)
        return finish(key, executable, start)

    compiled: dict[Any, Compiled | Future[Compiled]] = {}
    pending: deque[Future[Compiled]] = deque()
    # Programs are lowered while their kernels are compiled, a few ahead: each takes some MiB until it is compiled.
    workers = max(1, (os.cpu_count() or 1) // 4)
    with deferring() as waits, ThreadPoolExecutor(workers) as threads:
        for key, lower in programs:
            start = time.perf_counter()
            file = program_file(folder, lower, options, mesh)
            kept = None if file is None else load_program(file, mesh)
            if kept is not None:
                compiled[key] = finish(key, kept, start)
            else:
                if len(pending) == workers + AHEAD:
                    pending.popleft().result()
                    start = time.perf_counter()
                pending.append(threads.submit(compile_lowered, key, lower(), file, time.perf_counter() - start))
                compiled[key] = pending[-1]
        return {key: c.result() if isinstance(c, Future) else c for key, c in compiled.items()}


def all_kept(programs: Iterable[tuple[Any, Lower]], mesh: Mesh, folder: str) -> bool:
    """Whether none of them has to be compiled."""
    options = compiler_options(mesh.devices.flat[0].platform)
    files = [program_file(folder, lower, options, mesh) for _, lower in programs]
    return all(file is not None and file.exists() for file in files)


class _Counter(threading.local):
    compilations = 0
    cached = 0  # of these, taken from JAX's persistent cache


_counter = _Counter()


def compilations_of_this_thread() -> int:
    """Programs that XLA compiled (or took from the persistent cache) in the calling thread since it started."""
    return _counter.compilations


def _on_event(event: str, *_: Any, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _counter.compilations += 1


def _on_cache_hit(event: str, **__: Any) -> None:
    if event == "/jax/compilation_cache/cache_hits":
        _counter.cached += 1


jax.monitoring.register_event_listener(_on_cache_hit)
jax.monitoring.register_event_duration_secs_listener(_on_event)
