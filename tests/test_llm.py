"""The offline API and the loop under it, on stories260K: text, streams, stop strings, scores, samples, and what goes wrong."""

import asyncio
import math
from collections.abc import Iterator

import numpy as np
import pytest
from reference_llama import STORIES, ReferenceLlama

from pagedjax import LLM, SamplingParams, UserError

GREEDY = SamplingParams(max_tokens=60, temperature=0)
SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "buckets.decode_rows": (4,),
    "buckets.prefill_tokens": (32,),
    "cache.kv_memory": 2 << 20,
    "compile_cache": "",  # conftest has set one
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(STORIES, **SMALL) as llm:
        yield llm


def test_text_of_a_batch(llm: LLM) -> None:
    prompts = ["Once upon a time", "Lily", "One day, a dog", "Tom and", "The", "A big red ball"]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == prompts
    for output in outputs:
        (sample,) = output.outputs
        assert sample.finish_reason == "length" and len(sample.token_ids) == 60 and sample.usage.generated == 60
        assert sample.text == llm.tokenizer.decode([*output.prompt_token_ids, *sample.token_ids])[len(output.prompt) :]
        assert output.prompt_token_ids[0] == llm.tokenizer.bos_id != output.prompt_token_ids[1]
        assert 0 < output.time_to_first_token <= output.time
    assert outputs[0].outputs[0].text.startswith(", there was a little girl named Lily.")
    assert llm.generate(outputs[1].prompt_token_ids, GREEDY)[0].outputs[0].token_ids == outputs[1].outputs[0].token_ids


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stop", ["Lily", "ttle girl", "She loved to play out", ", there"])
def test_stop_strings_end_the_text_exactly(llm: LLM, stop: str, include: bool) -> None:
    whole = llm.generate("Once upon a time", GREEDY)[0].outputs[0]
    params = SamplingParams(max_tokens=60, temperature=0, stop=(stop, "never said"), include_stop_str_in_output=include, logprobs=0)
    pieces = list(llm.stream("Once upon a time", params))
    text = "".join(p.text for p in pieces)
    assert text == whole.text[: whole.text.index(stop) + (len(stop) if include else 0)]
    assert pieces[-1].finish == "stop" and pieces[-1].stop == stop
    tokens = [t for p in pieces for t in p.tokens]
    assert len(tokens) == pieces[-1].usage.generated == sum(len(p.logprobs) for p in pieces)
    decoded = [llm.tokenizer.decode([llm.tokenizer.bos_id, *tokens[:n]]) for n in (len(tokens) - 1, len(tokens))]
    assert stop not in decoded[0] and stop in decoded[1], "tokens count up to the one that completes the stop string"
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity


def test_streamed_pieces_are_the_text(llm: LLM) -> None:
    async def ask(prompt: str) -> str:
        return "".join([piece.text async for piece in llm.stream(prompt, GREEDY)])

    async def ask_all() -> list[str]:
        return await asyncio.gather(*(ask(p) for p in ("Once upon a time", "Tom", "Lily")))

    texts = asyncio.run(ask_all())
    assert texts == [o.outputs[0].text for o in llm.generate(["Once upon a time", "Tom", "Lily"], GREEDY)]


def test_samples(llm: LLM) -> None:
    params = SamplingParams(n=3, max_tokens=20, temperature=1.0, seed=11, logprobs=1)
    (once,), (again,) = llm.generate("Tom", params), llm.generate("Tom", params)
    assert [o.index for o in once.outputs] == [0, 1, 2] and len({o.token_ids for o in once.outputs}) == 3
    assert [o.token_ids for o in once.outputs] == [o.token_ids for o in again.outputs]
    for output in once.outputs:
        assert output.cumulative_logprob == pytest.approx(sum(p.logprob for p in output.logprobs))
    unseeded = SamplingParams(max_tokens=20, temperature=1.0)
    assert len({llm.generate("Tom", unseeded)[0].outputs[0].token_ids for _ in range(3)}) == 3


def test_scores(llm: LLM) -> None:
    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    (score,) = llm.score(text)
    logits = ReferenceLlama().logits(list(score.token_ids))
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = [logprobs[i, t] for i, t in enumerate(score.token_ids[1:])]
    assert score.logprobs == pytest.approx(expected, abs=1e-4)
    assert score.perplexity == pytest.approx(math.exp(-np.mean(expected)), rel=1e-4)
    assert math.isnan(llm.score([[1]])[0].perplexity)


def test_bad_words_are_not_said(llm: LLM) -> None:
    said = llm.generate("Once upon a time", GREEDY)[0].outputs[0].text
    params = SamplingParams(max_tokens=60, temperature=0, bad_words=("Lily", "girl"))
    text = llm.generate("Once upon a time", params)[0].outputs[0].text
    assert "Lily" in said and "girl" in said and "Lily" not in text and "girl" not in text


def test_more_prompts_than_the_queue_holds(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    scheduler.max_queued, before = 3, scheduler.max_queued
    try:
        outputs = llm.generate([[1, 300 + i] for i in range(20)], SamplingParams(max_tokens=5, temperature=0))
    finally:
        scheduler.max_queued = before
    assert [o.prompt_token_ids[1] for o in outputs] == [300 + i for i in range(20)]
    assert all(len(o.outputs[0].token_ids) == 5 for o in outputs)


def test_a_bad_prompt_stops_the_batch_and_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(UserError, match="must be shorter than max_model_len 128; got 200 tokens"):
        llm.generate([[1, 2], [1] * 200, [1, 3]], GREEDY)
    assert len(llm.generate([[1, 2]], GREEDY)) == 1
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity


def test_cancelling_a_stream_ends_it(llm: LLM) -> None:
    stream = llm.stream("Once", SamplingParams(max_tokens=120, temperature=0))
    pieces = []
    for piece in stream:
        pieces.append(piece)
        stream.cancel()
    assert pieces[-1].finish == "cancelled" and sum(len(p.tokens) for p in pieces) < 120


def test_what_is_asked_wrongly(llm: LLM) -> None:
    with pytest.raises(UserError, match="there must be one SamplingParams for all prompts or one each; got 2 for 3"):
        llm.generate(["a", "b", "c"], [GREEDY, GREEDY])
    with pytest.raises(UserError, match="a chat needs a chat template, and this tokenizer has none"):
        llm.chat([{"role": "user", "content": "hi"}])
    with pytest.raises(UserError, match="an option must be a field of EngineConfig or one of .*; got max_len"):
        LLM(STORIES, max_len=3)
    with pytest.raises(UserError, match="max_model_len must be at most the model's 512 positions; got 1000"):
        LLM(STORIES, max_model_len=1000)
    with pytest.raises(UserError, match="does not exist"):
        LLM(STORIES / "nothing")


def test_a_failing_step_reaches_every_reader() -> None:
    with LLM(STORIES, **SMALL) as llm:

        def fail(*_: object) -> None:
            raise OSError("the device went away")

        streams = [llm.stream("Once", SamplingParams(max_tokens=100)) for _ in range(2)]
        llm.engine.step = fail
        for stream in streams:
            with pytest.raises(RuntimeError, match="the engine stopped after an error: the device went away"):
                list(stream)
        with pytest.raises(RuntimeError, match="the engine stopped after an error"):
            llm.generate("Once", GREEDY)


def test_closing_ends_open_streams() -> None:
    llm = LLM(STORIES, **SMALL)
    stream = llm.stream("Once", SamplingParams(max_tokens=120, temperature=0))
    llm.close()
    assert list(stream)[-1].finish in ("cancelled", "length")
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.generate("Once", GREEDY)
