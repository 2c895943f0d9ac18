"""Every shape is compiled once, ahead of time, from abstract values. Nothing is compiled after that."""

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pagedjax.buckets import Bucket
from pagedjax.device.blocks import read_block, write_block
from pagedjax.device.lanes import set_lane, set_mask
from pagedjax.device.sharding import block_in_host_memory, block_on_device, replicated, state_shardings
from pagedjax.device.step import StepSpec, run_step
from pagedjax.errors import UserError, check
from pagedjax.state import DeviceState, StepInput, StepOutput
from pagedjax.wire import lane_fields, size, split, step_fields


@dataclass(frozen=True)
class Compiled:
    """An executable and what it cost."""

    call: Callable[..., Any]
    seconds: float
    temp_bytes: int
    alias_bytes: int


def set_compile_cache(folder: str) -> None:
    """Turns on JAX's persistent compilation cache in `folder`, for every compilation however short; "" leaves it off. UserError
    where nothing can be written there."""
    if folder:
        path = os.path.expanduser(folder)
        try:
            os.makedirs(path, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"compile_cache must be a folder that can be made and written; got {folder} ({error.strerror})"
            ) from error
        check(os.access(path, os.W_OK | os.X_OK), f"compile_cache must be a folder that can be written; got {folder}")
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
    data = jax.ShapeDtypeStruct((state.kv.shape[0], *state.kv.shape[2:]), state.kv.dtype, sharding=host)
    return jitted.lower(state.kv, jax.ShapeDtypeStruct((1,), jnp.int32), data)


def compiler_options(platform: str) -> dict[str, Any]:
    """On CPU LLVM's level 1: half the time to compile of the default 3, and steps that are as fast (docs/benchmarks.md)."""
    return {"xla_backend_optimization_level": 1} if platform == "cpu" else {}


def compile_all(
    lowerings: Iterable[tuple[Any, Callable[[], jax.stages.Lowered]]],
    options: dict[str, Any],
    progress: Callable[[Any, "Compiled"], None] = lambda *_: None,
) -> dict[Any, Compiled]:
    """{key: Compiled}, with `options` for XLA. Lowering is serial (tracing is Python), compilation runs in max(1, cores / 4)
    threads."""

    def finish(key: Any, lowered: jax.stages.Lowered, lowering_seconds: float) -> tuple[Any, Compiled]:
        start = time.perf_counter()
        executable = lowered.compile(compiler_options=options)
        memory = executable.memory_analysis()
        done = Compiled(
            call=executable,
            seconds=lowering_seconds + time.perf_counter() - start,
            temp_bytes=memory.temp_size_in_bytes if memory else 0,
            alias_bytes=memory.alias_size_in_bytes if memory else 0,
        )
        progress(key, done)
        return key, done

    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 4)) as threads:
        pending = []
        for key, lower in lowerings:
            start = time.perf_counter()
            lowered = lower()
            pending.append(threads.submit(finish, key, lowered, time.perf_counter() - start))
        compiled = dict(p.result() for p in pending)
    return compiled


class _Counter(threading.local):
    compilations = 0


_counter = _Counter()


def compilations_of_this_thread() -> int:
    """Programs that XLA compiled (or took from the persistent cache) in the calling thread since it started."""
    return _counter.compilations


def _on_event(event: str, *_: Any, **__: Any) -> None:
    if event == "/jax/core/compile/backend_compile_duration":
        _counter.compilations += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)
