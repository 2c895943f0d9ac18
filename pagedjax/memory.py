"""How large the KV pool is: its shape, and how many blocks the device has room for."""

import math
import os
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from pagedjax.config import EngineConfig, ModelConfig
from pagedjax.errors import check

CPU_LIMIT = 4 << 30


def kv_dtype(config: EngineConfig) -> np.dtype:
    return jnp.dtype(config.dtype if config.cache.kv_dtype == "auto" else config.cache.kv_dtype)


def pool_shape(config: EngineConfig, model: ModelConfig, platform: str, num_blocks: int) -> tuple[int, ...]:
    """[J, N, 2, K, P, D']. On TPU the head width is stored in whole lanes of 128."""
    width = -(-model.head_width // 128) * 128 if platform == "tpu" else model.head_width
    return (model.num_layers, num_blocks, 2, model.num_kv_heads, config.cache.block_size, width)


def pool_blocks(config: EngineConfig, model: ModelConfig, mesh: Mesh, *, temp_bytes: Callable[[], int]) -> int:
    """N. kv_memory counts the whole pool, over all devices; 0 means: what is left of each device after the weights, the
    largest temporary of a step (`temp_bytes`, asked only then) and 10 %; on CPU a quarter of the free memory, at most 4 GiB.
    Never more than all lanes at full length could use."""
    device = mesh.devices.flat[0]
    per_block = math.prod(pool_shape(config, model, device.platform, 1)) * kv_dtype(config).itemsize
    schedule = config.schedule
    blocks_per_row = -(-schedule.max_model_len // config.cache.block_size)
    most = schedule.max_num_seqs * blocks_per_row + 1
    budget = config.cache.kv_memory or _free_bytes(device, mesh.size, temp_bytes)
    blocks = min(budget // per_block, most)
    check(
        blocks >= 2,
        f"kv_memory must hold at least 2 blocks (one is scrap) of {per_block} bytes; got {budget} bytes",
    )
    return blocks


def _free_bytes(device: Any, num_devices: int, temp_bytes: Callable[[], int]) -> int:
    if device.platform == "cpu":
        return min(CPU_LIMIT, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    stats = device.memory_stats() or {}
    limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
    return int(max(0, limit * 0.9 - used - temp_bytes()) * num_devices)
