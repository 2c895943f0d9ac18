"""From an open checkpoint to parameters on the device, one weight at a time."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from checkpoints.bind import file_specs
from checkpoints.checkpoint import Checkpoint
from pagedjax.config import Dtype
from pagedjax.device.params import ParamSpec, ParamTree, ShardLayout, map_specs, pad_param, shard_layout, stack_layers
from pagedjax.errors import check
from pagedjax.models import model_for

Progress = Callable[[int, int], None]


def resolve_dtype(checkpoint: Checkpoint, dtype: Literal["auto", "float32", "bfloat16"], mesh: Mesh) -> Dtype:
    """auto is float32 on CPU, which has no fast bfloat16 for one row, and the file's own dtype elsewhere."""
    if dtype != "auto":
        return dtype
    return "float32" if mesh.devices.flat[0].platform == "cpu" else checkpoint.weights_dtype


def load_params(
    checkpoint: Checkpoint,
    *,
    dtype: Literal["auto", "float32", "bfloat16"],
    mesh: Mesh,
    stacked: bool,
    progress: Progress | None = None,
) -> tuple[ParamTree, ShardLayout]:
    """The parameters, padded for and placed on the mesh (which has an axis "model"), and the layout they are padded by.

    Host memory above the model is about one weight; with `stacked` the device holds one stacked weight more than the model
    for a moment. `progress(done, total)` counts bytes on the device and is called after each weight.
    """
    layout = shard_layout(checkpoint.config, mesh.shape["model"])
    weights_dtype = resolve_dtype(checkpoint, dtype, mesh)
    specs = model_for(layout.cfg.architecture).param_specs(layout.cfg, weights_dtype, layout.vocab)
    if checkpoint.restore is not None and not layout.maps:
        params = restore_all(checkpoint.restore, specs, mesh, progress)
    else:
        params = read_each(checkpoint, specs, layout, mesh, progress)
    if stacked:
        params = stack_layers(params, layout.cfg, mesh, specs)
    return params, layout


def size_of(spec: ParamSpec) -> int:
    return math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize


def total_size(specs: ParamTree) -> int:
    sizes: list[int] = []
    map_specs(lambda path, spec: sizes.append(size_of(spec)), specs)
    return sum(sizes)


def read_each(checkpoint: Checkpoint, specs: ParamTree, layout: ShardLayout, mesh: Mesh, progress: Progress | None) -> ParamTree:
    true_shapes = {path: spec.shape for path, spec in file_specs(checkpoint.config).items()}
    total, done = total_size(specs), 0

    def one(path: str, spec: ParamSpec) -> jax.Array:
        nonlocal done
        value = checkpoint.read(path)
        check(
            value.shape == true_shapes[path],
            f"weight {path} of {checkpoint.source} must have the shape {true_shapes[path]}; got {value.shape}",
        )
        # Always a copy: the array on a CPU device may be this very memory, and must not be a mapped file.
        padded = np.array(pad_param(value, spec.axes, layout), dtype=jnp.dtype(spec.dtype), order="C")
        array = jax.device_put(padded, spec.sharding(mesh))
        done += size_of(spec)
        if progress is not None:
            array.block_until_ready()
            progress(done, total)
        return array

    return map_specs(one, specs)


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
