"""The mesh, and how the pool and the lanes are laid out on it. Weights have their own specs (device/params.py)."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pagedjax.errors import check
from pagedjax.state import DeviceState

HOST_MEMORY = "pinned_host"
POOL = P(None, None, None, "model")  # kv heads; of the scales too
BLOCK = P(None, None, "model")  # of the pool


def make_mesh(model: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes `data` (1) and `model`. Axes are Auto on purpose: XLA propagates shardings between the specs."""
    devices = jax.devices() if devices is None else list(devices)
    check(len(devices) >= model, f"the model axis needs {model} devices; {len(devices)} are here")
    return Mesh(np.asarray(devices[:model]).reshape(1, model), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def by_vocab(mesh: Mesh) -> NamedSharding:
    """Of logits [S, V]."""
    return NamedSharding(mesh, P(None, "model"))


def block_on_device(mesh: Mesh) -> NamedSharding:
    """Of one block of the pool, [J, 2, K, P, D'], and of its scales."""
    return NamedSharding(mesh, BLOCK)


def block_in_host_memory(mesh: Mesh) -> NamedSharding:
    """The same in host memory, each shard's part by itself. UserError where the devices cannot reach any."""
    device = mesh.devices.flat[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    check(
        HOST_MEMORY in kinds,
        f"swap_memory must be 0 on devices without {HOST_MEMORY} memory; {device.device_kind} has {', '.join(kinds)}",
    )
    return NamedSharding(mesh, BLOCK, memory_kind=HOST_MEMORY)


def state_shardings(state: DeviceState, mesh: Mesh) -> DeviceState:
    """The tree of shardings of a DeviceState (abstract or not)."""
    lanes = jax.tree.map(lambda _: replicated(mesh), state.lanes)
    return DeviceState(kv=jax.tree.map(lambda _: NamedSharding(mesh, POOL), state.kv), lanes=lanes)
