"""Runs texts through a model's forward pass and a paged pool, by hand: no scheduler, no engine."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from pagedjax.config import ModelConfig
from pagedjax.device.attention import Rows
from pagedjax.device.sharding import POOL
from pagedjax.models import model_for

BLOCK = 8  # P
ROWS = 3  # S: two texts and a row of padding
TOKENS = 80  # T of a step that is not all decode
SCRAP = 1e3  # what the pool holds before anything is written: finite, and loud if it is read

Pass = Callable[..., tuple[jax.Array, jax.Array]]


def compiled_pass(cfg: ModelConfig) -> Pass:
    """(params, tokens, kv, rows) -> (logits of every token, kv). Nearly all the time of these tests is compilation, so LLVM's
    optimizations, a third of it, are off."""
    model = model_for(cfg.architecture)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def one_pass(params, tokens, kv, rows):
        hidden, kv = model.forward(params, tokens, kv, rows, cfg)
        return model.logits(params, hidden, cfg), kv

    return one_pass


def shuffled_tables(texts: Sequence[Sequence[int]], seed: int) -> np.ndarray:
    """i32[S, B]: every text's blocks, in random order; block 0 is scrap."""
    width = max(-(-len(ids) // BLOCK) for ids in texts)
    tables = np.zeros((ROWS, width), np.int32)
    tables[: len(texts)] = 1 + np.random.default_rng(seed).permutation(len(texts) * width).reshape(len(texts), width)
    return tables


def run(
    one_pass: Pass,
    params: Any,
    cfg: ModelConfig,
    mesh: Mesh,
    texts: Sequence[Sequence[int]],
    steps: Sequence[Sequence[int]],
    *,
    tables: np.ndarray,
    read_tables: np.ndarray | None = None,
) -> list[np.ndarray]:
    """f32[length, V] of each text. `steps` says how many tokens of each text a step takes; a step of at most one each runs with
    as many tokens as rows, any other with TOKENS. `read_tables`, if given, are the block tables attention sees."""
    shape = (cfg.num_layers, int(tables.max()) + 1, 2, cfg.num_kv_heads, BLOCK, cfg.head_width)
    kv = jax.device_put(jnp.full(shape, SCRAP, jnp.float32), NamedSharding(mesh, POOL))
    done, out = [0] * len(texts), [[] for _ in texts]
    make = partial(make_step, texts=texts, mesh=mesh, tables=tables, read=tables if read_tables is None else read_tables)
    for counts in steps:
        order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: counts[i] > 1)
        size = ROWS if max(counts) == 1 else TOKENS
        ids, rows, starts = make(counts=counts, done=done, order=order, size=size)
        scores, kv = one_pass(params, ids, kv, rows)
        for place, i in enumerate(order):
            out[i].append(np.asarray(scores[starts[place] : starts[place + 1]]))
            done[i] += counts[i]
    assert done == [len(ids) for ids in texts], "the steps must cover the texts"
    return [np.concatenate(parts) for parts in out]


def make_step(
    *,
    texts: Sequence[Sequence[int]],
    counts: Sequence[int],
    done: Sequence[int],
    order: Sequence[int],
    size: int,
    mesh: Mesh,
    tables: np.ndarray,
    read: np.ndarray,
) -> tuple[jax.Array, Rows, np.ndarray]:
    """(tokens i32[size], rows, query_start)."""
    ids, positions, slots = (np.zeros(size, np.int32) for _ in range(3))
    starts, lens, table = np.zeros(ROWS + 1, np.int32), np.zeros(ROWS, np.int32), np.zeros_like(tables)
    at = 0
    for place, i in enumerate(order):
        begin, end = done[i], done[i] + counts[i]
        here, position = slice(at, at + counts[i]), np.arange(begin, end)
        ids[here], positions[here] = texts[i][begin:end], position
        slots[here] = tables[i, position // BLOCK] * BLOCK + position % BLOCK
        at += counts[i]
        starts[place + 1 :], lens[place], table[place] = at, end, read[i]
    num_decode = np.array([sum(counts[i] == 1 for i in order)], np.int32)
    arrays = (jnp.asarray(x) for x in (slots, positions, starts, num_decode, lens, table))
    return jnp.asarray(ids), Rows(*arrays, mesh=mesh), starts
