"""paged_decode: one query token a row against the row's context in the pool."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.common.dispatch import Backend, Op, kernel, run
from pallas_kernels.common.layout import check, check_layer, check_pool, check_queries
from pallas_kernels.common.quantized import check_scales
from pallas_kernels.common.sharding import over, split_of
from pallas_kernels.common.spec import TYPICAL_DECODE, attention_spec
from pallas_kernels.paged_decode import xla
from pallas_kernels.paged_decode.reference import reference

__all__ = ["OP", "paged_decode", "reference"]

OP = Op(
    "paged_decode",
    (
        kernel(__name__, "mosaic_tpu", ("tpu",), "reads each block once, ahead of the arithmetic"),
        kernel(__name__, "mosaic_gpu", ("cuda",), "Hopper: copies by TMA, products by wgmma"),
        kernel(__name__, "mosaic_gpu_sm80", ("cuda",), "products of single warps, which Ampere, Ada, Hopper and B200 have"),
        kernel(__name__, "numba_cpu", ("cpu",), "machine code of its own, which reads blocks where they lie"),
        kernel(__name__, "triton", ("cuda",), "a stop-gap where no Mosaic kernel takes the call"),
        Backend("xla", (), "a loop over blocks with an online softmax", candidates=xla.candidates),
    ),
    TYPICAL_DECODE,
)


def paged_decode(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array | int,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    kv_scales: jax.Array | None = None,
    return_lse: bool = False,
    backend: str | None = None,
    platform: str | None = None,
    sharding: NamedSharding | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """f32[S, H, D], and with return_lse f32[S, H], the logarithm of the softmax's denominator (sink included).

    q [S, H, D], cast to kv's dtype (bfloat16 where that has 8 bits); kv [J, N, 2, K, P, D']; layer i32 scalar, may be traced;
    block_tables i32[S, B], entries below N; context_lens i32[S], at most B * P, counts the query's own token, which is the last.
    Rows of length 0 give 0 and -inf. scale multiplies the f32 scores; window: how many tokens are seen, the last included;
    soft_cap: scores become cap * tanh(score / cap); sinks [H]: one more logit a head that has no value; kv_scales: of a pool of
    8 bits, as in common/quantized.py. Past a row's length table entries are not read, and slots may hold anything, NaN included.
    backend, platform: as in `dispatch.run`. sharding: how kv is sharded over a mesh, by kv heads alone; None: as kv itself says
    (`sharding.split_of`). q, sinks and the results then are sharded by heads, scales per token as kv.
    """
    q, kv, block_tables, context_lens = (jnp.asarray(x) for x in (q, kv, block_tables, context_lens))
    sinks, kv_scales = (None if x is None else jnp.asarray(x) for x in (sinks, kv_scales))
    pool = check_pool(kv)
    scales = check_scales(kv_scales, pool, kv.dtype)
    check_queries(q, pool, block_tables, context_lens, window, soft_cap, sinks)
    check(q.shape[0] == block_tables.shape[0], f"q must have one token for each of {block_tables.shape[0]} rows; got {q.shape[0]}")
    layer = check_layer(layer, pool.layers)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap}
    split = split_of("kv", kv, sharding, {3: "kv heads"})
    if split is not None:

        def local(q, kv, layer, block_tables, context_lens, sinks, kv_scales):
            more = {"sinks": sinks, "kv_scales": kv_scales, "return_lse": True, "backend": backend, "platform": platform}
            return paged_decode(q, kv, layer, block_tables, context_lens, **more, **options)

        args = q, kv, layer, block_tables, context_lens, sinks, kv_scales
        parts = split.spec(3) if scales == "token" else P()
        specs = split.spec(1), split.spec(3), P(), P(), P(), split.spec(0), parts
        out, lse = over(split, local, args, specs, (split.spec(1), split.spec(1)))
        return (out, lse) if return_lse else out

    def in_xla(q, kv, layer, block_tables, context_lens, sinks, kv_scales, chip):
        config = xla.config_of(spec, chip)
        return xla.decode(q, kv, layer, block_tables, context_lens, sinks=sinks, kv_scales=kv_scales, config=config, **options)

    def in_kernel(entry, q, kv, layer, block_tables, context_lens, sinks, kv_scales, chip):
        return entry(q, kv, layer, block_tables, context_lens, sinks=sinks, kv_scales=kv_scales, chip=chip, **options)

    spec = attention_spec(q, pool, str(kv.dtype), block_tables, window, soft_cap, sinks, scales)
    args = q, kv, layer, block_tables, context_lens, sinks, kv_scales
    functions = OP.entries("decode", in_kernel) | {"xla": in_xla}
    out, lse = run(OP, functions, spec, args, backend=backend, platform=platform)
    return (out, lse) if return_lse else out
