"""What differs between the versions of JAX that are supported, and what they need to be told."""

import contextlib
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, get_abstract_mesh, use_abstract_mesh

from pallas_kernels.common.targets import Chip


def traced_for(chip: Chip) -> contextlib.AbstractContextManager:
    """In here, kernels are traced for this chip where JAX knows no device of its kind: Pallas asks for one while it lowers, and
    an equation keeps the mesh that it was traced under."""
    mesh = get_abstract_mesh()
    platform = "gpu" if chip.platform == "cuda" else chip.platform
    if mesh.abstract_device is not None or jax.default_backend() == platform:
        return contextlib.nullcontext()
    device = AbstractDevice(device_kind=chip.kinds[0], num_cores=chip.cores, platform=platform)
    return use_abstract_mesh(mesh.update(abstract_device=device))


def save(ref: Any, x: jax.Array) -> None:
    """ref[...] = x in a Mosaic GPU kernel, for registers that do not lie so that whole cache lines are written at once: JAX 0.12
    must be told, and before it there was nothing to tell."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x
