"""The offline API and the loop under it, on stories260K: text, streams, stop strings, scores, samples, and what goes wrong."""

import asyncio
import contextlib
import gc
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from reference_llama import STORIES, ReferenceLlama

from pagedjax import LLM, SamplingParams, UserError
from pagedjax.errors import QueueFull
from pagedjax.host.request import TokenEvent
from pagedjax.llm import in_order

GREEDY = SamplingParams(max_tokens=60, temperature=0)
LONG = SamplingParams(max_tokens=120, temperature=0)
SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "buckets.decode_rows": (4,),
    "buckets.prefill_tokens": (32,),
    "cache.kv_memory": 2 << 20,
}


@pytest.fixture(scope="module")
def llm(compile_cache: str) -> Iterator[LLM]:
    with LLM(STORIES, **SMALL, compile_cache=compile_cache) as llm:
        yield llm


@contextlib.contextmanager
def held(llm: LLM, monkeypatch: pytest.MonkeyPatch, *, free_until_tokens: bool) -> Iterator[list[TokenEvent]]:
    """Inside, the engine's steps wait: all of them, or those after the first tokens. The events of steps are listed. Afterwards
    everything must come to an end, with nothing held."""
    gate, events, step = threading.Event(), [], llm.engine.step

    def gated() -> list[TokenEvent]:
        if not (free_until_tokens and not events):
            gate.wait(60)
        new = step()
        events.extend(new)
        return new

    monkeypatch.setattr(llm.engine, "step", gated)
    try:
        yield events
    finally:
        gate.set()
    for _ in range(6000):
        if not llm.engine.has_work():
            break
        time.sleep(0.01)
    assert not llm.engine.has_work()
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity


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


def test_a_bad_prompt_stops_the_batch_and_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = pytest.raises(UserError, match="must be shorter than max_model_len 128; got 200 tokens")
    with held(llm, monkeypatch, free_until_tokens=False) as events, refused:
        llm.generate([[1, 2], [1] * 200, [1, 3]], LONG)
    assert all(event.finish is None for event in events), "no request may run to its end"


def test_leaving_a_batch_early_cancels_the_rest(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(llm, monkeypatch, free_until_tokens=True) as events:
        for _, stream in in_order(llm.loop, [llm.request([1, i], LONG) for i in range(300, 303)]):
            assert next(iter(stream)).tokens
            break
    assert all(event.finish is None for event in events)


def test_an_unexpected_error_of_one_request_is_its_own(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise ZeroDivisionError("a fault of ours")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "add", fail)
        with pytest.raises(ZeroDivisionError, match="a fault of ours"):
            llm.stream("Once", GREEDY)
    assert len(llm.generate("Once", GREEDY)[0].outputs[0].token_ids) == 60


def test_breaking_out_of_a_stream_frees_its_blocks(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(llm, monkeypatch, free_until_tokens=True) as events:
        for _ in llm.stream("Once", LONG):
            break
    assert all(event.finish is None for event in events)


def test_a_cancelled_task_frees_the_blocks_of_its_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read(started: asyncio.Event) -> None:
        async for _ in await llm.stream_async("Once", LONG):
            started.set()

    async def main() -> None:
        started = asyncio.Event()
        task = asyncio.create_task(read(started))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with held(llm, monkeypatch, free_until_tokens=True) as events:
        asyncio.run(main())
    assert all(event.finish is None for event in events)


def test_a_task_cancelled_while_it_submits_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's thread is in a step, so that submitting waits; the event loop does not."""

    async def main() -> None:
        task = asyncio.create_task(llm.stream_async("Once", LONG))
        await asyncio.sleep(0.05)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()

    gate, inside, events, step = threading.Event(), threading.Event(), [], llm.engine.step

    def gated() -> list[TokenEvent]:
        inside.set()
        gate.wait(60)
        new = step()
        events.extend(new)
        return new

    monkeypatch.setattr(llm.engine, "step", gated)
    first = llm.stream([1, 300], GREEDY)
    assert inside.wait(60)
    asyncio.run(main())
    assert list(first)[-1].finish == "length"
    while llm.engine.has_work():
        time.sleep(0.01)
    assert {event.request_id for event in events if event.finish} == {first.request_id}


def test_submitting_without_blocking_the_event_loop(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(name: str, n: int = 1) -> str:
        request = replace(llm.request("Once upon a time", replace(GREEDY, n=n)), id=name)
        return "".join([piece.text async for piece in await llm.loop.submit_async(request)])

    async def ask_all() -> list[str]:
        return await asyncio.gather(ask("mine"), ask("yours"))

    assert asyncio.run(ask_all()) == [llm.generate("Once upon a time", GREEDY)[0].outputs[0].text] * 2
    monkeypatch.setattr(llm.engine.scheduler, "max_queued", 1)
    with pytest.raises(QueueFull, match="request theirs: the queue may hold 1 sequences; 0 wait, 2 more came"):
        asyncio.run(ask("theirs", 2))


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", GREEDY)[0].outputs[0]
    stop = " there"
    tokens = [llm.tokenizer.decode([llm.tokenizer.bos_id, 403, *whole.token_ids[:n]]) for n in range(61)]
    needed = next(n for n, text in enumerate(tokens) if stop in text)
    params = replace(GREEDY, stop=(stop,))
    early = llm.generate("Once upon a time", replace(params, min_tokens=needed - 1))[0].outputs[0]
    assert (early.stop_reason, len(early.token_ids)) == (stop, needed)
    late = llm.generate("Once upon a time", replace(params, min_tokens=needed))[0].outputs[0]
    assert len(late.token_ids) > needed and late.text.startswith(whole.text[: whole.text.index(stop) + len(stop)])


def test_the_text_of_a_stop_token(llm: LLM) -> None:
    whole = llm.generate("Once upon a time", GREEDY)[0].outputs[0]
    stop = next(i for i, t in enumerate(whole.token_ids) if i > 5 and t not in whole.token_ids[:i])
    params = replace(GREEDY, stop_token_ids=(whole.token_ids[stop],))
    without = llm.generate("Once upon a time", params)[0].outputs[0]
    shown = llm.generate("Once upon a time", replace(params, include_stop_str_in_output=True))[0].outputs[0]
    assert without.token_ids == shown.token_ids == whole.token_ids[: stop + 1]
    assert without.stop_reason == shown.stop_reason == whole.token_ids[stop]
    assert whole.text.startswith(shown.text) and len(shown.text) > len(without.text) and shown.text.startswith(without.text)


def test_times_are_those_of_the_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time until the engine's thread takes a request is part of its wait; the time until it is read is not."""
    gate, inside, step = threading.Event(), threading.Event(), llm.engine.step

    def gated() -> list[TokenEvent]:
        inside.set()
        gate.wait(60)
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", gated)
        first = llm.stream([1, 300], GREEDY)
        assert inside.wait(60)
        begin, made = time.perf_counter(), []
        thread = threading.Thread(target=lambda: made.append(llm.stream([1, 301], GREEDY)))
        thread.start()
        while llm.loop._inbox.empty():
            time.sleep(0.001)
        sent = time.perf_counter()
        gate.set()
        thread.join()
    list(first)
    assert begin < made[0].submitted < sent
    while made[0].finished is None:
        time.sleep(0.001)
    done = time.perf_counter()
    list(made[0])
    assert made[0].submitted < made[0].first_token < made[0].finished <= done


def test_prompts_as_objects_and_arrays(llm: LLM) -> None:
    text = "Once upon"
    ids = llm.tokenizer.encode(text)
    params = SamplingParams(max_tokens=5, temperature=0)
    (wanted,) = llm.generate(prompts=text, sampling_params=params)
    for prompt in (ids, np.array(ids), np.array([ids]), {"prompt": text}, [{"prompt_token_ids": np.array(ids), "prompt": text}]):
        (output,) = llm.generate(prompt, params)
        assert output.outputs[0].text == wanted.outputs[0].text and output.prompt_token_ids == tuple(ids)
        assert all(type(i) is int for i in output.prompt_token_ids)
    assert llm.generate([{"prompt": text}], params)[0].prompt == text
    assert llm.generate([], params) == []
    with pytest.raises(
        UserError, match=r"a prompt object must hold prompt, prompt_token_ids or both, and may hold cache_salt; got \['text'\]"
    ):
        llm.generate([{"text": "Once"}])
    with pytest.raises(UserError, match=r"a prompt must be a text, token ids or an object with either; got \[1, 2.5\]"):
        llm.generate([[1, 2.5]])
    with pytest.raises(UserError, match="a prompt must be a text, token ids or an object with either; got None"):
        llm.generate([None])


def test_a_salt_keeps_cached_prefixes_apart(llm: LLM) -> None:
    size = llm.engine.config.cache.block_size
    ids = [1, *range(270, 270 + size)]
    params = SamplingParams(max_tokens=3, temperature=0)

    def cached(**salt) -> int:
        return llm.generate([{"prompt_token_ids": ids, **salt}], params)[0].outputs[0].usage.cached

    assert [cached(), cached(), cached(cache_salt="a"), cached(cache_salt="a"), cached()] == [0, size, 0, size, size]
    with pytest.raises(UserError, match="cache_salt must be a string; got 3"):
        cached(cache_salt=3)
    with pytest.raises(UserError, match=r"cache_salt must be valid Unicode; got '\\ud800'"):
        cached(cache_salt="\ud800")  # taken, it would end the engine's thread, which hashes it


def test_chat(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}{{ more }}{% endif %}"
    monkeypatch.setattr(llm, "tokenizer", replace(llm.tokenizer, templates={"default": template}))
    params, ask = SamplingParams(max_tokens=3, temperature=0), [{"role": "user", "content": "Once"}]
    one, two = llm.chat([ask, ask], params)
    assert one.outputs[0].token_ids == two.outputs[0].token_ids and list(one.prompt_token_ids) == llm.tokenizer.encode("Once")
    (output,) = llm.chat(ask, sampling_params=params, chat_template_kwargs={"more": " upon"})
    assert list(output.prompt_token_ids) == llm.tokenizer.encode("Once upon")
    (output,) = llm.chat(ask, params, add_generation_prompt=False, chat_template_kwargs={"more": " upon"})
    assert list(output.prompt_token_ids) == llm.tokenizer.encode("Once")
    with pytest.raises(UserError, match="chat must be given at least one message; got none"):
        llm.chat([])
    with pytest.raises(UserError, match="chat_template_kwargs must not hold what has an argument of its own; got tools"):
        llm.chat(ask, chat_template_kwargs={"tools": []})
    with pytest.raises(TypeError, match="add_generation_promt"):
        llm.chat(ask, add_generation_promt=False)


def test_the_makers_defaults(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.get_default_sampling_params() == SamplingParams()
    monkeypatch.setattr(llm, "defaults", replace(llm.defaults, temperature=0.0, top_k=5, max_tokens=7))
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=5, max_tokens=7)
    assert len(llm.generate("Once")[0].outputs[0].token_ids) == 7


def test_cancelling_a_stream_ends_it(llm: LLM) -> None:
    stream = llm.stream("Once", LONG)
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


def test_a_failing_step_reaches_every_reader(compile_cache: str) -> None:
    with LLM(STORIES, **SMALL, compile_cache=compile_cache) as llm:

        def fail(*_: object) -> None:
            raise OSError("the device went away")

        streams = [llm.stream("Once", SamplingParams(max_tokens=100)) for _ in range(2)]
        llm.engine.step = fail
        for stream in streams:
            with pytest.raises(RuntimeError, match="the engine stopped after an error: the device went away"):
                list(stream)
        with pytest.raises(RuntimeError, match="the engine stopped after an error"):
            llm.generate("Once", GREEDY)
        streams[0].cancel()  # nothing is left to cancel, and that is no error


def test_closing_ends_open_streams(compile_cache: str) -> None:
    llm = LLM(STORIES, **SMALL, compile_cache=compile_cache)
    stream = llm.stream("Once", LONG)
    llm.close()
    assert list(stream)[-1].finish in ("cancelled", "length")
    stream.cancel()
    with pytest.raises(RuntimeError, match="the engine is closed"):
        llm.generate("Once", GREEDY)


def test_dropping_the_last_reference_ends_the_thread(compile_cache: str) -> None:
    llm = LLM(STORIES, **SMALL, compile_cache=compile_cache)
    thread = llm.loop._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    assert not thread.is_alive()
