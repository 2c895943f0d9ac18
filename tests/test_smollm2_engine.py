"""A real model through the engine: SmolLM2-135M-Instruct, whose 9 heads over 3 kv heads fit 3 devices and are padded on 2."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from test_engine import greedy, run, tokens_of

from checkpoints import load_params, open_checkpoint
from pagedjax.config import EngineConfig, resolve, with_options
from pagedjax.device.sharding import make_mesh
from pagedjax.engine import Engine
from pagedjax.text import Tokenizer, tokenizer_from_gguf

GGUF = Path(__file__).parents[1] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTION = "What is the capital of France? Answer in one sentence."
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 128,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "buckets.decode_rows": (2,),
    "buckets.prefill_tokens": (32,),
    "cache.kv_memory": 64 << 20,
}
pytestmark = pytest.mark.skipif(not GGUF.exists(), reason=f"needs .models/{GGUF.name}, which `make models` fetches")


@functools.cache
def tokenizer() -> Tokenizer:
    source = open_checkpoint(GGUF).tokenizer_source
    assert isinstance(source, dict)
    return tokenizer_from_gguf(source)


@functools.cache
def answers(shards: int) -> tuple[tuple[int, int], dict[str, tuple[int, ...]]]:
    """((query heads, kv heads) as they are computed, the tokens of each prompt), with layers scanned: unrolled they would take
    long to compile. Nothing of the model is kept."""
    config = with_options(EngineConfig(compile_cache=""), OPTIONS | {"tensor_parallel_size": shards})
    checkpoint, mesh = open_checkpoint(GGUF), make_mesh(shards)
    params, layout = load_params(checkpoint, dtype="float32", mesh=mesh, stacked=True)
    engine = Engine(checkpoint.config, layout, params, resolve(config, checkpoint.config, "cpu", "float32"), mesh)
    text = tokenizer().encode("The capital of France is")
    chat = tokenizer().encode_chat([{"role": "user", "content": QUESTION}])
    asked = replace(greedy("chat", chat, 20), stop_ids=checkpoint.defaults.stop_ids)
    events = run(engine, [greedy("text", text, 12), asked])
    return (layout.cfg.num_heads, layout.cfg.num_kv_heads), {name: tokens_of(events[name, 0]) for name in ("text", "chat")}


def test_it_knows_the_capital_of_france():
    _, tokens = answers(1)
    assert tokenizer().decode(tokens["text"]).startswith(" Paris.")
    assert tokenizer().decode(tokens["chat"]) == "The capital of France is Paris."
    assert tokens["chat"][-1] in open_checkpoint(GGUF).defaults.stop_ids


@pytest.mark.parametrize(("shards", "heads"), [(3, (9, 3)), (2, (12, 4))])
def test_several_devices_say_the_same(shards: int, heads: tuple[int, int]):
    padded, tokens = answers(shards)
    assert padded == heads
    assert tokens == answers(1)[1]
