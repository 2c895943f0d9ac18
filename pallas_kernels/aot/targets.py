"""Devices that are not there, to compile for: TPU through libtpu's topologies (extra `aot-tpu`), GPU through XLA's descriptions of
targets (extra `aot-gpu`).

Sets environment variables of libtpu and Mosaic GPU, which have no other switch. Nothing of the engine imports this package.
"""

import functools
import importlib.metadata
import importlib.util
import os
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.common.targets import Chip, chip

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}  # the chips of one host
DESCRIPTIONS = {"sm_80": "a100.txtpb", "sm_90a": "h200.txtpb", "sm_100": "b200.txtpb"}
SETTINGS = {
    "tpu": {
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # it takes a lock otherwise, as if there were a TPU
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # for every topology
    },
    "cuda": {"MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_RESOURCES": "1"},
}


def missing(chip_name: str) -> str | None:
    """What must be installed before anything can be compiled for this chip, or None."""
    if importlib.util.find_spec("flatbuffers") is None:
        return "compiles ahead of time: needs flatbuffers (make aot)"
    if chip(chip_name).platform == "tpu":
        return None if importlib.util.find_spec("libtpu") else "compiles for TPU: needs libtpu (make aot)"
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "compiles for GPU: needs jax-cuda13-plugin and ptxas (make aot)"
    version = importlib.metadata.version("jax-cuda13-plugin")
    return None if version == jax.__version__ else f"compiles for GPU: jax-cuda13-plugin must be {jax.__version__}; got {version}"


@functools.cache
def devices_for(chip_name: str) -> list[Any]:
    """The devices of one host with this chip (of a GPU one), to compile for in this process. ImportError with the remedy where
    the compiler is not installed.

    A process can compile Mosaic GPU kernels for one kind of GPU: XLA and its linker keep the first one's architecture and
    kernels. `compile_for` has a process for each.
    """
    reason = missing(chip_name)
    if reason is not None:
        raise ImportError(reason)
    for name, value in SETTINGS[chip(chip_name).platform].items():
        os.environ.setdefault(name, value)
    if chip_name in TOPOLOGIES:
        return topologies.get_topology_desc(TOPOLOGIES[chip_name], platform="tpu").devices
    description = Path(__file__).with_name(DESCRIPTIONS[chip_name]).read_text(encoding="utf-8")
    return topologies.get_topology_desc(platform="cuda", target_config=description, topology="1x1x1").devices


class Gpu(AbstractDevice):
    """Mosaic GPU asks it what to write code for; where it finds no answer, it takes every GPU for a Hopper."""

    @property
    def compute_capability(self) -> str:
        name = next(c.name for c in map(chip, DESCRIPTIONS) if self.device_kind in c.kinds)
        number = name.removeprefix("sm_").removesuffix("a")
        return f"{number[:-1]}.{number[-1]}"


def abstract_mesh(target: Chip) -> AbstractMesh:
    """A mesh without axes, which says to a trace that it is for this chip."""
    if target.platform == "tpu":
        return AbstractMesh((), (), abstract_device=AbstractDevice(target.kinds[0], target.cores, "tpu"))
    return AbstractMesh((), (), abstract_device=Gpu(target.kinds[0], target.cores, "gpu"))
