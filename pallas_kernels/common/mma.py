"""Attention of a few queries to a stretch of one row's blocks by products of single warps (mma.sync), which every GPU since Ampere
has: what paged_decode and paged_attention share.

A block of threads is one warpgroup. It copies blocks of the pool into a ring of tiles in shared memory, a few tiles ahead of the
one that it multiplies: by cp.async before Hopper, by TMA since. The four warps stand side by side over the rows of queries as far
as there are 16 for each, and over the columns otherwise. The softmax's state stays in registers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.compat import save
from pallas_kernels.common.layout import LOWEST, MASKED
from pallas_kernels.common.spec import AttentionSpec
from pallas_kernels.common.splits import LOG2E
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tuning import attention_key, tuned


@dataclass(frozen=True)
class Walk:
    """How a row's context is gone through."""

    rows: int  # queries: 16, 32 or 64
    tile: int  # tokens of context that are multiplied at once; a multiple of 32
    stages: int  # tiles in the ring
    block_size: int
    width: int  # of a head in the pool
    dtype: str  # of the pool: bfloat16 or float16
    tma: bool
    interpret: bool = False  # products by JAX: the interpreter has none of a warp

    @property
    def unit(self) -> int:
        """Tokens of one copy: a block, or a tile of a block that is larger."""
        return min(self.tile, self.block_size)

    @property
    def copies(self) -> int:
        return self.tile // self.unit

    @property
    def matrix(self) -> Any:
        """Where a result of mma lies in the registers, as left and right operands do for `left` and `right`."""
        return plgpu.Layout.MMA_ACC(self.dtype, m_warps=self.rows // 16)

    @property
    def left(self) -> Any:
        return plgpu.Layout.MMA_LHS(self.dtype, m_warps=self.rows // 16)

    @property
    def right(self) -> Any:
        return plgpu.Layout.MMA_RHS(self.dtype, m_warps=self.rows // 16)


@dataclass(frozen=True)
class Softmax:
    """What becomes of a product of query and key."""

    scale: float
    window: int | None
    soft_cap: float | None


def piece(width: int) -> int:
    """Columns that are multiplied at once. The sums of wide heads leave few registers for operands."""
    return 64 if width <= 128 else 32


def columns(width: int) -> tuple[Any, ...]:
    """Slices of a width that are multiplied one after the other, so that few operands are in registers."""
    return tuple(pl.ds(start, min(piece(width), width - start)) for start in range(0, width, piece(width)))


def swizzle_of(width: int, unit: int, tma: bool) -> int | None:
    """Bytes of the longest swizzle of a matrix of 16 bits that `unit` rows can be copied to, and that a piece has whole ones of.
    cp.async deals out its pieces, 8 rows of a swizzle each, to four warps alike: None where it cannot."""
    sizes = [n for n in (128, 64, 32) if n <= 2 * piece(width) and 2 * width % n == 0]
    return next((n for n in sizes if tma or (unit // 8 * 2 * width // n) % 4 == 0), None)


def transforms(swizzle: int) -> tuple[Any, ...]:
    """Of a matrix of 16 bits in shared memory, so that the rows of a tile lie in different banks."""
    tiling = plgpu.TilingTransform((8, swizzle // 2))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def scratch(walk: Walk) -> dict[str, Any]:
    """Shared memory and barriers of a program, by name."""
    swizzle = swizzle_of(walk.width, walk.unit, walk.tma)
    assert swizzle is not None, "as supports() sees to"
    ring = plgpu.SMEM((walk.stages, walk.tile, walk.width), jnp.dtype(walk.dtype), transforms=transforms(swizzle))
    found = {
        "k_ring": ring,
        "v_ring": ring,
        "p_tile": plgpu.SMEM((walk.rows, walk.tile), jnp.dtype(walk.dtype), transforms=transforms(min(128, 2 * walk.tile))),
    }
    return found | ({"full": plgpu.Barrier(num_arrivals=2 * walk.copies, num_barriers=walk.stages)} if walk.tma else {})


@dataclass(frozen=True)
class Config:
    tile: int = 64  # as in Walk
    stages: int = 2


REDUCTION = 4096  # bytes of shared memory that a maximum over all warps goes through


def shared_bytes(rows: int, width: int, config: Config) -> int:
    """Shared memory of a program for a pool of 16 bits, without barriers."""
    return 2 * config.tile * (2 * config.stages * width + rows) + REDUCTION


def rows_for(wanted: int, width: int) -> int:
    """Rows of queries for at least this many, at most 64: the fewest with which four warps can share a result of this width."""
    return next(n for n in (16, 32, 64) if n >= wanted and width % (512 // n) == 0)


def heuristic(rows: int, width: int, chip: Chip) -> Config:
    """The deepest ring of the largest tiles of which two programs have room on a core, and scores and sums in the registers."""
    tiles = (32,) if rows == 64 and width > 128 else (64, 32)
    choices = [Config(tile, stages) for tile in tiles for stages in (3, 2)]
    return next((c for c in choices if shared_bytes(rows, width, c) <= chip.fast_memory // 2), choices[-1])


def config_of(op: str, rows: int, spec: AttentionSpec, chip: Chip) -> Config:
    """What was measured for such calls, if it is one to try for this one, or else `heuristic`."""
    default = heuristic(rows, spec.pool.width, chip)
    config = tuned(op, "mosaic_gpu_sm80", chip, attention_key(spec), default)
    return config if config in candidates(rows, spec, chip) else default


def candidates(rows: int, spec: AttentionSpec, chip: Chip) -> list[Config]:
    """As of the table of backends, for this many rows of queries."""
    default = heuristic(rows, spec.pool.width, chip)
    others = [Config(tile, stages) for tile in (32, 64) for stages in (2, 3, 4)]
    return [default] + [c for c in others if c != default and shared_bytes(rows, spec.pool.width, c) <= chip.fast_memory]


def supports(spec: AttentionSpec, chip: Chip | None) -> str | None:
    """As of the table of backends."""
    pool = spec.pool
    lines = pool.layers * pool.blocks * 2 * pool.kv_heads * pool.block_size
    if spec.dtype not in ("bfloat16", "float16"):
        return f"takes pools of bfloat16 or float16, which the warps multiply; got {spec.dtype}"
    if pool.width % 16 or pool.width > 256:
        return f"takes head widths that are multiples of 16 up to 256, as the pool stores them; got {pool.width}"
    if pool.block_size % 8 or (64 % pool.block_size and pool.block_size % 64):
        return f"takes block sizes of 8, 16, 32 and multiples of 64; got {pool.block_size}"
    least = next(n for n in (8, 16, 32) if swizzle_of(pool.width, n, chip is not None and chip.name != "sm_80"))
    if pool.block_size < least:
        return f"copies heads of width {pool.width} in blocks of at least {least} tokens on this chip; got {pool.block_size}"
    if spec.group > 64:
        return f"takes at most 64 query heads for one kv head; got {spec.group}"
    if lines >= 2**31:
        return f"counts the tokens and heads of the pool in 32 bits, at most {2**31 - 1}; got {lines}: take larger or fewer blocks"
    return None


def fetch(
    walk: Walk,
    kv_ref: Any,
    table_ref: Any,
    place: tuple,
    row: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    i: jax.Array,
    slot,
    memory,
) -> None:
    """Begins to copy keys and values of the tokens of tile i. kv_ref is the pool as a matrix, a token and head a row; `place` is
    (the first block of the layer, kv heads, the kv head). Blocks without a token from begin to end - 1 are not read: the nearest
    that has one is copied again in their place."""
    base, kv_heads, head = place
    nearest, last = (lax.div(token, jnp.int32(walk.block_size)) for token in (begin, end - 1))
    for j in range(walk.copies):
        token = i * walk.tile + j * walk.unit
        index, offset = lax.div(token, jnp.int32(walk.block_size)), lax.rem(token, jnp.int32(walk.block_size))
        block = 2 * (base + table_ref[row, jnp.clip(index, nearest, last)])
        for which, ring in ((0, memory["k_ring"]), (1, memory["v_ring"])):
            start = ((block + which) * kv_heads + head) * walk.block_size + offset
            source = kv_ref.at[pl.ds(pl.multiple_of(start, walk.unit), walk.unit)]
            target = ring.at[slot, pl.ds(j * walk.unit, walk.unit)]
            if walk.tma:
                plgpu.copy_gmem_to_smem(source, target, memory["full"].at[slot])
            else:
                plgpu.copy_gmem_to_smem(source, target, oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)


def product(walk: Walk, acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    if walk.interpret:
        return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
    return plgpu.mma(acc, a, b)


def over_columns(walk: Walk, x: jax.Array, width: int) -> jax.Array:
    """[rows] -> [rows, width]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, (walk.rows, width), [0]), walk.matrix)


def logits(walk: Walk, softmax: Softmax, s: jax.Array, last: jax.Array, i: jax.Array) -> jax.Array:
    """s [rows, tile] in units of log2, capped, and masked where a query does not see."""
    s = s * (softmax.scale * LOG2E if softmax.soft_cap is None else softmax.scale)
    if softmax.soft_cap is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), more exact than the processor's own
        s = softmax.soft_cap * LOG2E * (1.0 - 2.0 / (jnp.exp2(s * (2 * LOG2E / softmax.soft_cap)) + 1.0))
    place = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=walk.matrix) + i * walk.tile
    latest = over_columns(walk, last, walk.tile)
    seen = place <= latest
    if softmax.window is not None:
        seen &= place > latest - softmax.window
    return jnp.where(seen, s, MASKED)


def queries(walk: Walk, q_ref: Any) -> list[Callable[[], jax.Array]]:
    """Those of each piece of `columns`: held in registers as far as these have room beside the sums, others loaded again for each
    tile."""
    load = lambda part: plgpu.load(q_ref.at[:, part], layout=walk.left, optimized=False)
    parts = columns(walk.width)
    if walk.width > 128:
        return [partial(load, part) for part in parts]
    first = load(parts[0])
    return [lambda: first, *(partial(load, part) for part in parts[1:])]


def attend_tiles(
    walk: Walk,
    softmax: Softmax,
    q_ref: Any,
    kv_ref: Any,
    table_ref: Any,
    place: tuple,
    row: jax.Array,
    last: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    span: tuple[jax.Array, jax.Array],
    memory: dict[str, Any],
) -> tuple[jax.Array, jax.Array, list[jax.Array]]:
    """(maximum [rows] in units of log2, denominator [rows], weighted sums [rows, size] a piece of `columns`), f32,
    of queries q_ref [rows, D'] that attend to the tiles span[0] to span[1] - 1 of a row.

    last i32[rows]: the last place that each query sees; begin and end: of all places that one of them sees.
    """
    first, after = span
    ahead = walk.stages - 1
    parts = columns(walk.width)
    q = queries(walk, q_ref)
    ring = lambda i: lax.rem(i - first, jnp.int32(walk.stages))  # the place of a tile in it
    get = lambda i: fetch(walk, kv_ref, table_ref, place, row, begin, end, i, ring(i), memory)
    for j in range(ahead):
        pl.when(first + j < after)(lambda j=j: get(first + j))

    def step(i, carry):
        top, total, acc = carry
        slot = ring(i)
        more = i + ahead < after
        if walk.tma:
            plgpu.commit_smem()  # what was read from the slot that is written to next
        pl.when(more)(lambda: get(i + ahead))
        if walk.tma:
            plgpu.barrier_wait(memory["full"].at[slot])
        else:  # how many copies may still be under way is a constant
            pl.when(more)(lambda: plgpu.wait_gmem_to_smem(2 * walk.copies * ahead))
            pl.when(jnp.logical_not(more))(lambda: plgpu.wait_gmem_to_smem(0))
        s = zeros(walk, walk.tile)
        for mine, part in zip(q, parts, strict=True):
            s = product(walk, s, mine(), plgpu.load(memory["k_ring"].at[slot, :, part].T, layout=walk.right))
        s = logits(walk, softmax, s, last, i)
        new_top = jnp.maximum(top, jnp.max(s, axis=1))
        p, keep = jnp.exp2(s - over_columns(walk, new_top, walk.tile)), jnp.exp2(top - new_top)
        total = total * keep + jnp.sum(p, axis=1)
        memory["p_tile"][...] = p.astype(walk.dtype)
        weights = plgpu.load(memory["p_tile"], layout=walk.left)

        def gather(acc, part):
            v = plgpu.load(memory["v_ring"].at[slot, :, part], layout=walk.right)
            at = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=walk.right) + i * walk.tile
            v = jnp.where((at >= begin) & (at < end), v, jnp.zeros((), v.dtype))  # 0 * NaN is NaN
            return product(walk, acc * over_columns(walk, keep, part.size), weights, v)

        return new_top, total, [gather(one, part) for one, part in zip(acc, parts, strict=True)]

    state = (plgpu.layout_cast(jnp.full((walk.rows,), x, jnp.float32), walk.matrix.reduce(1)) for x in (LOWEST, 0.0))
    return lax.fori_loop(first, after, step, (*state, [zeros(walk, part.size) for part in parts]))


def zeros(walk: Walk, width: int) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((walk.rows, width), jnp.float32), walk.matrix)


def result(walk: Walk, top: jax.Array, total: jax.Array, acc: list[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """(out [rows, size] a piece, lse [rows]) of what attend_tiles gives; nothing seen gives 0 and -inf."""
    safe = jnp.where(total == 0.0, 1.0, total)
    lse = jnp.where(total == 0.0, -jnp.inf, (top + jnp.log2(safe)) * (1 / LOG2E))
    return [one / over_columns(walk, safe, one.shape[1]) for one in acc], lse


def store(walk: Walk, out_ref: Any, lse_ref: Any, out: list[jax.Array], lse: jax.Array) -> None:
    """Writes what `result` gives: out_ref f32[rows, D'], lse_ref f32[rows]."""
    for one, part in zip(out, columns(walk.width), strict=True):
        save(out_ref.at[:, part], one)
    save(lse_ref, lse)
