"""Attention over a paged pool on TPU: one kernel, for decode and for prefill.

The grid goes over jobs (`tpu_stream.Jobs`). Those of one tile follow each other, so that its softmax state stays in VMEM:

    HBM   kv[layer, block]: 2 x K x P x D', contiguous
            | one copy a block, `fetch` blocks a chunk
    VMEM  a ring of `buffers` chunks -> q . k -> online softmax in f32 -> p . v -> added to the tile's output, f32
    SMEM  block tables, jobs, the place in the stream

Dao 2023, FlashAttention-2 (arXiv 2307.08691); Milakov and Gimelshein 2018, online softmax (arXiv 1805.02867).
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.layout import LOWEST, MASKED, precision_of
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.spec import AttentionSpec, Scales
from pallas_kernels.common.splits import LOG2E
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tpu_stream import CLOSES, OPENS, Config, JobReader, Jobs, Stream, scalars
from pallas_kernels.common.tuning import attention_key, tuned

LANES, SUBLANES = 128, 8  # of a vector register of 32-bit values
# How many heads are computed side by side, so that one's arithmetic hides the other's latency: of tiles of few rows. Large ones
# have enough to do for themselves, and code must not grow without need.
UNROLLED_HEADS, UNROLLED_ROWS = 8, 64
DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn")
COMPUTE_TOKENS = 512  # of context at once: four registers of scores a head for 8 rows, and dots that fill the matrix units
IN_FLIGHT = 1.0e-6  # seconds that a chunk takes to arrive; with three buffers two are on their way: about the latency of HBM


@dataclass(frozen=True)
class Options:
    """What is static besides shapes."""

    scale: float
    window: int | None
    soft_cap: float | None
    scales: Scales
    group: int  # rows that a token has in a tile: the query heads of a kv head, or more
    vmem: int  # bytes: the compiler's limit


def sublanes(dtype: Any) -> int:
    """Rows of a tile in memory: 8 of 32 bits, 16 of 16, 32 of 8."""
    return 4 * SUBLANES // jnp.dtype(dtype).itemsize


def round_up(n: int, to: int) -> int:
    return -(-n // to) * to


def vmem_of(spec: AttentionSpec, config: Config, group: int) -> int:
    """VMEM that the kernel takes, an estimate: the ring, the tiles of queries and output twice each, the softmax state, and what
    the arithmetic of two heads holds. group: rows of a token in a tile."""
    pool, size, wide = spec.pool, jnp.dtype(spec.dtype).itemsize, compute_dtype(spec.dtype).itemsize
    rows, columns = config.tokens * group, config.compute * pool.block_size
    block = 2 * pool.kv_heads * pool.block_size * pool.width * size
    if spec.scales == "token":
        block += 2 * round_up(pool.kv_heads, SUBLANES) * round_up(pool.block_size, LANES) * 4
    tile = rows * pool.width * (wide + 4) + round_up(pl.cdiv(rows, LANES), SUBLANES) * LANES * 4
    state = 2 * rows * LANES * 4
    values = rows * columns * (4 + 4 + wide) + 2 * columns * pool.width * wide + rows * pool.width * 4
    return config.buffers * config.fetch * block + pool.kv_heads * (2 * tile + state) + 2 * values


def sized(spec: AttentionSpec, chip: Chip, tokens: int, group: int) -> Config:
    """A config by rule: chunks of what HBM delivers in IN_FLIGHT, less where that would take more than half of VMEM."""
    pool = spec.pool
    block = 2 * pool.kv_heads * pool.block_size * pool.width * jnp.dtype(spec.dtype).itemsize
    compute = max(1, min(COMPUTE_TOKENS // pool.block_size, spec.blocks))
    wanted = chip.read_gb_s * 1e9 * IN_FLIGHT / chip.cores / block
    while True:
        fetch = compute * max(1, min(round(wanted / compute), pl.cdiv(spec.blocks, compute)))
        for buffers in (3, 2):
            config = Config(tokens, fetch, compute, buffers)
            if fits(spec, chip, config, group) or (fetch == 1 and buffers == 2):
                return config
        wanted, compute = wanted / 2, max(1, compute // 2)


class Mask(NamedTuple):
    """Of some columns of context: which each row of a tile sees, and which any of the tile does. What stands elsewhere may be NaN,
    or of another sequence."""

    seen: jax.Array  # bool[R or 1, columns]
    across: jax.Array  # bool[1, columns]
    down: jax.Array  # bool[columns, 1]


def kernel(
    jobs_ref: Any,
    ahead_ref: Any,
    tables_ref: Any,
    layer_ref: Any,
    kv_scales_ref: Any,
    q_ref: Any,  # [1, K, R, D']: R rows of the tile, `group` a token
    *rest: Any,
    config: Config,
    options: Options,
    width: int,
) -> None:
    """See the head of the file. rest: kv (and scales per token), out [1, 1, K, R, D'], lse [1, 1, K, R / 128, 128], and scratch."""
    sources = 2 if options.scales == "token" else 1
    pools, (out_ref, lse_ref), buffers = rest[:sources], rest[sources : sources + 2], rest[sources + 2 : 2 * sources + 2]
    arrived, top_ref, total_ref, place_ref = rest[2 * sources + 2 :]
    jobs = JobReader(jobs_ref, ahead_ref, pl.program_id(0), pl.num_programs(1))
    stream = Stream(pools, buffers, arrived, place_ref, tables_ref, width, jobs, layer_ref[0], config)
    job = pl.program_id(1)
    first, count, base, begin, end, state = (jobs.get(job, x) for x in ("first", "count", "base", "begin", "end", "state"))
    kv_heads, rows = q_ref.shape[1:3]
    block_size = buffers[0].shape[-2]
    columns, stop = config.compute * block_size, (first + count) * block_size

    @pl.when(job == 0)
    def _() -> None:
        stream.open()

    @pl.when(state % 2 == OPENS)
    def _() -> None:
        top_ref[...] = jnp.full(top_ref.shape, LOWEST, jnp.float32)
        total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

    def masks(start: jax.Array) -> Mask:
        """Of the columns from place `start` on."""
        place = start + lax.broadcasted_iota(jnp.int32, (1, columns), 1)
        position = base
        if config.tokens > 1:
            number = lax.broadcasted_iota(jnp.int32, (rows, 1), 0).astype(jnp.float32)
            token = ((number + 0.5) * (1.0 / options.group)).astype(jnp.int32)  # a vector has no division of integers
            position = jnp.where((token >= begin) & (token < end), base + token, -1)
        seen = (place <= position) & (place < stop)
        oldest = 0
        if options.window is not None:
            seen &= place > position - options.window
            oldest = base + begin + 1 - options.window
        after = jnp.minimum(base + end, stop)
        down = start + lax.broadcasted_iota(jnp.int32, (columns, 1), 0)
        return Mask(seen, (place >= oldest) & (place < after), (down >= oldest) & (down < after))

    def block_scales(slot: jax.Array, at: jax.Array, which: int, head: jax.Array | int) -> jax.Array:
        """f32[1, columns] of the keys (0) or values (1)."""
        each = [buffers[1][slot, at + j, which, pl.ds(head, 1)] for j in range(config.compute)]
        return jnp.concatenate(each, axis=1)

    def attend(slot: jax.Array, at: jax.Array, start: jax.Array, masked: bool) -> None:
        """All heads, to the `compute` blocks from `at` on of a buffer; the first of their places is `start`."""
        mask = masks(start) if masked else None
        scale = options.scale * kv_scales_ref[0] if options.scales == "tensor" else options.scale
        precision = precision_of(q_ref.dtype)

        def one(head: jax.Array | int) -> None:
            k, v = (buffers[0][slot, pl.ds(at, config.compute), x, head].reshape(columns, -1).astype(q_ref.dtype) for x in (0, 1))
            s = lax.dot_general(
                q_ref[0, head], k, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
            )
            if options.scales == "token":
                s = s * block_scales(slot, at, 0, head)
            if options.soft_cap is None:
                s = s * (scale * LOG2E)
            else:
                s = jnp.tanh(s * (scale / options.soft_cap)) * (options.soft_cap * LOG2E)
            if mask is not None:
                s = jnp.where(mask.seen, s, MASKED)
                v = jnp.where(mask.down, v, jnp.zeros_like(v))
            old = top_ref[head][:, :1]
            top = jnp.maximum(old, jnp.max(s, axis=1, keepdims=True))
            p, keep = jnp.exp2(s - top), jnp.exp2(old - top)
            total = total_ref[head][:, :1] * keep + jnp.sum(p, axis=1, keepdims=True)
            if options.scales == "token":
                scales = block_scales(slot, at, 1, head)
                p = p * (scales if mask is None else jnp.where(mask.across, scales, 0.0))
            new = jnp.dot(p.astype(v.dtype), v, precision=precision, preferred_element_type=jnp.float32)
            out_ref[0, 0, head] = out_ref[0, 0, head] * keep + new
            top_ref[head] = jnp.broadcast_to(top, (rows, LANES))
            total_ref[head] = jnp.broadcast_to(total, (rows, LANES))

        each_head(one)

    def each_head(one: Any) -> None:
        together = math.gcd(kv_heads, UNROLLED_HEADS) if rows <= UNROLLED_ROWS else 1

        def some(i: jax.Array | int, _: None) -> None:
            for j in range(together):
                one(i * together + j)

        if together == kv_heads:
            some(0, None)
        else:
            lax.fori_loop(0, kv_heads // together, some, None)

    def chunk(i: jax.Array, _: None) -> None:
        stream.start_next()
        blocks = jnp.minimum(count - i * config.fetch, config.fetch)
        slot = stream.take(blocks)

        def part(j: jax.Array, _: None) -> None:
            at = j * config.compute
            start = (first + i * config.fetch + at) * block_size
            whole = (start + columns <= stop) & (start + columns - 1 <= base + begin) & (begin == 0) & (end == config.tokens)
            if options.window is not None:
                whole &= start > base + end - 1 - options.window
            pl.when(whole)(lambda: attend(slot, at, start, False))
            pl.when(~whole)(lambda: attend(slot, at, start, True))

        lax.fori_loop(0, pl.cdiv(blocks, config.compute), part, None)

    lax.fori_loop(0, pl.cdiv(count, config.fetch), chunk, None)

    @pl.when(state >= CLOSES)
    def _() -> None:
        value_scale = kv_scales_ref[1] if options.scales == "tensor" else 1.0

        def one(head: jax.Array | int) -> None:
            total = total_ref[head]
            empty = total == 0
            safe = jnp.where(empty, 1.0, total)
            lse = jnp.where(empty, -jnp.inf, top_ref[head] * (1 / LOG2E) + jnp.log(safe))
            for n, a in enumerate(range(0, rows, LANES)):  # each of 128 rows to a lane of its own
                part = lse[a : a + LANES]
                own = lax.broadcasted_iota(jnp.int32, part.shape, 0) == lax.broadcasted_iota(jnp.int32, part.shape, 1)
                lse_ref[0, 0, head, pl.ds(n, 1)] = jnp.sum(jnp.where(own, part, 0.0), axis=0, keepdims=True)
            out_ref[0, 0, head] = out_ref[0, 0, head] * (value_scale / safe[:, :1])

        each_head(one)


def attend_jobs(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    jobs: Jobs,
    kv_scales: jax.Array | None,
    *,
    apart: bool,
    config: Config,
    options: Options,
    interpret: Any,
) -> tuple[jax.Array, jax.Array]:
    """(f32[C, Q, K, R, D'], f32[C, Q, K, R]): out and lse of Q tiles q [Q, K, R, D'], R = tokens * group rows each, token by token.

    apart: whether the C lists of jobs have outputs of their own, or (False; C is then 1 in the shapes above) close each tile in one
    list alone. Tiles that no job closes are undefined.
    """
    kv_heads, block_size, width = kv.shape[3:]
    rows, (cores, most) = q.shape[2], jobs.tile.shape
    slabs = pl.cdiv(rows, LANES)
    fields = len(Jobs._fields)
    tile = lambda c, j, jobs, *_: (jobs[(c * most + j) * fields], 0, 0, 0)
    own = lambda c, j, jobs, *_: (c if apart else 0, jobs[(c * most + j) * fields], 0, 0, 0)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    per_token = options.scales == "token"
    ring = config.buffers, config.fetch, 2, kv_heads, block_size
    scratch = [pltpu.VMEM((*ring, width), kv.dtype), *([pltpu.VMEM(ring, jnp.float32)] if per_token else [])]
    state = pltpu.VMEM((kv_heads, rows, LANES), jnp.float32)
    shapes = (cores if apart else 1, q.shape[0], kv_heads)
    pools = (kv, kv_scales) if per_token else (kv,)
    out, lse = pl.pallas_call(
        partial(kernel, config=config, options=options, width=block_tables.shape[1]),
        out_shape=(
            jax.ShapeDtypeStruct((*shapes, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((*shapes, slabs, LANES), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(cores, most),
            in_specs=[pl.BlockSpec((1, kv_heads, rows, width), tile), *[anywhere] * len(pools)],
            out_specs=(
                pl.BlockSpec((1, 1, kv_heads, rows, width), own),
                pl.BlockSpec((1, 1, kv_heads, slabs, LANES), own),
            ),
            scratch_shapes=[*scratch, pltpu.SemaphoreType.DMA((config.buffers,)), state, state, pltpu.SMEM((4,), jnp.int32)],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=options.vmem),
        interpret=interpret,
        name="paged_attention" if config.tokens > 1 else "paged_decode",
    )(
        *scalars(jobs),
        block_tables.reshape(-1),
        layer.reshape(1),
        kv_scales if options.scales == "tensor" else jnp.ones(2, jnp.float32),
        q.astype(compute_dtype(kv.dtype)),
        *pools,
    )
    return out, lse.reshape(*shapes, slabs * LANES)[..., :rows]


def scalar_bytes(rows: int, blocks: int, jobs: int) -> int:
    """SMEM that the tables and the jobs take."""
    return 4 * (rows * blocks + jobs * (len(Jobs._fields) + 1))


def refusal(spec: AttentionSpec, chip: Chip, *, jobs: int, config: Config, group: int) -> str | None:
    """Why the kernel cannot run a call on a chip with this config, or None. jobs: of all cores."""
    pool, limit = spec.pool, chip.scalar_memory // 2
    if spec.dtype not in DTYPES:
        return f"takes pools of {', '.join(DTYPES)}; got {spec.dtype}"
    if pool.width % LANES:
        return f"needs head widths stored in multiples of {LANES} (pad the pool's last axis); got {pool.width}"
    if pool.block_size % sublanes(spec.dtype):
        return f"needs blocks of a multiple of {sublanes(spec.dtype)} tokens of {spec.dtype}; got block_size {pool.block_size}"
    if spec.scales == "token" and pool.block_size % LANES:
        return (
            f"needs blocks of a multiple of {LANES} tokens for scales per token; got block_size {pool.block_size}:"
            f" take {round_up(pool.block_size, LANES)}, or scales per tensor"
        )
    needed = scalar_bytes(spec.rows, spec.blocks, jobs)
    if needed > limit:
        return (
            f"needs {needed} bytes of scalar memory for tables of {spec.rows} rows x {spec.blocks} blocks, and has {limit} of a"
            f" {chip.name}'s {chip.scalar_memory} to use: take a larger block_size, or fewer rows or tokens a row"
        )
    needed = vmem_of(spec, config, group)
    if not fits(spec, chip, config, group):
        return (
            f"needs {needed} bytes of VMEM for blocks of {pool.kv_heads} heads x {pool.block_size} tokens, and has"
            f" {chip.fast_memory // 2} of a {chip.name}'s {chip.fast_memory} to use: take a smaller block_size or more shards"
        )
    return None


def fits(spec: AttentionSpec, chip: Chip, config: Config, group: int) -> bool:
    """Whether the kernel takes at most half of VMEM."""
    return vmem_of(spec, config, group) <= chip.fast_memory // 2


def measured(op: str, spec: AttentionSpec, chip: Chip, default: Config, tile: int, group: int) -> Config:
    """What was tuned for such calls, if it is for tiles of a multiple of `tile` tokens, is whole, and fits, or else the default."""
    config = tuned(op, "mosaic_tpu", chip, attention_key(spec), default)
    whole = config.tokens % tile == 0 and config.fetch % config.compute == 0 and config.buffers >= 2
    return config if whole and fits(spec, chip, config, group) else default


def choices(spec: AttentionSpec, chip: Chip, default: Config, tiles: Sequence[int], group: int) -> list[Config]:
    """For a tuner: the default, and what else fits of tiles of so many tokens, half to four times the context at once, one to four
    times that a chunk, and two or three chunks."""
    found = [default]
    computes = [default.compute // 2, default.compute, default.compute * 2, default.compute * 4]
    for tokens, compute, times, buffers in itertools.product(tiles, computes, (1, 2, 4), (2, 3)):
        config = Config(tokens, compute * times, compute, buffers)
        if 1 <= compute <= spec.blocks and config not in found and fits(spec, chip, config, group):
            found.append(config)
    return found


def vmem_limit(spec: AttentionSpec, config: Config, group: int, chip: Chip) -> int:
    """What the compiler may use: the estimate, and room for its error."""
    return min(2 * vmem_of(spec, config, group) + (4 << 20), chip.fast_memory * 9 // 10)
