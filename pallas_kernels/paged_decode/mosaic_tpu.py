"""paged_decode on TPU: a tile is one token with all its heads, a job the row that it is of.

Where the chip's cores share a device (v5p), the context is split between them, and `splits.merge` joins what they return.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.common.layout import ceil_div, pad_axis
from pallas_kernels.common.mosaic_tpu import (
    SUBLANES,
    Options,
    attend_jobs,
    choices,
    measured,
    refusal,
    round_up,
    sized,
    vmem_limit,
)
from pallas_kernels.common.spec import AttentionSpec, spec_of
from pallas_kernels.common.splits import merge
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tpu_stream import CLOSES, OPENS, Config, Jobs


def rows_of(spec: AttentionSpec) -> int:
    """Of a tile: the query heads of a kv head, in whole registers."""
    return round_up(spec.group, SUBLANES)


def default_config(spec: AttentionSpec, chip: Chip) -> Config:
    return sized(spec, chip, 1, rows_of(spec))


def candidates(spec: AttentionSpec, chip: Chip | None) -> list[Config]:
    assert chip is not None, "a backend for some platforms alone is asked with a chip"
    return choices(spec, chip, default_config(spec, chip), [1], rows_of(spec))


def config_of(spec: AttentionSpec, chip: Chip) -> Config:
    return measured("paged_decode", spec, chip, default_config(spec, chip), 1, rows_of(spec))


def supports(spec: AttentionSpec, chip: Chip | None) -> str | None:
    assert chip is not None, "a backend for some platforms alone is asked with a chip"
    return refusal(spec, chip, jobs=chip.cores * spec.rows, config=default_config(spec, chip), group=rows_of(spec))


def jobs_of(context_lens: jax.Array, window: int | None, block_size: int, parts: int) -> Jobs:
    """A job a row and part. Of n blocks that a row sees, part i of p has those from (i * n + r) // p on; r differs from row to
    row, so that odd blocks are shared evenly."""
    rows = context_lens.shape[0]
    row, part = jnp.arange(rows, dtype=jnp.int32), jnp.arange(parts + 1, dtype=jnp.int32)[:, None]
    begin = jnp.zeros_like(context_lens) if window is None else jnp.maximum(context_lens - window, 0)
    skipped = lax.div(begin, jnp.int32(block_size))
    blocks = ceil_div(context_lens, block_size) - skipped
    cuts = skipped + lax.div(part * blocks + lax.rem(row, jnp.int32(parts)), jnp.int32(parts))
    every = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), (parts, rows))
    return Jobs(
        tile=every(row),
        row=every(row),
        first=cuts[:-1],
        count=cuts[1:] - cuts[:-1],
        base=every(context_lens - 1),
        begin=every(0),
        end=every(1),
        state=every(OPENS + CLOSES),
    )


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
    """(f32[S, H, D], f32[S, H]); shapes as in the op. num_splits: into how many parts the context is cut, by default as many as
    the chip has cores."""
    rows, heads, head_width = q.shape
    kv_heads, block_size, width = kv.shape[3:]
    spec = spec_of(q, kv, block_tables, kv_scales)
    config = config or config_of(spec, chip)
    group, padded = spec.group, rows_of(spec)
    q = pad_axis(pad_axis(q, 2, width).reshape(rows, kv_heads, group, width), 2, padded)
    options = Options(scale, window, soft_cap, spec.scales, padded, vmem_limit(spec, config, padded, chip))
    jobs = jobs_of(context_lens, window, block_size, num_splits or chip.cores)
    out, lse = attend_jobs(
        q, kv, layer, block_tables, jobs, kv_scales, apart=True, config=config, options=options, interpret=interpret
    )
    out, lse = out[..., :group, :head_width], lse[..., :group]
    if out.shape[0] > 1 or sinks is not None:
        out, lse = merge(out, lse, None if sinks is None else sinks.astype(jnp.float32).reshape(kv_heads, group))
    else:
        out, lse = out[0], lse[0]
    return out.reshape(rows, heads, head_width), lse.reshape(rows, heads)
