"""From an open checkpoint to parameters on the device, one weight at a time."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from checkpoints.bind import file_specs
from checkpoints.checkpoint import Checkpoint
from pagedjax.config import Dtype, ModelConfig
from pagedjax.device.params import (
    ParamSpec,
    ParamTree,
    ShardLayout,
    Stacked,
    abstract_params,
    map_specs,
    pad_param,
    shard_layout,
    stack_layers,
)
from pagedjax.errors import check
from pagedjax.models import model_for

Progress = Callable[[int, int], None]
Read = Callable[[str, ParamSpec], np.ndarray]
Put = Callable[[np.ndarray, PartitionSpec], jax.Array]


def resolve_dtype(checkpoint: Checkpoint, dtype: Literal["auto", "float32", "bfloat16"], mesh: Mesh) -> Dtype:
    """auto is float32 on CPU, which has no fast bfloat16 for one row, and the file's own dtype elsewhere."""
    if dtype != "auto":
        return dtype
    return "float32" if mesh.devices.flat[0].platform == "cpu" else checkpoint.weights_dtype


def open_params(
    checkpoint: Checkpoint,
    *,
    dtype: Literal["auto", "float32", "bfloat16"],
    mesh: Mesh,
    stacked: bool,
    progress: Progress | None = None,
) -> tuple[ParamTree, ShardLayout, Callable[[], ParamTree]]:
    """The parameters that load_params loads, as ShapeDtypeStructs, their layout, and the function that loads them."""
    layout = shard_layout(checkpoint.config, mesh.shape["model"])
    specs = model_for(layout.cfg.architecture).param_specs(layout.cfg, resolve_dtype(checkpoint, dtype, mesh), layout.vocab)
    load = partial(load_params, checkpoint, dtype=dtype, mesh=mesh, stacked=stacked, progress=progress)
    return abstract_params(specs, layout.cfg, mesh, stacked=stacked), layout, lambda: load()[0]


def load_params(
    checkpoint: Checkpoint,
    *,
    dtype: Literal["auto", "float32", "bfloat16"],
    mesh: Mesh,
    stacked: bool,
    progress: Progress | None = None,
) -> tuple[ParamTree, ShardLayout]:
    """The parameters, padded for and placed on the mesh (which has an axis "model"), and the layout they are padded by.

    Host memory above the model is about one weight, or one stacked weight with `stacked`. `progress(done, total)` counts bytes
    on the device and is called after each array.
    """
    layout = shard_layout(checkpoint.config, mesh.shape["model"])
    weights_dtype = resolve_dtype(checkpoint, dtype, mesh)
    specs = model_for(layout.cfg.architecture).param_specs(layout.cfg, weights_dtype, layout.vocab)
    put = placer(mesh, total_size(specs), progress)
    if checkpoint.restore is not None and not layout.maps:
        params = restore_all(checkpoint.restore, specs, mesh, progress)
        return (stack_layers(params, layout.cfg, mesh, specs) if stacked else params), layout
    read = host_reader(checkpoint, layout)
    if stacked:
        return read_stacked(read, put, specs, layout.cfg), layout
    return map_specs(lambda path, spec: put(read(path, spec), spec.partition()), specs), layout


def size_of(spec: ParamSpec) -> int:
    return math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize


def total_size(specs: ParamTree) -> int:
    sizes: list[int] = []
    map_specs(lambda path, spec: sizes.append(size_of(spec)), specs)
    return sum(sizes)


def placer(mesh: Mesh, total: int, progress: Progress | None) -> Put:
    """put(array, partition): the array on the mesh, and progress told."""
    done = 0

    def put(value: np.ndarray, partition: PartitionSpec) -> jax.Array:
        nonlocal done
        array = jax.device_put(value, NamedSharding(mesh, partition)).block_until_ready()  # else copies pile up in host memory
        done += value.nbytes
        if progress is not None:
            progress(done, total)
        return array

    return put


def host_reader(checkpoint: Checkpoint, layout: ShardLayout) -> Read:
    """read(path, spec): a weight in host memory, padded and in the spec's dtype."""
    true_shapes = {path: spec.shape for path, spec in file_specs(checkpoint.config).items()}

    def read(path: str, spec: ParamSpec) -> np.ndarray:
        value = checkpoint.read(path)
        check(
            value.shape == true_shapes[path],
            f"weight {path} of {checkpoint.source} must have the shape {true_shapes[path]}; got {value.shape}",
        )
        # Always a copy: the array on a CPU device may be this very memory, and must not be a mapped file.
        return np.array(pad_param(value, spec.axes, layout), dtype=jnp.dtype(spec.dtype), order="C")

    return read


def read_stacked(read: Read, put: Put, specs: ParamTree, cfg: ModelConfig) -> ParamTree:
    """The parameters with layers stacked on the host, one weight of the repeating unit at a time."""
    layers = specs["layers"]
    size = len(cfg.layer_pattern)
    units = len(layers) // size

    def stacked(u: int, name: str, spec: ParamSpec) -> jax.Array:
        value = np.empty((units, *spec.shape), jnp.dtype(spec.dtype))
        for i in range(units):
            value[i] = read(f"layers.{i * size + u}.{name}", spec)
        return put(value, PartitionSpec(None, *spec.partition()))

    one = lambda path, spec: put(read(path, spec), spec.partition())
    params = {name: one(name, spec) for name, spec in specs.items() if name != "layers"}
    unit = tuple({name: stacked(u, name, spec) for name, spec in layers[u].items()} for u in range(size if units else 0))
    left = range(units * size, len(layers))
    rest = tuple({name: one(f"layers.{i}.{name}", spec) for name, spec in layers[i].items()} for i in left)
    return {**params, "layers": Stacked(unit=unit, rest=rest)}


def restore_all(restore: Callable[..., dict[str, jax.Array]], specs: ParamTree, mesh: Mesh, progress: Progress | None) -> ParamTree:
    abstract: dict[str, Any] = {}

    def collect(path: str, spec: ParamSpec) -> None:
        abstract[path] = jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=spec.sharding(mesh))

    map_specs(collect, specs)
    arrays = restore(abstract)
    total = total_size(specs)
    if progress is not None:
        progress(total, total)
    return map_specs(lambda path, spec: arrays[path], specs)
