"""paged_attention: rows of any number of query tokens, decode and prefill mixed, against their contexts in the pool."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.dispatch import Backend, Op, kernel, run
from pallas_kernels.common.layout import check_ints, check_layer, check_pool, check_queries
from pallas_kernels.common.quantized import check_scales
from pallas_kernels.common.sharding import over, split_of
from pallas_kernels.common.spec import TYPICAL_ATTENTION, attention_spec
from pallas_kernels.paged_attention import xla
from pallas_kernels.paged_attention.reference import reference

__all__ = ["OP", "paged_attention", "reference"]

OP = Op(
    "paged_attention",
    (
        kernel(__name__, "mosaic_tpu", ("tpu",), "tiles of queries over blocks that are read ahead"),
        kernel(__name__, "mosaic_gpu", ("cuda",), "Hopper: copies by TMA, products by wgmma"),
        kernel(__name__, "mosaic_gpu_sm80", ("cuda",), "products of single warps, which Ampere, Ada, Hopper and B200 have"),
        kernel(__name__, "numba_cpu", ("cpu",), "machine code of its own, which reads blocks where they lie"),
        kernel(__name__, "triton", ("cuda",), "a stop-gap where no Mosaic kernel takes the call"),
        Backend("xla", (), "a loop over blocks with an online softmax"),
    ),
    TYPICAL_ATTENTION,
)


def paged_attention(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array | int,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    num_decode: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    backend: str | None = None,
    platform: str | None = None,
    sharding: NamedSharding | None = None,
) -> jax.Array:
    """f32[T, H, D]: row s owns q[query_start[s]:query_start[s + 1]], the last positions of its context; each sees the context
    up to itself.

    q [T, H, D], cast as in paged_decode; kv [J, N, 2, K, P, D']; layer i32 scalar, may be traced; block_tables i32[S, B], entries
    below N; context_lens i32[S], at most B * P, counts the row's own tokens, which are in the pool already; query_start i32[S + 1]
    starts with 0, never falls, and ends with at most T; num_decode i32[1]: so many rows at the front have one token each. Padding
    rows have no tokens; tokens of no row give 0. The options are those of paged_decode.
    """
    q, kv, block_tables, context_lens = (jnp.asarray(x) for x in (q, kv, block_tables, context_lens))
    query_start, num_decode = jnp.asarray(query_start), jnp.asarray(num_decode)
    sinks, kv_scales = (None if x is None else jnp.asarray(x) for x in (sinks, kv_scales))
    pool = check_pool(kv)
    scales = check_scales(kv_scales, pool, kv.dtype)
    check_queries(q, pool, block_tables, context_lens, window, soft_cap, sinks)
    check_ints("query_start", query_start, (block_tables.shape[0] + 1,))
    check_ints("num_decode", num_decode, (1,))
    layer = check_layer(layer, pool.layers)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    split = split_of("kv", kv, sharding, {3: "kv heads"})
    if split is not None:

        def local(q, kv, layer, block_tables, context_lens, query_start, num_decode, sinks, kv_scales):
            rows = block_tables, context_lens, query_start, num_decode
            more = {"sinks": sinks, "kv_scales": kv_scales, "backend": backend, "platform": platform}
            return paged_attention(q, kv, layer, *rows, **more, **options)

        args = q, kv, layer, block_tables, context_lens, query_start, num_decode, sinks, kv_scales
        parts = split.spec(3) if scales == "token" else P()
        return over(split, local, args, (split.spec(1), split.spec(3), *[P()] * 5, split.spec(0), parts), split.spec(1))

    def in_xla(q, kv, layer, block_tables, context_lens, query_start, num_decode, sinks, kv_scales, chip):
        rows = block_tables, context_lens, query_start, num_decode
        return xla.attend(q, kv, layer, *rows, sinks=sinks, kv_scales=kv_scales, **options)

    def in_kernel(entry, q, kv, layer, block_tables, context_lens, query_start, num_decode, sinks, kv_scales, chip):
        rows = block_tables, context_lens, query_start, num_decode
        return entry(q, kv, layer, *rows, sinks=sinks, kv_scales=kv_scales, chip=chip, **options)

    spec = attention_spec(q, pool, str(kv.dtype), block_tables, window, soft_cap, sinks, scales)
    args = q, kv, layer, block_tables, context_lens, query_start, num_decode, sinks, kv_scales
    functions = OP.entries("attend", in_kernel) | {"xla": in_xla}
    return run(OP, functions, spec, args, backend=backend, platform=platform)
