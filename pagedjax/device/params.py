"""A model's weights as a tree of ParamSpec: one description gives initial values, sharding, padding and the restore target.

A tree is a dict of weights and one entry `layers`, a list with one dict per layer. Files and Orbax folders hold one array
per weight and layer. How the layers are held on the device is a property of the target: a list (CPU, where a slice of
stacked weights is a copy) or `Stacked` (TPU and GPU, where the layer loop is a scan). See `device.layers.fold_layers`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pagedjax.config import ModelConfig

Axis = Literal["vocab", "embed", "heads", "kv_heads", "head_width", "ffn", "layers"]

# Logical axis -> mesh axis. Everything that is sharded is sharded by this table.
RULES: Mapping[str, str | None] = {
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "ffn": "model",
    "embed": None,
    "head_width": None,
    "layers": None,
}


@dataclass(frozen=True)
class ParamSpec:
    """One weight: its shape, its dtype and the logical name of each axis."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[Axis, ...]
    init: Literal["normal", "ones", "zeros"] = "normal"  # normal: standard deviation 1/sqrt(fan in), the last axes after the first

    def partition(self) -> PartitionSpec:
        return PartitionSpec(*(RULES[axis] for axis in self.axes))

    def sharding(self, mesh: Mesh) -> NamedSharding:
        return NamedSharding(mesh, self.partition())


ParamTree = Any  # dict[str, ParamSpec | list[dict[str, ParamSpec]]] or the same with arrays


@struct.dataclass
class Stacked:
    """Layers stacked for a scan: `unit[u][name]` has a leading axis of the number of whole repeating units; `rest` are the
    layers of a last incomplete unit."""

    unit: tuple[dict[str, jax.Array], ...]
    rest: tuple[dict[str, jax.Array], ...]


def is_spec(x: object) -> bool:
    return isinstance(x, ParamSpec)


def map_specs(f: Callable[[str, ParamSpec], Any], specs: ParamTree) -> ParamTree:
    """f(path, spec) for every spec; paths are like "layers.3.q"."""

    def walk(path: str, node: Any) -> Any:
        if isinstance(node, ParamSpec):
            return f(path, node)
        if isinstance(node, dict):
            return {k: walk(f"{path}.{k}" if path else k, v) for k, v in node.items()}
        return [walk(f"{path}.{i}", v) for i, v in enumerate(node)]

    return walk("", specs)


def init_params(specs: ParamTree, seed: int, mesh: Mesh) -> ParamTree:
    """Seeded random weights (NumPy's generator, one stream per path), placed on the mesh. For tests and benchmarks."""

    def one(path: str, spec: ParamSpec) -> jax.Array:
        rng = np.random.default_rng([seed, *path.encode()])
        if spec.init == "normal":
            fan_in = math.prod(spec.shape[1:]) or 1
            value = rng.standard_normal(spec.shape, dtype=np.float32) * np.float32(fan_in**-0.5)
        else:
            value = np.full(spec.shape, spec.init == "ones", np.float32)
        return jax.device_put(value.astype(jnp.dtype(spec.dtype)), spec.sharding(mesh))

    return map_specs(one, specs)


def stack_layers(params: ParamTree, cfg: ModelConfig, mesh: Mesh, specs: ParamTree) -> ParamTree:
    """The same parameters with `layers` as `Stacked`. One weight at a time, so that peak memory is one stacked weight more."""
    layers: list[dict[str, jax.Array]] = params["layers"]
    size = len(cfg.layer_pattern)
    units = len(layers) // size

    def stacked(u: int, name: str) -> jax.Array:
        arrays = [layers[i * size + u].pop(name) for i in range(units)]
        sharding = NamedSharding(mesh, PartitionSpec(None, *specs["layers"][u][name].partition()))
        return jax.jit(lambda *a: jnp.stack(a), out_shardings=sharding)(*arrays)

    unit = tuple({name: stacked(u, name) for name in list(layers[u])} for u in range(size)) if units else ()
    return {**params, "layers": Stacked(unit=unit, rest=tuple(layers[units * size :]))}


def abstract_params(specs: ParamTree, cfg: ModelConfig, mesh: Mesh, *, stacked: bool) -> ParamTree:
    """The tree as ShapeDtypeStructs with shardings: what a step can be compiled from without any weights."""

    def array(shape: tuple[int, ...], dtype: str, *axes: str | None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    tree = map_specs(lambda _, spec: array(spec.shape, spec.dtype, *spec.partition()), specs)
    if not stacked:
        return tree
    size = len(cfg.layer_pattern)
    units = cfg.num_layers // size

    def unit(layer: dict[str, ParamSpec]) -> dict[str, Any]:
        return {name: array((units, *spec.shape), spec.dtype, None, *spec.partition()) for name, spec in layer.items()}

    layers = Stacked(
        unit=tuple(unit(layer) for layer in specs["layers"][:size]) if units else (), rest=tuple(tree["layers"][units * size :])
    )
    return {**tree, "layers": layers}


# --- padding for shards -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AxisMap:
    """How an axis of a file is laid out on the device: entry i of the padded axis is entry source[i] of the file, or zeros
    where source[i] is -1."""

    source: tuple[int, ...]

    @property
    def is_identity(self) -> bool:
        return all(i == s for i, s in enumerate(self.source))


@dataclass(frozen=True)
class ShardLayout:
    """A model padded so that every sharded axis divides by the number of shards: the config to build it with, and the map of
    each logical axis that changed."""

    cfg: ModelConfig  # padded; vocab_size stays the true one
    vocab: int  # rows of the embedding, padding included
    maps: Mapping[str, AxisMap]


def shard_layout(cfg: ModelConfig, shards: int) -> ShardLayout:
    """Pads with zeros (exact) and replicates kv heads where there are fewer than shards.

    With K kv heads, G query heads each and n shards: K is first padded to K', the next multiple of n, or, below n, the next
    divisor of n; then each kv head is repeated r = max(1, n / K') times, and its G query heads are dealt to the copies,
    ceil(G / r) to each.
    """

    def up(value: int) -> int:
        return -(-value // shards) * shards

    k, g = cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads
    padded_k = up(k) if k >= shards else next(d for d in range(k, shards + 1) if shards % d == 0)
    copies = max(1, shards // padded_k)
    each = -(-g // copies)
    kv_source, q_source = [], []
    for head in range(padded_k):
        for copy in range(copies):
            kv_source.append(head if head < k else -1)
            for i in range(each):
                within = copy * each + i
                q_source.append(head * g + within if head < k and within < g else -1)
    pad = lambda size: AxisMap(tuple(i if i < size else -1 for i in range(up(size))))
    maps = {
        "kv_heads": AxisMap(tuple(kv_source)),
        "heads": AxisMap(tuple(q_source)),
        "ffn": pad(cfg.ffn_width),
        "vocab": pad(cfg.vocab_size),
    }
    fields = {f: getattr(cfg, f) for f in cfg.__dataclass_fields__}
    fields.update(
        num_kv_heads=len(kv_source), num_heads=len(q_source), ffn_width=up(cfg.ffn_width), attention_scale=cfg.score_scale
    )
    return ShardLayout(ModelConfig(**fields), up(cfg.vocab_size), {name: m for name, m in maps.items() if not m.is_identity})


def pad_param(value: np.ndarray, axes: tuple[Axis, ...], layout: ShardLayout) -> np.ndarray:
    """`value` as in the file, laid out for the shards."""
    for dim, axis in enumerate(axes):
        if axis in layout.maps:
            source = np.asarray(layout.maps[axis].source)
            value = np.take(value, np.maximum(source, 0), axis=dim)
            index: list[Any] = [slice(None)] * value.ndim
            index[dim] = source < 0
            value[tuple(index)] = 0
    return value
