"""What differs between the versions of JAX that are supported, and what they need to be told."""

import contextlib

import jax
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
