"""paged_attention in Mosaic GPU for Hopper: one program for each tile of query tokens and kv head; rows of one token go to
paged_decode.

The G query heads of a kv head lie side by side: a warpgroup takes as many queries as fill its 64 rows with G each. See
common/hopper.py for what a program does.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import hopper
from pallas_kernels.common.compat import traced_for
from pallas_kernels.common.hopper import BY_ROW, ROWS, Softmax, Walk
from pallas_kernels.common.layout import pad_axis, take
from pallas_kernels.common.spec import AttentionSpec, spec_of
from pallas_kernels.common.splits import LOG2E, tile_span
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tiles import tiles_of
from pallas_kernels.common.tuning import attention_key, tuned
from pallas_kernels.paged_decode import mosaic_gpu as paged_decode

RESERVE = paged_decode.RESERVE


@dataclass(frozen=True)
class Config:
    tile: int  # tokens of context an iteration: 64 or 128
    stages: int  # tiles in shared memory
    consumers: int  # warpgroups of 64 rows of queries: 1 or 2


class Packing(NamedTuple):
    """How the queries of a kv head lie in the 64 rows of a warpgroup."""

    group: int  # rows that a query has: G, filled up where that helps
    align: int  # each row's queries begin at a multiple of this: copies begin at multiples of 8 rows
    queries: int  # of a warpgroup; a multiple of align


def packing(group: int) -> Packing:
    """Of G query heads a kv head, at most 64."""
    rows = group if group <= ROWS // 8 else -(-group // 8) * 8
    align = 8 // math.gcd(rows, 8)
    return Packing(rows, align, ROWS // rows // align * align)


def walk_of(config: Config, block_size: int, width: int, dtype: str, token_scales: bool, interpreted: bool = False) -> Walk:
    return Walk(config.tile, config.stages, config.consumers, block_size, width, dtype, token_scales, interpreted)


def out_width(width: int) -> int:
    """Columns of a result that leave at once: of whole 128 bytes, as every query must begin at such a place in shared memory."""
    return hopper.columns(width, 64)[0][1] if width % 32 == 0 else -(-width // 32) * 32


def fits(config: Config, block_size: int, width: int, dtype: str, token_scales: bool, chip: Chip) -> bool:
    """Whether what it needs of shared memory is there, and two consumers have registers enough: a third of what one has, and they
    cannot share the conversion of 8 bits."""
    wide = width > hopper.WIDE or (width > 96 and width % 32 > 0)
    if config.consumers > 1 and (config.tile > 64 or wide or jnp.dtype(dtype).itemsize == 1):
        return False
    walk = walk_of(config, block_size, width, dtype, token_scales)
    return hopper.shared_bytes(walk, out_width(width)) <= chip.fast_memory - RESERVE


def heuristic(block_size: int, width: int, dtype: str, token_scales: bool, chip: Chip) -> Config | None:
    """Tiles of 64 tokens; two consumers where that is possible, as many stages as fit, up to 4. None: not even 2 do."""
    some = (Config(64, stages, consumers) for consumers in (2, 1) for stages in (4, 3, 2))
    return next((config for config in some if fits(config, block_size, width, dtype, token_scales, chip)), None)


def candidates(spec: AttentionSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    if supports(spec, chip) is not None or chip is None:
        return []
    shape = spec.pool.block_size, spec.pool.width, spec.dtype, spec.scales == "token"
    own = heuristic(*shape, chip)
    others = [Config(tile, stages, consumers) for tile in (64, 128) for stages in (2, 3, 4) for consumers in (1, 2)]
    return [] if own is None else [own, *(c for c in others if c != own and fits(c, *shape, chip))]


def config_of(spec: AttentionSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if it is one to try for this one, or else `heuristic`."""
    sizes = spec.pool.block_size, spec.pool.width, spec.dtype, spec.scales == "token"
    default = heuristic(*sizes, chip)
    assert default is not None  # supports
    config = tuned("paged_attention", "mosaic_gpu", chip, attention_key(spec), default)
    return config if config in candidates(spec, chip) else default


def supports(spec: AttentionSpec, chip: Chip | None) -> str | None:
    """As of the table of backends."""
    reason = paged_decode.supports(spec, chip)
    if reason is not None or chip is None:
        return reason
    pool = spec.pool
    if heuristic(pool.block_size, pool.width, spec.dtype, spec.scales == "token", chip) is None:
        return f"needs two tiles of {pool.width} wide heads in {chip.fast_memory} bytes of shared memory; use narrower heads"
    return None


def body(
    q_ref: Any,
    kv_ref: Any,
    scales_ref: Any,
    layer_ref: Any,
    table_ref: Any,
    tiles_ref: Any,
    sinks_ref: Any,
    out_ref: Any,
    *,
    walk: Walk,
    softmax: Softmax,
    pack: Packing,
    quantized: bool,
    sinks: bool,
    **memory: Any,
) -> None:
    """tiles_ref i32[5, tiles]: of each tile its row, first token in out_ref, first query in q_ref, position and tokens."""
    number, head, thread = (lax.axis_index(name) for name in ("tile", "head", "thread"))
    number = tiles_ref.shape[1] - 1 - number  # the last tiles of a row see most
    row, start, place, position, count = (tiles_ref[i, number] for i in range(5))
    end = position + count
    begin = jnp.int32(0) if softmax.window is None else jnp.maximum(position + 1 - softmax.window, 0)
    span = tile_span(begin, end, walk.tile, jnp.int32(0), 1)

    @pl.when((count > 0) & (thread == walk.consumers))
    def _():
        plgpu.set_max_registers(40, action="decrease")
        entry = lambda i: table_ref[row, i]
        hopper.produce(walk, kv_ref, scales_ref, entry, layer_ref[0], head, begin, end, span, memory)

    @pl.when((count > 0) & (thread < walk.consumers))
    def _():
        plgpu.set_max_registers(232, action="increase")
        before = thread * pack.queries  # queries of the tile that other warpgroups have
        at = pl.multiple_of((place + before) * pack.group, 8)
        plgpu.copy_gmem_to_smem(q_ref.at[head, pl.ds(at, ROWS)], memory["q_tile"].at[thread], memory["q_full"].at[thread])
        plgpu.barrier_wait(memory["q_full"].at[thread])
        query = lax.div(lax.iota(jnp.int32, ROWS), jnp.int32(pack.group)) + before
        last = plgpu.layout_cast(jnp.where(query < count, position + query, -1), BY_ROW)
        whole = None
        if softmax.window is None:  # with one, a third loop would spill registers
            seen = lax.div(jnp.minimum(position + before + 1, end), jnp.int32(walk.tile))
            whole = jnp.minimum(seen, span[1])
        factors = scales_ref if quantized else None
        state = hopper.consume(walk, softmax, factors, last, begin, end, span, memory, thread, whole)
        if sinks:
            state = with_sinks(state, plgpu.load(sinks_ref.at[head], layout=BY_ROW))
        mine = jnp.clip(count - before, 0, pack.queries)
        store(state, out_ref, start + before, head, mine, pack, memory["out_tile"].at[thread])


def with_sinks(state: hopper.State, sinks: jax.Array) -> hopper.State:
    """The state after one more logit without a value, f32[64]."""
    top, total, acc = state
    new_top = jnp.maximum(top, sinks * LOG2E)
    keep = jnp.exp2(top - new_top)
    return new_top, total * keep + jnp.exp2(sinks * LOG2E - new_top), [a * hopper.over_columns(keep, a.shape) for a in acc]


def store(
    state: hopper.State, out_ref: Any, start: jax.Array, head: jax.Array, count: jax.Array, pack: Packing, buffer: Any
) -> None:
    """Writes the results of the first `count` queries of a warpgroup to out_ref f32[T, K, G, D''], from token `start` on."""
    group, size = out_ref.shape[2], buffer.shape[1]
    column = 0
    for part in hopper.result(state)[0]:
        if part.shape[1] < size:
            rest = jnp.zeros((ROWS, size - part.shape[1]), jnp.float32)
            part = lax.concatenate([part, plgpu.layout_cast(rest, hopper.MATRIX)], 1)
        for at in range(0, part.shape[1], size):
            buffer[...] = lax.slice(part, (0, at), (ROWS, at + size))
            plgpu.commit_smem()
            to = pl.ds(column, size)

            @pl.loop(0, count)
            def _(i, to=to):
                mine = pl.ds(pl.multiple_of(i * pack.group, pack.group), group)
                plgpu.copy_smem_to_gmem(buffer.at[mine], out_ref.at[start + i, head, :, to])

            plgpu.wait_smem_to_gmem(0)
            column += size


def packed_queries(q: jax.Array, query_start: jax.Array, pack: Packing, extra: int) -> tuple[jax.Array, jax.Array]:
    """(q [K, rows of all queries and `extra`, D'] with each row's queries from a multiple of pack.align on; i32[S]: which query
    that is). q [T, K, G, D']."""
    tokens, kv_heads, _, width = q.shape
    rows = query_start.shape[0] - 1
    counts = query_start[1:] - query_start[:-1]
    ends = jnp.cumsum(lax.div(counts + (pack.align - 1), jnp.int32(pack.align)) * pack.align)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
    if pack.align > 1:
        number = jnp.arange((-(-tokens // pack.align) + rows) * pack.align, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(ends <= number[:, None], axis=1, dtype=jnp.int32), rows - 1)
        q = take(q, jnp.clip(number - take(first - query_start[:-1], row), 0, tokens - 1))
    q = pad_axis(pad_axis(q, 2, pack.group), 0, q.shape[0] + extra)
    return q.transpose(1, 0, 2, 3).reshape(kv_heads, -1, width), first


def attend(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    num_decode: jax.Array,
    *,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    chip: Chip,
    config: Config | None = None,
    interpret: Any = False,
    **options: Any,
) -> jax.Array:
    """f32[T, H, D]; shapes and options as in the op."""
    tokens, heads, head_width = q.shape
    rows = block_tables.shape[0]
    few = min(rows, tokens)
    decodes = jnp.arange(rows) < num_decode[0]
    rest = {"sinks": sinks, "kv_scales": kv_scales, "chip": chip, "interpret": interpret, **options}
    single = jnp.where(decodes, context_lens, 0)[:few]
    of_decodes, _ = paged_decode.decode(q[:few], kv, layer, block_tables[:few], single, **rest)
    of_tiles = attend_tiles(q, kv, layer, block_tables, context_lens, query_start, num_decode, config=config, **rest)
    number = jnp.arange(tokens)[:, None, None]
    out = jnp.where(number < query_start[-1], of_tiles, 0)
    return jnp.where(number < num_decode[0], pad_axis(of_decodes, 0, tokens), out)


def attend_tiles(
    q,
    kv,
    layer,
    block_tables,
    context_lens,
    query_start,
    num_decode,
    *,
    scale,
    window,
    soft_cap,
    sinks,
    kv_scales,
    chip,
    config,
    interpret,
) -> jax.Array:
    """f32[T, H, D] of the rows behind the first num_decode[0]; anything elsewhere."""
    tokens, heads, head_width = q.shape
    kv_heads, block_size, width = kv.shape[3:]
    group = heads // kv_heads
    token_scales = kv_scales is not None and kv_scales.ndim > 1
    config = config or config_of(spec_of(q, kv, block_tables, kv_scales), chip)
    walk, pack = walk_of(config, block_size, width, str(kv.dtype), token_scales, interpret is not False), packing(group)
    tile = pack.queries * config.consumers
    q = pad_axis(q.astype(walk.compute), 2, width).reshape(tokens, kv_heads, group, width)
    q, first = packed_queries(q, query_start, pack, tile + ROWS)
    tiles = tiles_of(query_start, context_lens, num_decode, tokens, tile)
    place = tiles.start + take(first - query_start[:-1], tiles.row)
    by_row = jnp.zeros((kv_heads, ROWS), jnp.float32)
    if sinks is not None:
        by_row = take(
            jnp.asarray(sinks, jnp.float32).reshape(kv_heads, group).T, jnp.minimum(jnp.arange(ROWS) % pack.group, group - 1)
        ).T
    options = {"walk": walk, "softmax": Softmax(scale, window, soft_cap), "pack": pack, "sinks": sinks is not None}
    with traced_for(chip):
        out = plgpu.kernel(
            partial(body, quantized=kv_scales is not None, **options),
            out_type=jax.ShapeDtypeStruct((tokens, kv_heads, group, -(-width // 32) * 32), jnp.float32),
            scratch_types=hopper.scratch(walk, out_width(width)),
            grid=(tiles.row.shape[0], kv_heads),
            grid_names=("tile", "head"),
            num_threads=config.consumers + 1,
            thread_name="thread",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
            kernel_name="paged_attention",
        )(
            q,
            kv,
            jnp.ones(2, jnp.float32) if kv_scales is None else kv_scales,
            layer.reshape(1),
            block_tables,
            jnp.stack([tiles.row, tiles.start, place, tiles.position, tiles.count]),
            by_row,
        )
    return out[..., :head_width].reshape(tokens, heads, head_width)
