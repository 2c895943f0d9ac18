"""paged_attention on TPU: tiles of neighbouring tokens, whatever rows they are of; a job is a tile and one of its rows.

So a tile is loaded and its result stored once, and where rows are longer than tiles few queries are computed in vain. Decode rows
go to paged_decode's kernel. Where the chip's cores share a device (v5p), each takes every other tile.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.common.layout import ceil_div, pad_axis, take
from pallas_kernels.common.mosaic_tpu import Options, attend_jobs, choices, fits, measured, refusal, round_up, sized, vmem_limit
from pallas_kernels.common.spec import AttentionSpec, spec_of
from pallas_kernels.common.splits import merge
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tpu_stream import CLOSES, OPENS, Config, Jobs
from pallas_kernels.paged_decode import mosaic_tpu as decode_kernel

MIN_TOKENS = 16  # of a tile: a register of bfloat16


def default_config(spec: AttentionSpec, chip: Chip) -> Config:
    """Tiles with about twice as many rows as the chip makes operations for each byte that it reads, which is how many each byte of
    context is used for. Fewer where they do not fit."""
    rows = 2 * chip.bf16_tflop_s * 1e3 / chip.read_gb_s
    rows = next(n for n in (256, 512, 1024, 2048) if n > rows / 2**0.5)
    tokens = round_up(min(spec.tokens, max(1, rows // spec.group)), MIN_TOKENS)
    while True:
        config = sized(spec, chip, tokens, spec.group)
        if tokens == MIN_TOKENS or fits(spec, chip, config, spec.group):
            return config
        tokens = round_up(tokens // 2, MIN_TOKENS)


def candidates(spec: AttentionSpec, chip: Chip | None) -> list[Config]:
    assert chip is not None, "a backend for some platforms alone is asked with a chip"
    default = default_config(spec, chip)
    tiles = [round_up(n, MIN_TOKENS) for n in (default.tokens // 2, default.tokens, default.tokens * 2)]
    return choices(spec, chip, default, tiles, spec.group)


def config_of(spec: AttentionSpec, chip: Chip) -> Config:
    return measured("paged_attention", spec, chip, default_config(spec, chip), MIN_TOKENS, spec.group)


def most_jobs(tokens: int, rows: int, tile: int, cores: int) -> int:
    """Of a core: its tiles, and one more for each row, which may begin inside a tile."""
    return pl.cdiv(max(pl.cdiv(tokens, tile), cores), cores) + rows


def supports(spec: AttentionSpec, chip: Chip | None) -> str | None:
    assert chip is not None, "a backend for some platforms alone is asked with a chip"
    config = default_config(spec, chip)
    jobs = chip.cores * most_jobs(spec.tokens, spec.rows, config.tokens, chip.cores)
    return refusal(spec, chip, jobs=jobs, config=config, group=spec.group) or decode_kernel.supports(spec, chip)


def jobs_of(
    context_lens: jax.Array,
    query_start: jax.Array,
    num_decode: jax.Array,
    *,
    tokens: int,
    tile: int,
    window: int | None,
    block_size: int,
    cores: int,
) -> Jobs:
    """Of the rows behind the first num_decode[0]; T tokens in tiles of `tile`. Core c takes the tiles c, c + C, ..."""
    rows = context_lens.shape[0]
    most = most_jobs(tokens, rows, tile, cores)
    begins, ends = query_start[:-1], query_start[1:]
    mine = (jnp.arange(rows) >= num_decode[0]) & (ends > begins)
    core = jnp.arange(cores, dtype=jnp.int32)[:, None]
    first_tile, last_tile = lax.div(begins, jnp.int32(tile)), lax.div(jnp.maximum(ends - 1, 0), jnp.int32(tile))
    lead = first_tile + jnp.remainder(core - first_tile, cores)  # [C, S]: the first of a core's in each row
    tiles = jnp.where(mine & (lead <= last_tile), lax.div(last_tile - lead, jnp.int32(cores)) + 1, 0)
    after = jnp.cumsum(tiles, axis=1)
    total = after[:, -1:]
    job = jnp.arange(most, dtype=jnp.int32)
    real = job < total
    job = jnp.minimum(job, jnp.maximum(total - 1, 0))  # the others repeat the last one's tile
    row = jnp.minimum(jnp.sum(after[:, None] <= job[..., None], axis=2, dtype=jnp.int32), rows - 1)
    pick = lambda x: jnp.take_along_axis(x, row, axis=1)
    at = jnp.where(total > 0, pick(lead) + cores * (job - pick(after - tiles)), core)
    start = at * tile
    base = take(context_lens - ends, row) + start
    begin, end = jnp.clip(take(begins, row) - start, 0, tile), jnp.clip(take(ends, row) - start, 0, tile)
    oldest = jnp.zeros_like(base) if window is None else jnp.maximum(base + begin + 1 - window, 0)
    first = lax.div(oldest, jnp.int32(block_size))
    count = jnp.where(real, ceil_div(base + end, block_size) - first, 0)
    change = at[:, 1:] != at[:, :-1]
    edge = jnp.ones((cores, 1), bool)
    opens = real & jnp.concatenate([edge, change], 1)
    closes = real & (jnp.concatenate([change, edge], 1) | (jnp.arange(most) == total - 1))
    return Jobs(at, row, first, count, base, begin, end, OPENS * opens + CLOSES * closes)


def attend(
    q: jax.Array,
    kv: jax.Array,
    layer: jax.Array,
    block_tables: jax.Array,
    context_lens: jax.Array,
    query_start: jax.Array,
    num_decode: jax.Array,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
    kv_scales: jax.Array | None,
    chip: Chip,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """f32[T, H, D]; shapes as in the op."""
    tokens, heads, head_width = q.shape
    kv_heads, block_size, width = kv.shape[3:]
    spec = spec_of(q, kv, block_tables, kv_scales)
    rows, group, cores = spec.rows, spec.group, chip.cores
    config = config or config_of(spec, chip)
    tile = config.tokens
    count = max(pl.cdiv(tokens, tile), cores)
    tiled = pad_axis(pad_axis(q, 2, width), 0, count * tile).reshape(count, tile, kv_heads, group, width)
    tiled = tiled.swapaxes(1, 2).reshape(count, kv_heads, tile * group, width)
    jobs = jobs_of(
        context_lens, query_start, num_decode, tokens=tokens, tile=tile, window=window, block_size=block_size, cores=cores
    )
    options = Options(scale, window, soft_cap, spec.scales, group, vmem_limit(spec, config, group, chip))
    out, lse = attend_jobs(
        tiled, kv, layer, block_tables, jobs, kv_scales, apart=False, config=config, options=options, interpret=interpret
    )
    by_token = lambda x: x.reshape(count, kv_heads, tile, group, -1).swapaxes(1, 2).reshape(count * tile, heads, -1)[:tokens]
    out, lse = by_token(out)[..., :head_width], by_token(lse)[..., 0]
    if sinks is not None:
        out, _ = merge(out[None], lse[None], sinks.astype(jnp.float32))

    short = min(rows, tokens)
    lens = jnp.where(jnp.arange(short) < num_decode[0], context_lens[:short], 0)
    decoded, _ = decode_kernel.decode(
        q[:short],
        kv,
        layer,
        block_tables[:short],
        lens,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
        sinks=sinks,
        kv_scales=kv_scales,
        chip=chip,
        interpret=interpret,
    )
    number = jnp.arange(tokens)[:, None, None]
    out = jnp.where(number < query_start[-1], out, 0)  # tiles that nobody closed are undefined
    return jnp.where(number < num_decode[0], pad_axis(decoded, 0, tokens), out)
