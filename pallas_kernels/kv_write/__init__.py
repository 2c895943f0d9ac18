"""kv_write: the keys and values of new tokens into the pool, in place where the pool is donated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.dispatch import Backend, Op, kernel, run
from pallas_kernels.common.layout import check, check_floats, check_ints, check_layer, check_pool
from pallas_kernels.common.quantized import check_scales
from pallas_kernels.common.sharding import over, split_of
from pallas_kernels.common.spec import TYPICAL_WRITE, WriteSpec
from pallas_kernels.kv_write import xla
from pallas_kernels.kv_write.reference import reference

__all__ = ["OP", "kv_write", "reference"]

OP = Op(
    "kv_write",
    (
        kernel(__name__, "mosaic_tpu", ("tpu",), "rewrites the tiles of memory that tokens are in"),
        Backend("xla_blocks", ("tpu",), "rewrites whole blocks: there XLA copies the pool for a write of single tokens"),
        kernel(__name__, "mosaic_gpu", ("cuda",), "one launch, in which an 8-bit pool's numbers and scales are made, too"),
        Backend("xla_tokens", (), "scatters single tokens, which is in place here"),
    ),
    TYPICAL_WRITE,
)


def kv_write(
    kv: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array | int,
    slots: jax.Array,
    *,
    num_rows: int,
    kv_scales: jax.Array | None = None,
    backend: str | None = None,
    platform: str | None = None,
    sharding: NamedSharding | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The pool with k and v of T tokens at their slots of one layer.

    kv [J, N, 2, K, P, D']; k, v [T, K, D] with D <= D', cast to kv's dtype, padded with zeros; layer i32 scalar, may be traced;
    slots i32[T] = block * P + place in the block. Padding has slots in block 0, the scrap block: what stands there afterwards is
    undefined. The tokens come from at most num_rows rows, one after the other; inside a row the positions are consecutive, and
    no block belongs to two rows. kv_scales: of a pool of 8 bits, as in common/quantized.py; those per tensor are used, those per
    token are made from k and v, and the result is (the pool, the scales). backend, platform: as in `dispatch.run`. sharding: of
    kv, as in paged_decode.
    """
    kv, k, v, slots = (jnp.asarray(x) for x in (kv, k, v, slots))
    kv_scales = None if kv_scales is None else jnp.asarray(kv_scales)
    pool = check_pool(kv)
    check(k.ndim == 3 and k.shape[1] == pool.kv_heads, f"k must be [tokens, {pool.kv_heads}, width]; got {k.shape}")
    check(k.shape == v.shape, f"k and v must have one shape; got {k.shape} and {v.shape}")
    check(k.shape[2] <= pool.width, f"the head width of k must be at most the pool's {pool.width}; got {k.shape[2]}")
    check(min(k.shape) >= 1, f"k must hold at least one token, and a width; got {k.shape}")
    check_floats("k", k)
    check_floats("v", v)
    check_ints("slots", slots, k.shape[:1])
    whole = isinstance(num_rows, int | np.integer) and num_rows >= 1
    check(whole, f"num_rows must be an integer, at least 1; got {num_rows}")
    layer = check_layer(layer, pool.layers)
    scales = check_scales(kv_scales, pool, kv.dtype)
    split = split_of("kv", kv, sharding, {3: "kv heads"})
    if split is not None:

        def local(kv, k, v, layer, slots, kv_scales):
            more = {"kv_scales": kv_scales, "backend": backend, "platform": platform}
            return kv_write(kv, k, v, layer, slots, num_rows=num_rows, **more)

        whole, heads, parts = split.spec(3), split.spec(1), split.spec(3) if scales == "token" else P()
        specs = whole, heads, heads, P(), P(), parts
        return over(split, local, (kv, k, v, layer, slots, kv_scales), specs, (whole, whole) if scales == "token" else whole)
    spec = WriteSpec(k.shape[0], num_rows, k.shape[2], pool, str(kv.dtype), scales)

    def tokens(kv, k, v, layer, slots, kv_scales, chip):
        return xla.write(xla.write_tokens, kv, k, v, layer, slots, kv_scales)

    def blocks(kv, k, v, layer, slots, kv_scales, chip):
        return xla.write(functools.partial(xla.write_blocks, num_rows=num_rows), kv, k, v, layer, slots, kv_scales)

    def in_kernel(entry, kv, k, v, layer, slots, kv_scales, chip):
        return entry(kv, k, v, layer, slots, kv_scales=kv_scales, chip=chip)

    functions = OP.entries("write", in_kernel) | {"xla_tokens": tokens, "xla_blocks": blocks}
    return run(OP, functions, spec, (kv, k, v, layer, slots, kv_scales), backend=backend, platform=platform)
