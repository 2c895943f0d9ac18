"""How large the KV pool is: its shape, and how many blocks the device has room for."""

import ctypes
import gc
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.errors import check
from pagedjax.state import Pool, QuantizedPool
from pallas_kernels.common.quantized import is_quantized

CPU_LIMIT = 4 << 30
SCALE_BYTES = 4


def kv_dtype(config: EngineConfig) -> np.dtype:
    return jnp.dtype(config.dtype if config.cache.kv_dtype == "auto" else config.cache.kv_dtype)


def pool_shape(config: EngineConfig, model: ModelConfig, platform: str, num_blocks: int) -> tuple[int, ...]:
    """[J, N, 2, K, P, D'], J the layers of a group; scales have all but the last. On TPU the head width is stored in whole lanes
    of 128."""
    width = -(-model.head_width // 128) * 128 if platform == "tpu" else model.head_width
    return (model.layer_groups.size, num_blocks, 2, model.num_kv_heads, config.cache.block_size, width)


def block_bytes(config: EngineConfig, model: ModelConfig, platform: str) -> int:
    """Of one block of the pool, all layers, over all devices."""
    *tokens, width = pool_shape(config, model, platform, 1)
    dtype = kv_dtype(config)
    return math.prod(tokens) * (width * dtype.itemsize + (SCALE_BYTES if is_quantized(dtype) else 0))


def abstract_pool(config: EngineConfig, model: ModelConfig, platform: str, num_blocks: int) -> Pool:
    """Shapes and dtypes of the pool."""
    dtype = kv_dtype(config)
    shape = pool_shape(config, model, platform, num_blocks)
    data: Any = jax.ShapeDtypeStruct(shape, dtype)
    scales: Any = jax.ShapeDtypeStruct(shape[:-1], jnp.float32)
    return QuantizedPool(data, scales) if is_quantized(dtype) else data


def swap_places(config: EngineConfig, model: ModelConfig, platform: str) -> int:
    """Blocks that host memory has places for; 0: there is none."""
    each, budget = block_bytes(config, model, platform), config.cache.swap_memory
    check(budget == 0 or budget >= each, f"swap_memory must be 0 or hold at least one block of {each} bytes; got {budget} bytes")
    return budget // each


def pool_blocks(config: EngineConfig, model: ModelConfig, mesh: Mesh, *, to_load: int, temp_bytes: Callable[[], int]) -> int:
    """N. kv_memory counts the whole pool, over all devices; 0 means: what is left of each device after the weights (those that are
    not there yet have `to_load` bytes, over all devices), the largest temporary of a step (`temp_bytes`, asked only then) and 10 %;
    on CPU a quarter of what will be available, at most 4 GiB. Never more than all lanes at full length could use. What follows
    from free memory is rounded down: N is part of the compiled shapes, and a start with a little less memory must find the
    programs of the one before in the cache."""
    device = mesh.devices.flat[0]
    per_block = block_bytes(config, model, device.platform)
    schedule = config.schedule
    blocks_per_row = -(-schedule.max_model_len // config.cache.block_size)
    most = schedule.max_num_seqs * blocks_per_row * model.layer_groups.count + 1
    on_cpu = device.platform == "cpu"
    if config.cache.kv_memory:
        budget = config.cache.kv_memory
        blocks = min(budget // per_block, most)
    elif on_cpu:
        budget = max(0, available_memory() - to_load) // 4
        blocks = rounded_down(budget // per_block, min(most, CPU_LIMIT // per_block), parts=2)
    else:
        budget = max(0, _free_bytes(device, mesh.size, temp_bytes) - to_load)
        blocks = rounded_down(budget // per_block, most, parts=16)
    check(
        blocks >= 2,
        f"kv_memory must hold at least 2 blocks (one is scrap) of {per_block} bytes; got {budget} bytes",
    )
    return blocks


def rounded_down(count: int, most: int, *, parts: int) -> int:
    """`most` where count reaches it, else the next lower of 2^k * (1 + i / parts), i < parts; `parts` is a power of two. Two
    parts: 2, 3, 4, 6, 8, 12, …, at most a third lost; 16: at most 6 %."""
    if count >= most:
        return most
    step = max(1, (1 << max(0, count.bit_length() - 1)) // parts)
    return count // step * step


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of main memory that can be had without swapping: MemAvailable of Linux; half of what is built in elsewhere."""
    if meminfo.exists():
        found = re.search(r"^MemAvailable:\s*(\d+) kB$", meminfo.read_text(), re.MULTILINE)
        if found:
            return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _free_bytes(device: Any, num_devices: int, temp_bytes: Callable[[], int]) -> int:
    stats = device.memory_stats() or {}
    limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    return int(max(0, limit * 0.9 - used - temp_bytes()) * num_devices)


def release_freed() -> None:
    """Gives back to the system what the C library keeps of freed memory: after compiling, some hundred MiB. Does nothing where
    the C library has no malloc_trim (glibc has)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
