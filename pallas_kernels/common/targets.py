"""The chips that kernels are written for: what their memories hold, and what their makers say of their speed."""

import functools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import jax
from jax.sharding import get_abstract_mesh

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Chip:
    """One core, as a kernel sees it. Speeds are the data sheet's, for the device that JAX shows; 0: not known."""

    name: str
    platform: str  # as JAX's lowering names it: "tpu", "cuda", "cpu"
    kinds: tuple[str, ...]  # Device.device_kind; the first is the one that stands for all
    cores: int  # streaming multiprocessors of a GPU, tensor cores of a TPU device
    fast_memory: int  # bytes: VMEM of a TPU core, shared memory that one block of a GPU may have, the largest cache of a CPU
    scalar_memory: int  # bytes of SMEM of a TPU core; 0 elsewhere
    read_gb_s: float
    bf16_tflop_s: float


CHIPS = (
    Chip("v5e", "tpu", ("TPU v5 lite", "TPU v5e"), 1, 128 * MIB, MIB, 819, 197),
    Chip("v5p", "tpu", ("TPU v5", "TPU v5p"), 2, 64 * MIB, MIB, 2765, 459),
    Chip("v6e", "tpu", ("TPU v6 lite", "TPU v6e"), 1, 128 * MIB, MIB, 1640, 918),
    # Two devices a chip; 64 KiB less than 64 MiB of VMEM can be used.
    Chip("tpu7x", "tpu", ("TPU7x", "TPU v7x"), 1, 64 * MIB - 64 * KIB, MIB, 3690, 1155),
    Chip("sm_80", "cuda", ("NVIDIA A100-SXM4-80GB", "NVIDIA A100-SXM4-40GB"), 108, 163 * KIB, 0, 2039, 312),
    Chip("sm_90a", "cuda", ("NVIDIA H200", "NVIDIA H100 80GB HBM3"), 132, 227 * KIB, 0, 4800, 989),
    Chip("sm_100", "cuda", ("NVIDIA B200",), 148, 227 * KIB, 0, 8000, 2250),
)
CPUS = ("amx_bf16", "avx512f", "avx2", "asimd")  # what tells one CPU from another, as Linux names it; the first that it has
CPU_INFO, CPU_CACHES = Path("/proc/cpuinfo"), Path("/sys/devices/system/cpu/cpu0/cache")
DEFAULT = {"tpu": "v5e", "cuda": "sm_90a"}  # where a program is lowered for a platform and nobody says for which chip


def chip(name: str) -> Chip:
    """By name; ValueError for one that is not in the table."""
    found = next((c for c in CHIPS if c.name == name), None)
    if found is None:
        raise ValueError(f"chip must be one of {', '.join(c.name for c in CHIPS)}; got {name}")
    return found


def chip_of_kind(kind: str, compute_capability: str | None = None) -> Chip | None:
    """The chip that JAX calls `kind`. A GPU that is not in the table is taken for the one of its generation, by its compute
    capability ("8.9"); None for other generations, whose copies and products are not written as those of the table are."""
    named = next((c for c in CHIPS if kind in c.kinds), None)
    if named is not None or compute_capability is None:
        return named
    return {"8": chip("sm_80"), "9": chip("sm_90a"), "10": chip("sm_100")}.get(compute_capability.split(".")[0])


def chip_for(platform: str) -> Chip | None:
    """The chip that a trace for this platform is for: that of the abstract mesh in use, of this process's devices, or DEFAULT; this
    machine's CPU. None: a platform or a device without kernels of its own."""
    if platform == "cpu":
        return cpu()
    if platform not in DEFAULT:
        return None
    first, meant = jax.devices()[0], get_abstract_mesh().abstract_device  # the latter does not tell its compute capability
    own = first if platform_of(first) == platform else None
    device = own if meant is None or meant.platform not in (platform, "gpu" if platform == "cuda" else platform) else meant
    if device is None:
        return chip(DEFAULT[platform])
    same = own is not None and own.device_kind == device.device_kind
    return chip_of_kind(device.device_kind, getattr(own, "compute_capability", None) if same else None)


@functools.cache
def cpu() -> Chip:
    """This machine's CPU, called by the widest instructions that XLA finds for products ("cpu avx512f"), as Linux tells them, and
    with its largest cache; "cpu", and 0, where nobody tells."""
    has = told(CPU_INFO).split()
    name = " ".join(["cpu", *[name for name in CPUS if name in has][:1]])
    sizes = [told(file).strip() for file in CPU_CACHES.glob("index*/size")]
    cache = max((int(size[:-1]) * KIB for size in sizes if size.endswith("K")), default=0)
    return Chip(name, "cpu", ("cpu",), os.cpu_count() or 1, cache, 0, 0, 0)


def told(file: Path) -> str:
    """What a file of the system says; nothing where it may not be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""


def is_cpu(chip: Chip | None) -> TypeGuard[Chip]:
    return chip is not None and chip.platform == "cpu"


def name_of(device: Any) -> str:
    """What measurements call a device: "NVIDIA H200", "cpu avx512f, 2 cores"."""
    return device.device_kind if device.platform != "cpu" else f"{cpu().name}, {cpu().cores} cores"


def platform_of(device: Any) -> str:
    """A device's platform as the lowering of JAX names it: a GPU is "cuda" or "rocm"."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in getattr(device.client, "platform_version", "") else "cuda"
