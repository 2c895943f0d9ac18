"""Runs texts through a model's forward pass and a paged pool, by hand: no scheduler, no engine."""

import math
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
Reader = Callable[[np.ndarray, Sequence[int]], np.ndarray]


def compiled_pass(cfg: ModelConfig) -> Pass:
    """(params, tokens, kv, rows) -> (logits of every token, kv). Nearly all the time of these tests is compilation, so LLVM's
    optimizations, a third of it, are off."""
    model = model_for(cfg.architecture)

    @partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def one_pass(params, tokens, kv, rows):
        hidden, kv = model.forward(params, tokens, kv, rows, cfg)
        return model.logits(params, hidden, cfg), kv

    return one_pass


def shuffled_tables(cfg: ModelConfig, texts: Sequence[Sequence[int]], seed: int) -> np.ndarray:
    """i32[G, S, B]: every text's blocks in each layer group, in random order; block 0 is scrap."""
    width = max(-(-len(ids) // BLOCK) for ids in texts)
    shape = (cfg.layer_groups.count, len(texts), width)
    tables = np.zeros((shape[0], ROWS, width), np.int32)
    tables[:, : len(texts)] = 1 + np.random.default_rng(seed).permutation(math.prod(shape)).reshape(shape)
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
    read: Reader = lambda tables, done: tables,
    scrap: float = SCRAP,
) -> list[np.ndarray]:
    """f32[length, V] of each text. `steps` says how many tokens of each text a step takes; a step of at most one each runs with
    as many tokens as rows, any other with TOKENS. `read` makes the block tables that attention sees from `tables` and the number of
    tokens of each text before the step. Block 0 is full of `scrap` at first."""
    shape = (cfg.layer_groups.size, int(tables.max()) + 1, 2, cfg.num_kv_heads, BLOCK, cfg.head_width)
    kv = jax.device_put(jnp.full(shape, SCRAP, jnp.float32).at[:, 0].set(scrap), NamedSharding(mesh, POOL))
    done, out = [0] * len(texts), [[] for _ in texts]
    make = partial(make_step, texts=texts, mesh=mesh, tables=tables)
    for counts in steps:
        order = sorted((i for i, count in enumerate(counts) if count), key=lambda i: counts[i] > 1)
        size = ROWS if max(counts) == 1 else TOKENS
        ids, rows, starts = make(counts=counts, done=done, order=order, size=size, read=read(tables, done))
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
    ids, positions, slots = np.zeros(size, np.int32), np.zeros(size, np.int32), np.zeros((len(tables), size), np.int32)
    starts, lens, table = np.zeros(ROWS + 1, np.int32), np.zeros(ROWS, np.int32), np.zeros_like(tables)
    at = 0
    for place, i in enumerate(order):
        begin, end = done[i], done[i] + counts[i]
        here, position = slice(at, at + counts[i]), np.arange(begin, end)
        ids[here], positions[here] = texts[i][begin:end], position
        slots[:, here] = tables[:, i, position // BLOCK] * BLOCK + position % BLOCK
        at += counts[i]
        starts[place + 1 :], lens[place], table[:, place] = at, end, read[:, i]
    num_decode = np.array([sum(counts[i] == 1 for i in order)], np.int32)
    arrays = (jnp.asarray(x) for x in (slots, positions, starts, num_decode, lens, table))
    return jnp.asarray(ids), Rows(*arrays, mesh=mesh), starts
