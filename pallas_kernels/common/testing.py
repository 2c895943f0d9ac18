"""Inputs for the tests of the ops: a pool with shuffled blocks, and NaN in every slot that no token was written to."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from pallas_kernels.common.quantized import largest
from pallas_kernels.common.spec import Scales


class Context(NamedTuple):
    kv: np.ndarray  # [J, N, 2, K, P, D'], NaN where nothing was written, the scrap block included
    block_tables: np.ndarray  # i32[S, B]; entries past a row's length name blocks full of NaN
    context_lens: np.ndarray  # i32[S]
    kv_scales: np.ndarray | None = None  # of a pool of 8 bits; NaN where nothing was written


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
    scales: Scales = "none",
) -> Context:
    """Rows of these lengths, each in blocks of its own in random order; only `layer` is written. int8 has no NaN: there the
    largest number stands for it."""
    stored_width = stored_width or width
    most = max(1, *(-(-n // block_size) for n in lens))
    num_blocks = 2 + most * len(lens)
    shape = (layers, num_blocks, 2, kv_heads, block_size)
    kv = np.full((*shape, stored_width), 127 if dtype == "int8" else np.nan, jnp.dtype(dtype))
    kv_scales = {"none": None, "tensor": np.array([0.02, 0.03], np.float32), "token": np.full(shape, np.nan, np.float32)}[scales]
    tables = 1 + rng.permutation(num_blocks - 1)[: most * len(lens)].reshape(len(lens), most).astype(np.int32)
    for s, n in enumerate(lens):
        position = np.arange(n)
        block, place = tables[s, position // block_size], position % block_size
        fresh = np.zeros((n, 2, kv_heads, stored_width), np.float32)
        fresh[..., :width] = rng.standard_normal((n, 2, kv_heads, width))
        if scales != "none":
            by = (rng.uniform(0.5, 2, (n, 2, kv_heads)) if scales == "token" else np.ones((n, 2, kv_heads))).astype(np.float32)
            fresh = np.clip(fresh / np.abs(fresh).max(-1, keepdims=True) * largest(dtype) * by[..., None] / 2, -100, 100)
            if scales == "token":
                assert kv_scales is not None
                kv_scales[layer, block, :, :, place] = by / 50
        kv[layer, block, :, :, place] = (np.round(fresh) if dtype == "int8" else fresh).astype(kv.dtype)
    return Context(kv, tables, np.array(lens, np.int32), kv_scales)


def share(context: Context, groups: dict[tuple[int, ...], int]) -> None:
    """Lets the rows of each group begin with the same blocks: so many of the first one's."""
    for rows, count in groups.items():
        context.block_tables[list(rows), :count] = context.block_tables[rows[0], :count]


def tolerance(context: Context) -> float:
    """The largest absolute error an attention op may make on this cache: relative to the largest value in it, what the dtype of
    the products gives."""
    values = context.kv.astype(np.float64)
    if context.kv_scales is not None:
        values = values * (context.kv_scales[..., None] if context.kv_scales.ndim > 1 else context.kv_scales[:, None, None, None])
    top = float(np.nanmax(np.abs(values), initial=0.0))
    eps = {"float32": 2e-5, "float16": 2.0**-10}.get(context.kv.dtype.name, 2.0**-7)
    return max(eps * top, 1e-6)
