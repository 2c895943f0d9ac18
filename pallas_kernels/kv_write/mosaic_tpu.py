"""kv_write on TPU, in place: XLA would copy the pool for a write of single tokens.

The memory of a TPU is read and written in tiles of 8, 16 or 32 tokens (of 32, 16 or 8 bits). A run is a stretch of new tokens in
one tile. A grid step takes a window of tokens and finds the runs that begin there, fetches their tiles all at once, puts the
tokens in, and writes the tiles back; a tile that new tokens fill is not read. No tile belongs to two runs, so that no run waits
for another, and the tiles of one step are on their way out while the next one works.

    SMEM  slots, runs             HBM -> VMEM  the tile of a run: 2 x K x tile x D', unless it is filled
    VMEM  new tokens, f32         VMEM -> HBM  the same tile

Scales per token lie along the lanes, P of a block and head together: their tile is the whole block's. Many tokens go in several
calls, one after the other, so that what is made of them beforehand stays small.
"""

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.common.counting import copied
from pallas_kernels.common.layout import PoolShape, pad_axis
from pallas_kernels.common.mosaic_tpu import DTYPES, LANES, SUBLANES, round_up, sublanes
from pallas_kernels.common.quantized import as_stored
from pallas_kernels.common.spec import WriteSpec
from pallas_kernels.common.targets import MIB, Chip
from pallas_kernels.common.tuning import tuned, write_key

WINDOW = 64  # tokens of a grid step, at most, and as many tiles on their way
NEW_BYTES = 16 * MIB  # of new tokens in f32, in a call of the kernel
BUFFERS = 16 * MIB  # of VMEM, or half of it: for the tiles of two steps and the tokens of two windows


def window_bytes(window: int, kv_heads: int, width: int, dtype: str) -> int:
    """VMEM that a window of so many tokens takes."""
    tile = sublanes(dtype)
    token = 2 * kv_heads * width
    return 2 * (window * token * tile * jnp.dtype(dtype).itemsize + (window + 2 * tile) * token * 4)


def scales_bytes(window: int, tokens: int, kv_heads: int, block_size: int) -> int:
    """VMEM that the scales take: blocks of two steps, and those of all tokens twice."""
    return 2 * 2 * round_up(kv_heads, SUBLANES) * 4 * (window * block_size + tokens + 2 * block_size + LANES)


def tokens_of(pool: PoolShape, tokens: int) -> int:
    """How many of so many tokens a call of the kernel takes: about the same in each of as few calls as can be."""
    calls = pl.cdiv(tokens, max(WINDOW, NEW_BYTES // (2 * pool.kv_heads * pool.width * 4)))
    return min(tokens, round_up(pl.cdiv(tokens, calls), WINDOW))


@dataclass(frozen=True)
class Config:
    window: int  # tokens of a grid step, a multiple of 8


def bytes_of(spec: WriteSpec, config: Config) -> int:
    return window_bytes(config.window, spec.pool.kv_heads, spec.pool.width, spec.dtype)


def default_config(spec: WriteSpec, chip: Chip) -> Config:
    window = min(WINDOW, round_up(spec.tokens, SUBLANES))
    while window > SUBLANES and bytes_of(spec, Config(window)) > min(BUFFERS, chip.fast_memory // 2):
        window = round_up(window // 2, SUBLANES)
    return Config(window)


def candidates(spec: WriteSpec, chip: Chip | None) -> list[Config]:
    assert chip is not None, "a backend for some platforms alone is asked with a chip"
    default = default_config(spec, chip)
    others = [Config(window) for window in (8, 16, 32, 64, 128, 256) if window < 2 * spec.tokens]
    return [default, *(x for x in others if x != default and bytes_of(spec, x) <= chip.fast_memory // 2)]


def config_of(spec: WriteSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if this one fits into it."""
    default = default_config(spec, chip)
    config = tuned("kv_write", "mosaic_tpu", chip, write_key(spec), default)
    return config if config.window % SUBLANES == 0 and bytes_of(spec, config) <= chip.fast_memory // 2 else default


def supports(spec: WriteSpec, chip: Chip | None) -> str | None:
    assert chip is not None, "a backend for some platforms alone is asked with a chip"
    pool, tile = spec.pool, sublanes(spec.dtype)
    if spec.dtype not in DTYPES:
        return f"takes pools of {', '.join(DTYPES)}; got {spec.dtype}"
    if pool.width % LANES:
        return f"needs head widths stored in multiples of {LANES} (pad the pool's last axis); got {pool.width}"
    if pool.block_size % tile:
        return f"needs blocks of a multiple of {tile} tokens of {spec.dtype}; got block_size {pool.block_size}"
    if spec.scales == "token" and pool.block_size % LANES:
        return (
            f"needs blocks of a multiple of {LANES} tokens for scales per token; got block_size {pool.block_size}:"
            f" take {round_up(pool.block_size, LANES)}, or scales per tensor"
        )
    needed = bytes_of(spec, Config(SUBLANES))
    if spec.scales == "token":
        needed = max(needed, scales_bytes(WINDOW, tokens_of(pool, spec.tokens), pool.kv_heads, pool.block_size))
    if needed > chip.fast_memory // 2:
        return (
            f"needs {needed} bytes of VMEM for {pool.kv_heads} heads of width {pool.width}, and has {chip.fast_memory // 2} of a"
            f" {chip.name}'s {chip.fast_memory} to use: take more shards"
        )
    return None


def run_length(slots: Any, t: jax.Array, tile: int) -> jax.Array:
    """How many tokens from t on go to one tile, by bisection: a tile has one run. slots: with at least `tile` more behind them."""
    slot, found = slots[t], jnp.int32(1)
    room = tile - lax.rem(slot, jnp.int32(tile))
    for bit in reversed(range((tile - 1).bit_length())):
        longer = found + (1 << bit)
        fits = (longer <= room) & (slots[t + jnp.minimum(longer, tile) - 1] == slot + longer - 1)
        found = jnp.where(fits, longer, found)
    return found


def kernel(
    slots_ref: Any,  # [1 + T and more]: one before the first, which nothing follows
    layer_ref: Any,
    new_ref: Any,
    pool_ref: Any,  # the same memory as out_ref
    out_ref: Any,
    buffer: Any,  # [2, window, 2, K, tile, D'], of scales [2, window, 2, K, P]
    runs: Any,  # i32[2, window] in SMEM: of each run its first token, counted from the window's, and its length
    written: Any,  # i32[2] in SMEM: tiles on their way out of each half of the buffer
    read: Any,  # a semaphore a run
    out: Any,  # and one a half
    *,
    block_size: int,
    tile: int,
    of_scales: bool,
) -> None:
    """See the head of the file."""
    del pool_ref
    step, window = pl.program_id(0), runs.shape[1]
    half, base = lax.rem(step, jnp.int32(2)), 1 + step * window
    layer = layer_ref[0]

    def tile_at(slot: jax.Array) -> Any:
        block, place = lax.div(slot, jnp.int32(block_size)), lax.rem(slot, jnp.int32(block_size))
        if of_scales:
            return out_ref.at[layer, block]
        return out_ref.at[layer, block, :, :, pl.ds(pl.multiple_of(lax.div(place, jnp.int32(tile)) * tile, tile), tile)]

    def reading(n: jax.Array, slot: jax.Array) -> Any:
        return pltpu.make_async_copy(tile_at(slot), buffer.at[half, n], read.at[n])

    def writing(half: jax.Array | int, n: jax.Array | int, slot: jax.Array | int) -> Any:
        return pltpu.make_async_copy(buffer.at[half, n], tile_at(jnp.asarray(slot, jnp.int32)), out.at[half])

    def drain(half: jax.Array | int) -> None:
        lax.fori_loop(0, written[half], lambda n, _: writing(half, 0, block_size).wait(), None)
        written[half] = 0

    @pl.when(step == 0)
    def _() -> None:
        written[0] = written[1] = 0

    drain(half)

    def find(t: jax.Array, n: jax.Array) -> jax.Array:
        slot = slots_ref[base + t]
        first = (slot >= block_size) & ((slot != slots_ref[base + t - 1] + 1) | (lax.rem(slot, jnp.int32(tile)) == 0))

        @pl.when(first)
        def _() -> None:
            length = run_length(slots_ref, base + t, tile)
            runs[0, n], runs[1, n] = t, length

            @pl.when(length < tile)
            def _() -> None:
                copy = reading(n, slot)
                copied("read", copy.dst_ref, layer, slot)
                copy.start()

        return n + first.astype(jnp.int32)

    def put(n: jax.Array, _: None) -> None:
        t, length = runs[0, n], runs[1, n]
        slot = slots_ref[base + t]
        offset = lax.rem(slot, jnp.int32(tile))

        @pl.when(length < tile)
        def _() -> None:
            reading(n, slot).wait()

        place = lax.broadcasted_iota(jnp.int32, (1, tile) if of_scales else (tile, 1), 1 if of_scales else 0)
        mine = (place >= offset) & (place < offset + length)
        for which in range(2):
            if of_scales:
                start = step * window + t + tile - offset
                around = new_ref[which, :, pl.ds(pl.multiple_of(lax.div(start, jnp.int32(LANES)) * LANES, LANES), tile + LANES)]
                fresh = pltpu.roll(around, lax.rem(tile + LANES - lax.rem(start, jnp.int32(LANES)), jnp.int32(tile + LANES)), 1)
                heads = buffer.shape[3]
                buffer[half, n, which] = jnp.where(mine, fresh[:heads, :tile], buffer[half, n, which])
                continue
            slabs = new_ref.shape[2] // buffer.shape[3]
            for head, slab in itertools.product(range(buffer.shape[3]), range(slabs)):
                at = half, n, which, head, slice(None), pl.ds(slab * LANES, LANES)
                fresh = new_ref[0, which, head * slabs + slab, pl.ds(t + tile - offset, tile)]
                buffer[at] = jnp.where(mine, fresh, buffer[at].astype(jnp.float32)).astype(buffer.dtype)
        copy = writing(half, n, slot)
        copied("write", copy.src_ref, layer, slot)
        copy.start()

    found = lax.fori_loop(0, window, find, jnp.int32(0))
    lax.fori_loop(0, found, put, None)
    written[half] = found

    @pl.when(step == pl.num_programs(0) - 1)
    def _() -> None:
        drain(0)
        drain(1)


def in_windows(x: jax.Array, window: int, tile: int) -> jax.Array:
    """[2, T, K, D'] -> f32[T / window, 2, K * D' / 128, window + 2 * tile, 128]: of each window its tokens, and one tile's before
    and after. Only rows of 128 lanes can be loaded from any row on."""
    x = x.reshape(*x.shape[:2], -1, LANES)
    count = pl.cdiv(x.shape[1], window)
    behind = count * window + 2 * round_up(tile, window) + window
    x = jnp.pad(x.astype(jnp.float32).swapaxes(1, 2), ((0, 0), (0, 0), (tile, behind - tile - x.shape[1]), (0, 0)))
    shifted = [
        x[:, :, a : a + count * window].reshape(*x.shape[:2], count, window, -1) for a in range(0, window + 2 * tile, window)
    ]
    return jnp.concatenate(shifted, axis=3)[:, :, :, : window + 2 * tile].transpose(2, 0, 1, 3, 4)


def write_runs(
    pool: jax.Array, new: jax.Array, layer: jax.Array, slots: jax.Array, *, window: int, of_scales: bool, interpret: Any
) -> jax.Array:
    """The pool [J, N, 2, K, P, D'] with new tokens as `in_windows` gives them; of_scales: the scales f32[J, N, 2, K, P] with
    new f32[2, K rounded up, P + T and more], the first token at P."""
    block_size = pool.shape[4]
    tile = block_size if of_scales else sublanes(pool.dtype)
    steps = pl.cdiv(slots.shape[0], window)
    padded = jnp.pad(slots, (1, steps * window + tile - slots.shape[0]))
    block = (1, *new.shape[1:]) if not of_scales else new.shape
    buffer = pltpu.VMEM((2, window, *pool.shape[2:4], tile, *pool.shape[5:]), pool.dtype)
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    if of_scales:
        needed = scales_bytes(window, slots.shape[0], pool.shape[3], block_size)
    else:
        needed = window_bytes(window, pool.shape[3], pool.shape[5], str(pool.dtype))
    return pl.pallas_call(
        partial(kernel, block_size=block_size, tile=tile, of_scales=of_scales),
        out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(steps,),
            in_specs=[pl.BlockSpec(block, lambda i, *_: (0 if of_scales else i,) + (0,) * (len(block) - 1)), anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                buffer,
                pltpu.SMEM((2, window), jnp.int32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.SemaphoreType.DMA((window,)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=needed * 3 // 2 + 4 * MIB),
        interpret=interpret,
        name="kv_write_scales" if of_scales else "kv_write",
    )(padded, layer.reshape(1), new, pool)


def write(
    kv: jax.Array,
    k: jax.Array,
    v: jax.Array,
    layer: jax.Array,
    slots: jax.Array,
    *,
    kv_scales: jax.Array | None,
    chip: Chip,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The pool, and where there are scales per token these too; shapes as in the op."""
    pool = PoolShape(*kv.shape[:2], *kv.shape[3:])
    scales = "none" if kv_scales is None else "tensor" if kv_scales.ndim == 1 else "token"
    tokens = k.shape[0]
    spec = WriteSpec(tokens, tokens, k.shape[2], pool, str(kv.dtype), scales)
    window, count = (config or config_of(spec, chip)).window, tokens_of(pool, tokens)

    def some(i: jax.Array, written: tuple[jax.Array, jax.Array | None]) -> tuple[jax.Array, jax.Array | None]:
        """The last call writes some tokens again: its slice stays inside."""
        new = [x if count == tokens else lax.dynamic_slice_in_dim(x, i * count, count) for x in (k, v, slots)]
        return write_some(*written, *new, layer=layer, window=window, interpret=interpret)

    calls, pools = pl.cdiv(tokens, count), (kv, kv_scales)
    kv, kv_scales = some(jnp.int32(0), pools) if calls == 1 else lax.fori_loop(0, calls, some, pools)
    return (kv, kv_scales) if scales == "token" and kv_scales is not None else kv


def write_some(
    kv: jax.Array,
    kv_scales: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    slots: jax.Array,
    *,
    layer: jax.Array,
    window: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """The pool and the scales, after one call of the kernel for each."""
    kv_heads, block_size, width = kv.shape[3:]
    k, v, made = as_stored(k, v, kv.dtype, kv_scales)
    new = in_windows(jnp.stack([pad_axis(x, 2, width) for x in (k, v)]), window, sublanes(kv.dtype))
    kv = write_runs(kv, new, layer, slots, window=window, of_scales=False, interpret=interpret)
    if made is None or kv_scales is None:
        return kv, kv_scales
    new = pad_axis(jnp.stack([x.T for x in made]), 1, round_up(kv_heads, SUBLANES))
    behind = round_up(slots.shape[0] + 2 * block_size + LANES, LANES) - slots.shape[0] - block_size
    new = jnp.pad(new, ((0, 0), (0, 0), (block_size, behind)))
    return kv, write_runs(kv_scales, new, layer, slots, window=window, of_scales=True, interpret=interpret)
