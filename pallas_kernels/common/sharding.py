"""Under a mesh: ops wrap themselves in shard_map over the axis of a pool or a weight that is sharded."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.layout import check


class Split(NamedTuple):
    """Of an array over a mesh."""

    mesh: Any  # Mesh or AbstractMesh
    axis: int | None  # of the array, that is sharded; None: there is a copy everywhere
    names: tuple[str, ...]  # of the mesh's axes it is sharded over
    shards: int

    def spec(self, axis: int) -> P:
        """Of an array that is sharded in the same way along this axis."""
        return P() if self.axis is None else P(*[None] * axis, self.names)


def split_of(name: str, x: jax.Array, given: NamedSharding | None, axes: Mapping[int, str]) -> Split | None:
    """How x is split, of the axes that may be, by their names: as it is given, or as x or its type says, which inside of jit it
    does on a mesh of explicit axes alone. None where there is nothing to wrap. ValueError for another axis, for two, for shards of
    unequal size, and where x is a shard already."""
    sharding = given
    if sharding is None:
        said = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
        if not isinstance(said, NamedSharding):
            return None
        sharding = said
    check(isinstance(sharding, NamedSharding), f"sharding of {name} must be a NamedSharding; got {type(sharding).__name__}")
    mesh = sharding.mesh
    explicit = AxisType.Explicit in mesh.axis_types
    if not explicit and (mesh.size == 1 or (given is None and (isinstance(x, Tracer) or sharding.is_fully_replicated))):
        return None
    names = {axis: several(mesh, part) for axis, part in enumerate(sharding.spec)}
    split = [axis for axis, part in names.items() if part]
    may = " or ".join(f"{what} (axis {axis})" for axis, what in axes.items())
    check(len(split) <= 1 and set(split) <= set(axes), f"{name} must be sharded over {may} alone; got {sharding.spec}")
    if not split:
        return Split(mesh, None, (), 1)
    axis = split[0]
    inside = sorted(set(names[axis]) & set(jax.sharding.get_abstract_mesh().manual_axes))
    check(not inside, f"sharding must not be given inside of a shard_map over {', '.join(inside)}, where {name} is a shard already")
    shards = math.prod(mesh.shape[one] for one in names[axis])
    size = x.shape[axis]
    check(size % shards == 0, f"{axes[axis]} of {name} must be a multiple of the {shards} shards; got {size}")
    return Split(mesh, axis, names[axis], shards)


def several(mesh: Any, part: Any) -> tuple[str, ...]:
    """The names of the axes of a mesh in a part of a spec, without those that have one device."""
    return tuple(one for one in (part if isinstance(part, tuple) else (part,)) if one is not None and mesh.shape[one] > 1)


def over(split: Split, f: Callable[..., Any], args: tuple[Any, ...], in_specs: tuple[Any, ...], out_specs: Any) -> Any:
    """f of each shard's part of args; in_specs: a spec for each, or a tree of them. Along other axes of the mesh all devices do the
    same. Outside of jit it is compiled anew each time."""
    kinds = dict(zip(split.mesh.axis_names, split.mesh.axis_types, strict=True))

    def place(spec: P, x: Any) -> Any:
        """Types must say where explicit axes are; shard_map sees to the others."""
        known = P(*(tuple(one for one in several(split.mesh, part) if kinds[one] == AxisType.Explicit) or None for part in spec))
        return x if x is None else jax.sharding.reshard(x, NamedSharding(split.mesh, known))

    if AxisType.Explicit in kinds.values():
        args = jax.tree.map(place, in_specs, args, is_leaf=lambda spec: isinstance(spec, P))
    return jax.jit(jax.shard_map(f, mesh=split.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False))(*args)
