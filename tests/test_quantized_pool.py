"""The engine with a pool of 8 bits: what stands in it, what that does to logprobs, and blocks that move with their scales."""

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from reference_llama import ReferenceLlama

from pagedjax import LLM, SamplingParams
from pagedjax.engine import Engine
from pagedjax.host.plan import Copy, Swap
from pagedjax.host.request import Request, TokenEvent
from pagedjax.state import QuantizedPool
from pagedjax.text import load_tokenizer
from tests.test_blocks import dispatch, two_rows

STORIES = Path(__file__).parent / "golden" / "stories260K"
TEXT = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. One day, she saw a big dog."
LARGEST = {"int8": 127, "float8_e4m3fn": 448}
BLOCK_BYTES = 5 * 2 * 4 * 16 * (8 + 4)  # of stories260K with 16 tokens in a block: 8 numbers and a scale a head
SWAPS = {"cache.kv_memory": 15 * BLOCK_BYTES, "cache.swap_memory": 12 * BLOCK_BYTES, "schedule.preemption": "swap"}


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """f64[T, K, D] as a pool of 8 bits gives it back."""
    scale = np.abs(x).max(-1, keepdims=True) / LARGEST[dtype]
    y = (x / scale).astype(np.float32)
    return (np.round(y) if dtype == "int8" else y.astype(ml_dtypes.float8_e4m3fn)).astype(np.float64) * scale


def logprobs(reference: ReferenceLlama, ids: list[int]) -> np.ndarray:
    scores = reference.logits(ids)[:-1]
    scores -= scores.max(-1, keepdims=True)
    return (scores - np.log(np.exp(scores).sum(-1, keepdims=True)))[np.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize(("dtype", "most"), [("int8", 0.04), ("float8_e4m3fn", 0.10)])
def test_logprobs_are_those_of_rounded_keys_and_values(compile_cache: str, dtype: str, most: float) -> None:
    """Near to a float64 forward that rounds what it caches in the same way, nearer than to one that does not round."""
    ids = load_tokenizer(STORIES).encode(TEXT)
    plain, own = logprobs(ReferenceLlama(), ids), logprobs(ReferenceLlama(cached=lambda x: rounded(x, dtype)), ids)
    options = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 16, "cache.kv_dtype": dtype}
    with LLM(STORIES, compile_cache=compile_cache, **options, **{"cache.kv_memory": 20 * BLOCK_BYTES + 1}) as llm:
        (output,) = llm.generate([ids], [SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)])
        assert output.prompt_logprobs is not None
        found = np.array([entry.logprob for entry in output.prompt_logprobs if entry is not None])
        assert llm.engine.pool_bytes == 20 * BLOCK_BYTES
        pool = llm.engine.state.kv
    off = np.abs(found - own).mean(), np.abs(found - plain).mean()
    assert off[0] < 0.7 * off[1] and off[1] < most, off

    # The first layer's keys stand in the pool as they are rounded: block by block, in the order of the sequence.
    assert isinstance(pool, QuantizedPool) and pool.data.dtype == dtype
    data, scales = (np.asarray(x[0]).astype(np.float64) for x in pool)
    held = (data * scales[..., None])[:, 0].transpose(0, 2, 1, 3).reshape(-1, 4, 8)  # [N * P, K, D]
    keys: list[np.ndarray] = []
    ReferenceLlama(cached=lambda x: keys.append(x) or x).logits(ids)
    row = next(start for start in range(0, len(held), 16) if np.allclose(held[start], keys[0][0], rtol=0.07, atol=0.02))
    step = np.abs(keys[0]).max(-1, keepdims=True) / (127 if dtype == "int8" else 448 / 32)  # of e4m3 at its largest
    assert (np.abs(held[row : row + 16] - keys[0][:16]) <= 0.51 * step[:16]).all()
    assert np.abs(held[row : row + 16] - keys[0][:16]).max() > 0.2 * step[:16].min(), "the control: something was rounded"


def run(engine: Engine, made: list[Request]) -> dict[tuple[str, int], list[TokenEvent]]:
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    for request in made:
        engine.add(request)
    while engine.has_work():
        for event in engine.step():
            events.setdefault((event.request_id, event.index), []).append(event)
    return events


@pytest.mark.parametrize("dtype", LARGEST)
def test_tokens_do_not_depend_on_copies_and_swaps(stories_engine: Callable[..., Engine], dtype: str) -> None:
    """Samples that share a block and part from it, and sequences that are swapped out and come back, one step after the other or
    ahead: the tokens of each alone."""
    made = [
        Request(f"r{i}", (1, *range(300, 320 + i)), SamplingParams(max_tokens=60, temperature=0.8, n=2), seed=i) for i in range(4)
    ]
    roomy = stories_engine(**{"cache.kv_dtype": dtype})
    alone = {key: events for request in made for key, events in run(roomy, [request]).items()}
    for async_steps in (0, 1):
        tight = stories_engine(**{"cache.kv_dtype": dtype, "schedule.async_steps": async_steps}, **SWAPS, debug=True)
        before = tight.scheduler.stats.preemptions
        found = run(tight, made)
        assert tight.scheduler.stats.preemptions > before and tight.scheduler.stats.swaps > 0
        assert {k: [t for e in events for t in e.tokens] for k, events in found.items()} == {
            k: [t for e in events for t in e.tokens] for k, events in alone.items()
        }


@pytest.mark.parametrize("shards", [1, 2])
def test_blocks_move_with_their_scales(stories_engine: Callable[..., Engine], shards: int) -> None:
    """Every bit of both, out to host memory and in again, and from block to block."""
    options = {
        "tensor_parallel_size": shards,
        "stacked": shards > 1,
        "cache.kv_dtype": "int8",
        "cache.swap_memory": 3 * BLOCK_BYTES,
    }
    engine = stories_engine(**options)
    dispatch(engine, **two_rows(3, 1))
    before = [np.array(x) for x in engine.state.kv]
    assert (before[1][:, 3, :, :, 4:7] > 0).all() and before[0][:, 3, :, :, 4:7].any(), "the step wrote there"
    dispatch(engine, swap_out=(Swap(3, 0),), swap_in=(Swap(5, 0),), copies=(Copy(9, 6),))
    after = [np.array(x) for x in engine.state.kv]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[:, 5], old[:, 3])
        np.testing.assert_array_equal(new[:, 6], old[:, 9])
        np.testing.assert_array_equal(new[:, 1:5], old[:, 1:5])
    assert engine.host_tier is not None and engine.host_tier.bytes_held == BLOCK_BYTES
    heads = [part.data.shape[3] for x in engine.state.kv for part in x.addressable_shards]
    assert heads == [4 // shards] * (2 * shards)
