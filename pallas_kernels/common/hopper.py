"""Attention of 64 queries to a stretch of one row's blocks, on Hopper: what paged_decode and paged_attention share.

A block of threads is one producer warpgroup, which copies blocks of the pool into a ring of tiles in shared memory (TMA), and one
or two consumer warpgroups, which multiply them with their own 64 rows of queries (wgmma) and keep an online softmax in registers.
Each tile has two barriers that say it is full (keys, values) and two that say it is free. The producer runs ahead by the number of
stages.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common.layout import LOWEST, MASKED
from pallas_kernels.common.quantized import compute_dtype, is_quantized
from pallas_kernels.common.splits import LOG2E

State = tuple[jax.Array, jax.Array, list[jax.Array]]
"""Of 64 queries: the maximum [64] of their scores in units of log2, the softmax's denominator [64] and the weighted sums
[64, size], one for each piece of `columns`; f32."""

ROWS = 64  # of queries a consumer has: the M of wgmma
WIDE = 128  # columns of a weighted sum that are computed at once; more would spill registers
HALF = 64  # columns that are converted at once, and that lie side by side in shared memory
MATRIX = plgpu.Layout.WGMMA
BY_ROW = plgpu.Layout.WGMMA.reduce(1)
BY_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclass(frozen=True)
class Walk:
    """How a row's context is gone through."""

    tile: int  # tokens of a tile; a multiple of 64
    stages: int  # tiles in the ring
    consumers: int  # warpgroups of 64 queries each
    block_size: int
    width: int  # of the pool
    dtype: str  # of the pool
    token_scales: bool
    interpreted: bool = False

    @property
    def unit(self) -> int:
        """Tokens of one copy: a block, or a tile of a block that is larger."""
        return min(self.tile, self.block_size)

    @property
    def copies(self) -> int:
        return self.tile // self.unit

    @property
    def narrow(self) -> bool:
        """Whether the pool is of 8 bits, which are converted before they are multiplied."""
        return is_quantized(self.dtype)

    @property
    def compute(self) -> jnp.dtype:
        """What the tensor cores multiply."""
        return compute_dtype(self.dtype)


def columns(width: int, most: int = WIDE) -> tuple[tuple[int, int], ...]:
    """(start, size) of equal pieces of a width, each of whole swizzled rows."""
    unit = math.gcd(width, HALF)
    size = max((n for n in range(unit, most + 1, unit) if width % n == 0), default=unit)
    return tuple((start, size) for start in range(0, width, size))


def swizzled(width: int, dtype: Any) -> tuple[Any, ...]:
    """Transforms of a matrix in shared memory as wgmma wants it. Both factors must have the same, so those of a width are used for
    every matrix."""
    side = math.gcd(width, HALF)
    tiling = plgpu.TilingTransform((8, side))  # pyright: ignore[reportAbstractUsage]
    return tiling, plgpu.SwizzleTransform(side * jnp.dtype(dtype).itemsize)  # pyright: ignore[reportAbstractUsage]


def scratch(walk: Walk, out_width: int) -> dict[str, Any]:
    """Shared memory and barriers of a program, by name. out_width: columns of the buffer that results leave through."""
    ring = walk.stages, walk.tile, walk.width
    matrix = lambda *shape: plgpu.SMEM(shape, walk.compute, transforms=swizzled(walk.width, walk.compute))
    full = plgpu.Barrier(num_arrivals=walk.copies * (1 + walk.token_scales), num_barriers=walk.stages)
    free = plgpu.Barrier(num_arrivals=walk.consumers, num_barriers=walk.stages)
    stored = plgpu.SMEM(ring, jnp.dtype(walk.dtype), transforms=swizzled(walk.width, walk.dtype))
    found = {
        "q_tile": matrix(walk.consumers, ROWS, walk.width),
        "p_tile": matrix(walk.consumers, ROWS, walk.tile),
        "k_ring": stored,
        "v_ring": stored,
        "out_tile": plgpu.SMEM((walk.consumers, ROWS, out_width), jnp.float32),
        "q_full": plgpu.Barrier(num_barriers=walk.consumers),
        "k_full": full,
        "v_full": full,
        "k_free": free,
        "v_free": free,
    }
    if walk.narrow:
        found |= {"k_wide": matrix(walk.tile, walk.width), "v_wide": matrix(walk.tile, walk.width)}
    if walk.token_scales:
        one = plgpu.SMEM((walk.stages, walk.tile), jnp.float32)
        found |= {"k_scale": one, "v_scale": one}
    if walk.consumers > 1:
        found["v_clean"] = plgpu.Barrier(num_arrivals=walk.consumers)
    return found


def shared_bytes(walk: Walk, out_width: int) -> int:
    """Of `scratch`, with what the compiler adds: alignment of each buffer to 1024 bytes, barriers, and sums across warps."""
    item = walk.compute.itemsize
    stored = 2 * walk.stages * walk.tile * (walk.width * jnp.dtype(walk.dtype).itemsize + 4 * walk.token_scales)
    wide = 2 * walk.tile * walk.width * item if walk.narrow else 0
    each = ROWS * ((walk.width + walk.tile) * item + 4 * out_width)
    return stored + wide + walk.consumers * each + 8 * 1024


def produce(
    walk: Walk,
    kv: Any,
    scales: Any,
    entry: Callable[[jax.Array], jax.Array],
    layer: jax.Array,
    head: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    span: tuple[jax.Array, jax.Array],
    memory: dict[str, Any],
) -> None:
    """The producer: copies what the tiles span[0] to span[1] - 1 hold of the tokens begin to end - 1.

    kv [J, N, 2, K, P, D'] and scales in device memory; entry(i): the i-th entry of the row's table. Blocks that hold none of these
    tokens are not looked up and not copied; what is in their place in shared memory is anything.
    """
    first, after = span
    rings = (memory["k_ring"], memory["k_full"], memory.get("k_scale")), (memory["v_ring"], memory["v_full"], memory.get("v_scale"))

    def lookup(i):
        """Of each copy of tile i its block; a block of the row's for those that are not made."""
        place = (jnp.clip(i * walk.tile + c * walk.unit, begin, end - 1) for c in range(walk.copies))
        return tuple(entry(lax.div(x, jnp.int32(walk.block_size))) for x in place)

    def copy(block, start, slot, c):
        here, inside = pl.ds(c * walk.unit, walk.unit), pl.ds(lax.rem(start, jnp.int32(walk.block_size)), walk.unit)
        inside = slice(None) if walk.unit == walk.block_size else inside
        for which, (ring, full, factors) in enumerate(rings):
            plgpu.copy_gmem_to_smem(kv.at[layer, block, which, head, inside], ring.at[slot, here], full.at[slot])
            if factors is not None:
                plgpu.copy_gmem_to_smem(scales.at[layer, block, which, head, inside], factors.at[slot, here], full.at[slot])

    def skip(slot):
        for _, full, factors in rings:
            for _ in range(1 if factors is None else 2):
                plgpu.barrier_arrive(full.at[slot])

    def step(i, blocks):
        slot = lax.rem(i - first, jnp.int32(walk.stages))

        pl.when(i - first >= walk.stages)(lambda: wait_until_free(memory, slot))
        for c, block in enumerate(blocks):
            start = i * walk.tile + c * walk.unit
            if walk.copies == 1:
                copy(block, start, slot, c)
            else:
                live = (start + walk.unit > begin) & (start < end)
                pl.when(live)(lambda block=block, start=start, c=c: copy(block, start, slot, c))
                pl.when(jnp.logical_not(live))(lambda: skip(slot))
        return lookup(jnp.minimum(i + 1, after - 1))

    @pl.when(first < after)
    def _():
        lax.fori_loop(first, after, step, lookup(first))

        @pl.loop(jnp.maximum(after - walk.stages, first), after)
        def _(i):  # a barrier must not end with an arrival that nobody waited for
            wait_until_free(memory, lax.rem(i - first, jnp.int32(walk.stages)))


def wait_until_free(memory: dict[str, Any], slot: jax.Array) -> None:
    plgpu.barrier_wait(memory["k_free"].at[slot])
    plgpu.barrier_wait(memory["v_free"].at[slot])


@dataclass(frozen=True)
class Softmax:
    """What becomes of a product of query and key."""

    scale: float
    window: int | None
    soft_cap: float | None


def consume(
    walk: Walk,
    softmax: Softmax,
    scales: Any,
    last: jax.Array,
    begin: jax.Array,
    end: jax.Array,
    span: tuple[jax.Array, jax.Array],
    memory: dict[str, Any],
    wg: jax.Array,
    whole: jax.Array | None = None,
) -> State:
    """A consumer: the state of its queries, which lie in q_tile.

    last i32[64]: the last place that each query sees; -1: none. begin, end and span as in `produce`. scales: f32[2] unless they are
    per token. whole: the tiles of the span before this one are seen from end to end by all queries, without a mask.
    """
    first, after = span
    of_tensor = None if walk.token_scales else scales
    unit = softmax.scale if softmax.soft_cap is not None else softmax.scale * LOG2E
    factor = jnp.float32(unit) if of_tensor is None else unit * of_tensor[0]
    q, p_tile = memory["q_tile"].at[wg], memory["p_tile"].at[wg]

    def step(masked, i, carry):
        top, total, acc = carry
        slot = lax.rem(i - first, jnp.int32(walk.stages))
        bounds = (begin, end) if masked else None
        s = product(q, keys(walk, memory, slot).transpose((1, 0)), (ROWS, walk.tile)) * factor
        if walk.token_scales:
            s *= scales_of(memory["k_scale"], slot, (ROWS, walk.tile))
        if walk.token_scales or not walk.narrow:
            plgpu.barrier_arrive(memory["k_free"].at[slot])
        s = logits(walk, softmax, s, last, masked, i)
        new_top = jnp.maximum(top, jnp.max(s, axis=1))
        p, keep = jnp.exp2(s - over_columns(new_top, s.shape)), jnp.exp2(top - new_top)
        total = total * keep + jnp.sum(p, axis=1)
        plgpu.barrier_wait(memory["v_full"].at[slot])
        # Before the values, so that p needs no registers while they are converted.
        p_tile[...] = weights(walk, memory, slot, bounds, i, p).astype(walk.compute)
        v = values(walk, memory, slot, bounds, i, wg)
        plgpu.commit_smem()
        acc = [
            plus_product(walk, a * over_columns(keep, a.shape), p_tile, v.at[:, pl.ds(start, size)])
            for a, (start, size) in zip(acc, columns(walk.width), strict=True)
        ]
        if not walk.narrow:
            plgpu.barrier_arrive(memory["v_free"].at[slot])
        return new_top, total, acc

    state = empty_state(walk)
    if whole is not None:
        state = lax.fori_loop(first, whole, partial(step, False), state)
    top, total, acc = lax.fori_loop(first if whole is None else whole, after, partial(step, True), state)
    return top, total, acc if of_tensor is None else [a * of_tensor[1] for a in acc]


def empty_state(walk: Walk) -> State:
    """Of 64 queries that have seen nothing yet."""
    constant = lambda value, shape, layout: plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
    sums = [constant(0, (ROWS, size), MATRIX) for _, size in columns(walk.width)]
    return constant(LOWEST, (ROWS,), BY_ROW), constant(0, (ROWS,), BY_ROW), sums


def result(state: State) -> tuple[list[jax.Array], jax.Array]:
    """(out [64, size] a piece, lse [64]); nothing seen gives 0 and -inf."""
    top, total, acc = state
    safe = jnp.where(total == 0.0, 1.0, total)
    lse = jnp.where(total == 0.0, -jnp.inf, (top + jnp.log2(safe)) * (1 / LOG2E))
    return [a / over_columns(safe, a.shape) for a in acc], lse


def over_columns(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """[64] -> [64, n]."""
    return lax.broadcast_in_dim(x, shape, [0])


def product(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """a @ b in f32, of two matrices in shared memory."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def plus_product(walk: Walk, x: jax.Array, a: Any, b: Any) -> jax.Array:
    """x + a @ b in f32."""
    if walk.interpreted:  # the interpreter has no accumulator that begins with something
        return x + product(a, b, (x.shape[0], x.shape[1]))
    total: Any = pl.run_state(lambda acc: plgpu.wgmma(acc, a, b))(plgpu.WGMMAAccumulatorRef.init(x))
    return total


def logits(walk: Walk, softmax: Softmax, s: jax.Array, last: jax.Array, masked: bool, i: jax.Array) -> jax.Array:
    """Scores of tile i in units of log2, capped, and masked unless all of the tile is seen. last as in `consume`."""
    if softmax.soft_cap is not None:  # tanh(x) = 1 - 2 / (exp(2 x) + 1), which is more exact than the processor's own
        s = softmax.soft_cap * LOG2E * (1.0 - 2.0 / (jnp.exp2(s * (2 * LOG2E / softmax.soft_cap)) + 1.0))
    if not masked:
        return s
    place = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=MATRIX) + i * walk.tile
    latest = over_columns(last, s.shape)
    seen = place <= latest
    if softmax.window is not None:
        seen &= place > latest - softmax.window
    return jnp.where(seen, s, MASKED)


def widen(walk: Walk, source: Any, target: Any, keep: Callable[[jax.Array], jax.Array] | None) -> None:
    """target [tile, D'] = source [tile, D'] in the dtype of the dots, 0 where keep(place in the tile) says no."""
    for start, size in columns(walk.width, HALF if walk.narrow else WIDE):
        at = slice(None), pl.ds(start, size)
        layout = plgpu.Layout.WGMMA_UPCAST_2X if walk.narrow else MATRIX  # 32 bits at once
        x = plgpu.load(source.at[at], layout=layout)
        x = x.astype(jnp.float32)
        if keep is not None:
            x = jnp.where(keep(plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)), x, 0.0)
        target[at] = x.astype(walk.compute)
    plgpu.commit_smem()


def scales_of(ring: Any, slot: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """f32[64, tile]: the scale of each token of a tile."""
    return lax.broadcast_in_dim(plgpu.load(ring.at[slot], layout=BY_COLUMN), shape, [1])


def keys(walk: Walk, memory: dict[str, Any], slot: jax.Array) -> Any:
    """The matrix [tile, D'] of a tile's keys, once it is there."""
    plgpu.barrier_wait(memory["k_full"].at[slot])
    if not walk.narrow:
        return memory["k_ring"].at[slot]
    widen(walk, memory["k_ring"].at[slot], memory["k_wide"], None)
    if not walk.token_scales:
        plgpu.barrier_arrive(memory["k_free"].at[slot])
    return memory["k_wide"]


Bounds = tuple[jax.Array, jax.Array] | None
"""Begin and end of the context; None: all of the tile is within."""


def within(bounds: Bounds, place: jax.Array) -> Callable[[jax.Array], jax.Array] | None:
    """Which places of the tile that begins at `place` are in the context."""
    return None if bounds is None else lambda at: (at >= bounds[0] - place) & (at < bounds[1] - place)


def weights(walk: Walk, memory: dict[str, Any], slot: jax.Array, bounds: Bounds, i: jax.Array, p: jax.Array) -> jax.Array:
    """p [64, tile] with the scales of the values that it is multiplied with; those outside the context may be NaN."""
    if not walk.token_scales:
        return p
    scale, keep = scales_of(memory["v_scale"], slot, (ROWS, walk.tile)), within(bounds, i * walk.tile)
    if keep is not None:
        scale = jnp.where(keep(plgpu.broadcasted_iota(jnp.int32, scale.shape, 1, layout=MATRIX)), scale, 0.0)
    return p * scale


def values(walk: Walk, memory: dict[str, Any], slot: jax.Array, bounds: Bounds, i: jax.Array, wg: jax.Array) -> Any:
    """The matrix [tile, D'] of a tile's values, which are there, with 0 outside the context: what lies there may be NaN, and
    0 * NaN is NaN."""
    v, place = memory["v_ring"].at[slot], i * walk.tile
    keep = within(bounds, place)
    if walk.narrow:
        widen(walk, v, memory["v_wide"], keep)
        plgpu.barrier_arrive(memory["v_free"].at[slot])
        return memory["v_wide"]

    if bounds is not None:

        @pl.when((place < bounds[0]) | (place + walk.tile > bounds[1]))
        def _():
            if walk.consumers == 1:
                widen(walk, v, v, keep)
                return
            pl.when(wg == 0)(lambda: widen(walk, v, v, keep))
            plgpu.barrier_arrive(memory["v_clean"])
            plgpu.barrier_wait(memory["v_clean"])

    return v
