"""paged_decode in Mosaic GPU for Hopper: one program for each row, kv head and part of the row's context.

The G query heads of a kv head fill up to the 64 rows that wgmma wants. See common/hopper.py for what a program does, and
common/splits.py for the parts.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.common import hopper
from pallas_kernels.common.compat import traced_for
from pallas_kernels.common.hopper import BY_ROW, ROWS, Softmax, Walk
from pallas_kernels.common.layout import pad_axis
from pallas_kernels.common.spec import AttentionSpec, spec_of
from pallas_kernels.common.splits import default_splits, merge, tile_span
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tuning import attention_key, tuned

RESERVE = 1024  # bytes of shared memory that the system takes of a block's


@dataclass(frozen=True)
class Config:
    tile: int  # tokens of context an iteration: 64 or 128
    stages: int  # tiles in shared memory


def walk_of(config: Config, block_size: int, width: int, dtype: str, token_scales: bool, interpreted: bool = False) -> Walk:
    return Walk(config.tile, config.stages, 1, block_size, width, dtype, token_scales, interpreted)


def fits(config: Config, block_size: int, width: int, dtype: str, token_scales: bool, chip: Chip) -> bool:
    """Whether what it needs of shared memory is there."""
    walk = walk_of(config, block_size, width, dtype, token_scales)
    return hopper.shared_bytes(walk, hopper.columns(width)[0][1]) <= chip.fast_memory - RESERVE


def heuristic(block_size: int, width: int, dtype: str, token_scales: bool, chip: Chip) -> Config | None:
    """Tiles of 64 tokens, of 128 for narrow heads; as many stages as fit into shared memory, up to 4. None: not even 2 do."""
    tile = 128 if width <= 64 and jnp.dtype(dtype).itemsize == 2 else 64
    some = (Config(tile, stages) for stages in (4, 3, 2))
    return next((config for config in some if fits(config, block_size, width, dtype, token_scales, chip)), None)


def candidates(spec: AttentionSpec, chip: Chip | None) -> list[Config]:
    """As of the table of backends."""
    if supports(spec, chip) is not None or chip is None:
        return []
    shape = spec.pool.block_size, spec.pool.width, spec.dtype, spec.scales == "token"
    own = heuristic(*shape, chip)
    others = [Config(tile, stages) for tile in (64, 128) for stages in (2, 3, 4, 6)]
    return [] if own is None else [own, *(c for c in others if c != own and fits(c, *shape, chip))]


def config_of(spec: AttentionSpec, chip: Chip) -> Config:
    """What was tuned for such calls, if it is one to try for this one, or else `heuristic`."""
    sizes = spec.pool.block_size, spec.pool.width, spec.dtype, spec.scales == "token"
    default = heuristic(*sizes, chip)
    assert default is not None  # supports
    config = tuned("paged_decode", "mosaic_gpu", chip, attention_key(spec), default)
    return config if config in candidates(spec, chip) else default


def supports(spec: AttentionSpec, chip: Chip | None) -> str | None:
    """As of the table of backends."""
    pool = spec.pool
    item = jnp.dtype(spec.dtype).itemsize
    if chip is None or chip.name != "sm_90a":
        return f"is for sm_90a; got {chip.name if chip else 'no chip'}"
    if spec.dtype not in ("bfloat16", "float16", "int8", "float8_e4m3fn"):
        return f"multiplies 16-bit floats: takes pools of bfloat16, float16, int8 or float8_e4m3fn; got {spec.dtype}"
    if spec.group > ROWS:
        return f"takes up to {ROWS} query heads a kv head; got {spec.group}"
    if pool.block_size not in (8, 16, 32, 64, 128, 256):
        return f"takes blocks of 8, 16, 32, 64, 128 or 256 tokens; got {pool.block_size}"
    if pool.width % (32 if item == 1 or pool.width > 128 else 16) or pool.width > 256:
        more = min(-(-pool.width // 32) * 32, 256)
        return (
            f"takes heads stored 16, 32, … or 256 wide, from 128 on and of 8 bits multiples of 32; got {pool.width} (store {more})"
        )
    if pool.layers * pool.blocks * 2 * pool.kv_heads >= 2**31:
        return f"counts heads of blocks in 31 bits; got {pool.layers} x {pool.blocks} x 2 x {pool.kv_heads}"
    if heuristic(pool.block_size, pool.width, spec.dtype, spec.scales == "token", chip) is None:
        return f"needs two tiles of {pool.width} wide heads in {chip.fast_memory} bytes of shared memory; use narrower heads"
    return None


def body(
    q_ref: Any,
    kv_ref: Any,
    scales_ref: Any,
    layer_ref: Any,
    table_ref: Any,
    lens_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    walk: Walk,
    softmax: Softmax,
    splits: int,
    quantized: bool,
    **memory: Any,
) -> None:
    row, head, split, thread = (lax.axis_index(name) for name in ("row", "head", "split", "thread"))
    length = lens_ref[row]
    begin = jnp.int32(0) if softmax.window is None else jnp.maximum(length - softmax.window, 0)
    span = tile_span(begin, length, walk.tile, split, splits)

    @pl.when(thread == 1)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        entry = lambda i: table_ref[row, i]
        hopper.produce(walk, kv_ref, scales_ref, entry, layer_ref[0], head, begin, length, span, memory)

    @pl.when(thread == 0)
    def _():
        plgpu.set_max_registers(232, action="increase")
        padded = q_ref.shape[2]
        plgpu.copy_gmem_to_smem(q_ref.at[row, head], memory["q_tile"].at[0, pl.ds(0, padded)], memory["q_full"].at[0])
        plgpu.barrier_wait(memory["q_full"].at[0])
        last = plgpu.layout_cast(jnp.full((ROWS,), length - 1, jnp.int32), BY_ROW)
        factors = scales_ref if quantized else None
        state = hopper.consume(walk, softmax, factors, last, begin, length, span, memory, thread)
        store(state, out_ref.at[split, row, head], lse_ref.at[split, row, head], memory)


def store(state: hopper.State, out_ref: Any, lse_ref: Any, memory: dict[str, Any]) -> None:
    """Writes the result of a state to out_ref f32[rows, D'] and lse_ref f32[rows], of the first rows that there are."""
    out, lse = hopper.result(state)
    buffer, rows = memory["out_tile"].at[0], out_ref.shape[0]
    memory["lse_tile"][...] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(memory["lse_tile"].at[pl.ds(0, rows)], lse_ref)
    for part, (start, size) in zip(out, hopper.columns(out_ref.shape[1]), strict=True):
        buffer[...] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, rows)], out_ref.at[:, pl.ds(start, size)])
        plgpu.wait_smem_to_gmem(0)


def decode(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    chip: Chip,
    config: Config | None = None,
    num_splits: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """(f32[S, H, D], f32[S, H]); shapes and options as in the op. num_splits: parts of the context, by default_splits."""
    rows, heads, head_width = q.shape
    kv_heads, block_size, width = kv.shape[3:]
    token_scales = kv_scales is not None and kv_scales.ndim > 1
    config = config or config_of(spec_of(q, kv, block_tables, kv_scales), chip)
    walk = walk_of(config, block_size, width, str(kv.dtype), token_scales, interpret is not False)
    splits = num_splits or default_splits(rows * kv_heads, block_tables.shape[1] * block_size, chip.cores)
    group = heads // kv_heads
    padded = -(-group // 8) * 8
    q = pad_axis(q.astype(walk.compute), 2, width).reshape(rows, kv_heads, group, width)
    scales = jnp.ones(2, jnp.float32) if kv_scales is None else kv_scales
    shape = splits, rows, kv_heads, padded
    kernel = partial(body, walk=walk, softmax=Softmax(scale, window, soft_cap), splits=splits, quantized=kv_scales is not None)
    with traced_for(chip):
        out, lse = plgpu.kernel(
            kernel,
            out_type=tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((*shape, width), shape)),
            scratch_types=hopper.scratch(walk, hopper.columns(width)[0][1]) | {"lse_tile": plgpu.SMEM((ROWS,), jnp.float32)},
            grid=(rows, kv_heads, splits),
            grid_names=("row", "head", "split"),
            num_threads=2,
            thread_name="thread",
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=interpret,
            kernel_name="paged_decode",
        )(pad_axis(q, 2, padded), kv, scales, layer.reshape(1), block_tables, context_lens)
    sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group)
    out, lse = merge(out[..., :group, :head_width], lse[..., :group], sinks)
    return out.reshape(rows, heads, head_width), lse.reshape(rows, heads)
