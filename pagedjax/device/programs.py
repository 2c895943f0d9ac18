"""Compiled programs on disk, named by all that goes into them, so that a start finds them without tracing anything.

JAX's own cache is named by the lowered program; on CPU, where layers are unrolled, tracing and lowering are most of a warm start.
Loading a program runs what is in the file, as with JAX's cache: who may write to the folder may run code as its user.
"""

import dataclasses
import hashlib
import pickle
import platform
import threading
import warnings
import zlib
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import flax
import jax
import numpy as np
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import Mesh
from jaxlib import version as jaxlib_version
from jaxlib import xla_client

import pallas_kernels
from pallas_kernels.common.dispatch import Later
from pallas_kernels.common.machine_code import targets_in
from pallas_kernels.common.targets import cpu

PACKAGE, KERNELS = Path(__file__).parents[1], Path(pallas_kernels.__file__).parent
# All that the programs are made of: what device and models may import (tests/device/test_programs.py).
SOURCES = (PACKAGE / "device", PACKAGE / "models", KERNELS) + tuple(
    PACKAGE / f"{name}.py" for name in ("buckets", "config", "errors", "limits", "state", "wire")
)
DIGEST_BYTES = 32
numba_targets = Later("pallas_kernels.common.numba_targets")


def program_file(folder: str, lower: partial, options: dict[str, Any], mesh: Mesh) -> Path | None:
    """Where the program that `lower` lowers is kept. None where `folder` is "", and on other platforms than CPU: there layers are
    scanned, so that lowering is short, this has not been tried, and JAX's cache is on."""
    if not folder or mesh.devices.flat[0].platform != "cpu":
        return None
    parts = (describe(lower), repr(sorted(options.items())), describe(mesh), source_digest(), surroundings(mesh))
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    return Path(folder).expanduser() / f"{lower.func.__name__.removeprefix('lower_')}-{digest}-program"


def load_program(file: Path, mesh: Mesh) -> jax.stages.Compiled | None:
    """The program in `file`; None where there is none that is whole, bears its own name, and can be loaded."""
    try:
        held = file.read_bytes()
    except OSError:
        return None
    data = held[DIGEST_BYTES:]
    if held[:DIGEST_BYTES] != digest_of(file, data):
        return None
    devices = list(mesh.devices.flat)
    try:
        targets, serialized, ins, outs = pickle.loads(zlib.decompress(data))
        for target in targets:
            numba_targets.restore(target)
        return deserialize_and_load(serialized, ins, outs, devices[0].client, devices)
    except Exception:  # whatever it is: the program can be compiled again, and replaces the file
        return None


def save_program(file: Path, compiled: jax.stages.Compiled) -> None:
    """Puts the program into `file`, whole or not at all. Warns where that is not possible."""
    part = file.with_name(f"{file.name}.{threading.get_native_id()}")
    try:
        program = serialize(compiled)
        data = zlib.compress(pickle.dumps((targets_in(program[0]), *program)), level=1)
        part.write_bytes(digest_of(file, data) + data)
        part.replace(file)
    except (OSError, ValueError, NotImplementedError) as error:
        part.unlink(missing_ok=True)
        warnings.warn(f"a compiled program cannot be kept as {file}: {error}", stacklevel=2)


def digest_of(file: Path, data: bytes) -> bytes:
    """Of the content and of the name, so that a file under another's name is not taken either."""
    return hashlib.sha256(file.name.encode() + data).digest()


def describe(value: Any) -> str:
    """All that a program depends on in an argument: of arrays the shape, dtype and sharding. TypeError for what it cannot tell."""
    if isinstance(value, jax.Array | jax.ShapeDtypeStruct):
        return f"{value.dtype}{list(value.shape)} {value.sharding}"
    if isinstance(value, str | bytes | int | float | None):
        return repr(value)
    if isinstance(value, ModuleType):
        return value.__name__
    if isinstance(value, partial):
        return f"{value.func.__module__}.{value.func.__qualname__}({describe((value.args, value.keywords))})"
    if isinstance(value, Mesh):
        devices = [(device.platform, device.device_kind, device.id) for device in value.devices.flat]
        return f"{value} on {devices}"
    leaves, tree = jax.tree.flatten(value)
    if not jax.tree_util.treedef_is_leaf(tree):
        return f"{tree}({', '.join(map(describe, leaves))})"
    if dataclasses.is_dataclass(value):
        fields = (f"{field.name}={describe(getattr(value, field.name))}" for field in dataclasses.fields(value))
        return f"{type(value).__qualname__}({', '.join(fields)})"
    raise TypeError(f"a program cannot be named by a {type(value).__qualname__}")


@cache
def source_digest() -> str:
    found = hashlib.sha256()
    for place in SOURCES:
        for path in sorted([*place.rglob("*.py"), *place.rglob("*.json")]) if place.is_dir() else [place]:
            found.update(f"{path.name} {path.stat().st_size} ".encode() + path.read_bytes())
    return found.hexdigest()


def surroundings(mesh: Mesh) -> str:
    """What else decides: versions, JAX's settings, XLA's flags (they are in its options), the processor's features and cache."""
    numba = version("numba") if find_spec("numba") else ""
    versions = (platform.python_version(), jax.__version__, jaxlib_version.__version__, np.__version__, flax.__version__, numba)
    settings = {name: value for name, value in jax.config.values.items() if name != "jax_compilation_cache_dir"}
    client = mesh.devices.flat[0].client
    topology = xla_client.get_topology_for_devices(list(mesh.devices.flat)).serialize()
    flags = xla_client.CompileOptions().SerializeAsString()
    return repr((versions, sorted(settings.items()), client.platform_version, topology, flags, cpu()))
