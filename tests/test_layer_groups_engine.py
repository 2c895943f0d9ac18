"""Models of full and window layers through the engine: transformers' logprobs with a block table for each group; and
the same tokens when the blocks that left a window are lost."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pagedjax.engine
from checkpoints import load_params
from pagedjax.config import EngineConfig, resolve, with_options
from pagedjax.device.sharding import make_mesh
from pagedjax.engine import Engine
from pagedjax.host.plan import Plan
from pagedjax.host.request import Request, SamplingParams, TokenEvent
from tests.golden.tiny_models import texts
from tests.models.goldens import TOLERANCE, expected, open_golden
from tests.test_engine import run, tokens_of

BLOCK = 8


@pytest.fixture(scope="module")
def golden_engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Engine]:
    return cache(lambda name: build(name, tmp_path_factory.mktemp(name)))


def build(name: str, folder: Path) -> Engine:
    checkpoint, mesh = open_golden(name, folder), make_mesh(1)
    params, layout = load_params(checkpoint, dtype="float32", mesh=mesh, stacked=False)
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": BLOCK}
    options |= {"buckets.decode_rows": (2,), "buckets.prefill_tokens": (16,), "cache.kv_memory": 1 << 20}
    config = resolve(with_options(EngineConfig(compile_cache=""), options), checkpoint.config, "cpu", "float32")
    return Engine(checkpoint.config, layout, params, config, mesh)


def requests(name: str) -> list[Request]:
    """One scores its prompt; the other decodes meanwhile, from the middle of its text until long after the window."""
    scored, ids = texts(name)
    return [
        Request("scored", tuple(scored), SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=1)),
        Request("decoded", tuple(ids[:5]), SamplingParams(max_tokens=50, temperature=0, logprobs=3)),
    ]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral"])
def test_logprobs_of_a_prompt_are_those_of_transformers(name: str, golden_engine: Callable[..., Engine]) -> None:
    engine = golden_engine(name)
    groups = {"gemma2": (1, 3), "gemma3": (2, 4), "mistral": (2, 1)}[name]
    assert (engine.state.kv.shape[0], engine.model.layer_groups.count) == groups
    scored = run(engine, requests(name))["scored", 0][0].prompt_logprobs
    assert scored is not None
    logits = expected(name)[0].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    tokens = texts(name)[0][1:]
    assert [p.token for p in scored] == tokens
    wanted = logprobs[np.arange(len(tokens)), tokens]
    assert np.abs([p.logprob for p in scored] - wanted).max() < 2 * TOLERANCE
    assert engine.compilations_after_start == 0


def losing(engine: Engine, windows: tuple[int | None, ...], more: int) -> Callable:
    """A `pack` that names scrap in place of blocks that have left their window, and of `more` after those; scrap is full of NaN
    before every step."""
    right, poison = pagedjax.engine.pack, jax.jit(lambda kv: kv.at[:, 0].set(jnp.nan))
    poison(engine.state.kv)  # compiled now: the engine lets nobody compile while it dispatches

    def pack(plan: Plan, *args):
        rows = []
        for row in plan.rows:
            table = row.table.copy()
            for g, window in enumerate(windows):
                if window is not None and row.start + 1 > window:
                    table[g, : (row.start + 1 - window) // BLOCK + more] = 0
            rows.append(row._replace(table=table))
        engine.state = replace(engine.state, kv=poison(engine.state.kv))
        return right(replace(plan, rows=tuple(rows)), *args)

    return pack


def outcome(events: dict[tuple[str, int], list[TokenEvent]]) -> list:
    own = events["decoded", 0]
    return [tokens_of(own), [p for e in own for p in e.logprobs or ()], events["scored", 0][0].prompt_logprobs]


@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mistral"])
def test_blocks_that_left_a_window_may_be_lost(
    name: str, golden_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens and logprobs are the same, bit by bit; with one block less, which the window still reaches, they are not."""
    engine = golden_engine(name)
    windows = engine.model.layer_groups.windows
    whole = outcome(run(engine, requests(name)))
    monkeypatch.setattr(pagedjax.engine, "pack", losing(engine, windows, 0))
    assert outcome(run(engine, requests(name))) == whole
    monkeypatch.undo()
    monkeypatch.setattr(pagedjax.engine, "pack", losing(engine, windows, 1))
    assert outcome(run(engine, requests(name))) != whole
