"""Under a mesh: ops wrap themselves in shard_map over the axis of a pool or a weight that is sharded."""

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
    names: Any  # of the mesh's axes it is sharded over
    shards: int

    def spec(self, axis: int) -> P:
        """Of an array that is sharded in the same way along this axis."""
        return P() if self.axis is None else P(*[None] * axis, self.names)


def split_of(name: str, x: jax.Array, given: NamedSharding | None, axes: Mapping[int, str]) -> Split | None:
    """How x is split, of the axes that may be, by their names: as it is given, or as x or its type says, which inside of jit it
    does on a mesh of explicit axes. None where there is nothing to wrap. ValueError for another axis, for two, and for shards of
    unequal size."""
    sharding = given
    if sharding is None:
        said = jax.typeof(x).sharding if isinstance(x, Tracer) else x.sharding
        if not isinstance(said, NamedSharding):
            return None
        sharding = said
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    if not explicit and (sharding.mesh.size == 1 or (given is None and (isinstance(x, Tracer) or sharding.is_fully_replicated))):
        return None
    split = [axis for axis, names in enumerate(sharding.spec) if names not in (None, ())]
    may = " or ".join(f"{what} (axis {axis})" for axis, what in axes.items())
    check(len(split) <= 1 and set(split) <= set(axes), f"{name} must be sharded over {may} alone; got {sharding.spec}")
    if not split:
        return Split(sharding.mesh, None, None, 1)
    names = sharding.spec[split[0]]
    shards = 1
    for one in names if isinstance(names, tuple) else (names,):
        shards *= sharding.mesh.shape[one]
    size, what = x.shape[split[0]], axes[split[0]]
    check(size % shards == 0, f"{what} of {name} must be a multiple of the {shards} shards; got {size}")
    return Split(sharding.mesh, split[0], names, shards)


def over(split: Split, f: Callable[..., Any], args: tuple[Any, ...], in_specs: tuple[Any, ...], out_specs: Any) -> Any:
    """f of each shard's part of args; in_specs: a spec for each, or a tree of them."""
    if AxisType.Explicit in split.mesh.axis_types:

        def place(spec: P, x: Any) -> Any:
            return x if x is None else jax.sharding.reshard(x, NamedSharding(split.mesh, spec))

        args = jax.tree.map(place, in_specs, args, is_leaf=lambda spec: isinstance(spec, P))
    call = jax.shard_map(f, mesh=split.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(args))
    return call(*args) if traced else jax.jit(call)(*args)  # by itself it would run operation by operation
