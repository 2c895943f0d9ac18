"""Inputs for the tests of the ops: a pool with shuffled blocks, and NaN in every slot that no token was written to."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np


class Context(NamedTuple):
    kv: np.ndarray  # [J, N, 2, K, P, D'], NaN where nothing was written, the scrap block included
    block_tables: np.ndarray  # i32[S, B]; entries past a row's length name blocks full of NaN
    context_lens: np.ndarray  # i32[S]


def make_context(
    rng: np.random.Generator,
    lens: tuple[int, ...],
    *,
    kv_heads: int,
    block_size: int,
    width: int,
    stored_width: int | None = None,
    layers: int = 2,
    layer: int = 1,
    dtype: str = "float32",
) -> Context:
    """Rows of these lengths, each in blocks of its own in random order; only `layer` is written."""
    stored_width = stored_width or width
    most = max(1, *(-(-n // block_size) for n in lens))
    num_blocks = 2 + most * len(lens)
    kv = np.full((layers, num_blocks, 2, kv_heads, block_size, stored_width), np.nan, jnp.dtype(dtype))
    tables = 1 + rng.permutation(num_blocks - 1)[: most * len(lens)].reshape(len(lens), most).astype(np.int32)
    for s, n in enumerate(lens):
        position = np.arange(n)
        block, place = tables[s, position // block_size], position % block_size
        fresh = np.zeros((n, 2, kv_heads, stored_width), np.float32)
        fresh[..., :width] = rng.standard_normal((n, 2, kv_heads, width))
        kv[layer, block, :, :, place] = fresh.astype(kv.dtype)
    return Context(kv, tables, np.array(lens, np.int32))


def share(context: Context, groups: dict[tuple[int, ...], int]) -> None:
    """Lets the rows of each group begin with the same blocks: so many of the first one's."""
    for rows, count in groups.items():
        context.block_tables[list(rows), :count] = context.block_tables[rows[0], :count]


def tolerance(dtype: str, values: np.ndarray) -> float:
    """The largest absolute error an attention op may make on a cache of this dtype, given the largest value in it."""
    top = float(np.nanmax(np.abs(values.astype(np.float64)), initial=0.0))
    return max({"float32": 2e-5, "bfloat16": 2.0**-7}[dtype] * top, 1e-6)
