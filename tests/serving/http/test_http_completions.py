"""/v1/completions: prompts of every kind, logprobs and echo as lm-eval reads them, texts that are the same however they come."""

from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sse import stream, texts

from pagedjax import LLM, SamplingParams

PATH = "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 10}
HARD = "naïve 😀👩‍🚀 漢字かな e\u0301a\u0328 \u2028\ufffd\ufffd ٣"  # more bytes than tokens a vocabulary of 512 has words for


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_batch_of_prompts_with_samples(client: httpx.Client, chat_llm: LLM):
    prompts = ["Once upon a time", "Tom and", "The dog"]
    body = complete(client, prompt=prompts, n=2, best_of=2, **GREEDY)
    outputs = chat_llm.generate(prompts, SamplingParams(**GREEDY, n=2))
    assert [c["index"] for c in body["choices"]] == list(range(6)) and body["object"] == "text_completion"
    assert [c["text"] for c in body["choices"]] == [sample.text for o in outputs for sample in o.outputs]
    assert body["usage"]["prompt_tokens"] == sum(len(o.prompt_token_ids) for o in outputs)
    assert body["usage"]["completion_tokens"] == 60
    streamed = stream(client, PATH, prompt=prompts, n=2, **GREEDY, stream_options={"include_usage": True})
    assert texts(streamed) == {c["index"]: c["text"] for c in body["choices"]}
    assert streamed[-2]["usage"]["completion_tokens"] == 60


def test_prompts_as_ids(client: httpx.Client, chat_llm: LLM):
    ids = chat_llm.tokenizer.encode("Once upon a time")
    text = complete(client, prompt="Once upon a time", **GREEDY)["choices"][0]["text"]
    assert complete(client, prompt=ids, **GREEDY)["choices"][0]["text"] == text
    assert [c["text"] for c in complete(client, prompt=[ids, ids], **GREEDY)["choices"]] == [text, text]
    bare = complete(client, prompt="Once upon a time", add_special_tokens=False, return_token_ids=True, **GREEDY)["choices"][0]
    assert bare["prompt_token_ids"] == ids[1:] and len(bare["token_ids"]) == 10


def test_the_best_of_several(client: httpx.Client, chat_llm: LLM):
    options: dict[str, Any] = {"best_of": 4, "n": 2, "seed": 3, "temperature": 1.3, "max_tokens": 10}
    (output,) = chat_llm.generate("Once", SamplingParams(**options))
    assert [c["text"] for c in complete(client, prompt="Once", **options)["choices"]] == [o.text for o in output.outputs]
    response = client.post(PATH, json={"prompt": "Once", "stream": True, **options})
    assert response.status_code == 400 and "best_of must be n, which is 2, in a stream" in response.text


def test_beams(client: httpx.Client, chat_llm: LLM):
    (output,) = chat_llm.generate("Once", SamplingParams(n=2, beam_width=3, max_tokens=6, length_penalty=0.5))
    body = complete(client, prompt="Once", n=2, use_beam_search=True, beam_width=3, max_tokens=6, length_penalty=0.5)
    assert [c["text"] for c in body["choices"]] == [o.text for o in output.outputs]


def test_logprobs_are_parallel_lists(client: httpx.Client, chat_llm: LLM):
    body = complete(client, prompt="Once upon", logprobs=2, **GREEDY)
    lists, text = body["choices"][0]["logprobs"], body["choices"][0]["text"]
    assert {name: len(values) for name, values in lists.items()} == dict.fromkeys(
        ("tokens", "token_logprobs", "top_logprobs", "text_offset"), 10
    )
    assert "".join(lists["tokens"]) == text
    for offset, token in zip(lists["text_offset"], lists["tokens"], strict=True):
        assert text[offset : offset + len(token)] == token
    for token, logprob, top in zip(lists["tokens"], lists["token_logprobs"], lists["top_logprobs"], strict=True):
        assert len(top) == 2 and top[token] == logprob == max(top.values())
    sampled = complete(client, prompt="Once upon", logprobs=1, temperature=2, seed=5, max_tokens=20)["choices"][0]["logprobs"]
    assert {len(top) for top in sampled["top_logprobs"]} == {1, 2}  # the sampled token is there, too, when it is not the best
    pieces = [c["logprobs"] for e in stream(client, PATH, prompt="Once upon", logprobs=2, **GREEDY)[:-1] for c in e["choices"]]
    assert [t for p in pieces for t in p["tokens"]] == lists["tokens"]
    assert [o for p in pieces for o in p["text_offset"]] == lists["text_offset"]


@pytest.mark.parametrize("prompt", ["Tom saw a big red ball.", HARD[:10]])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echoed_logprobs_are_those_of_a_score(client: httpx.Client, chat_llm: LLM, prompt: str, max_tokens: int):
    """The request of lm-eval's local-completions, which sends ids and reads token_logprobs[len(context) : -1]."""
    (score,) = chat_llm.score(prompt)
    ids = list(score.token_ids)
    options: dict[str, Any] = {"logprobs": 1, "echo": True, "temperature": 0, "max_tokens": max_tokens, "seed": 1}
    body = complete(client, prompt=ids, **options)
    choice = body["choices"][0]
    lists = choice["logprobs"]
    assert len(lists["token_logprobs"]) == len(ids) + max_tokens and lists["token_logprobs"][0] is None
    assert lists["token_logprobs"][1 : len(ids)] == pytest.approx(list(score.logprobs), abs=1e-4)
    assert lists["top_logprobs"][0] is None and all(lists["top_logprobs"][1:])
    best = [max(top.values()) for top in lists["top_logprobs"][1:]]
    assert all(a <= b for a, b in zip(lists["token_logprobs"][1:], best, strict=True))
    assert choice["text"].startswith(prompt) and (max_tokens or choice["text"] == prompt)
    assert body["usage"]["completion_tokens"] == max_tokens and choice["finish_reason"] == "length"
    (event, *rest) = [c for e in stream(client, PATH, prompt=prompt, **options)[:-1] for c in e["choices"]]
    assert event["text"].startswith(prompt) and len(event["logprobs"]["tokens"]) >= len(ids)
    assert event["text"] + "".join(c["text"] for c in rest) == choice["text"]


def test_tokens_that_are_parts_of_characters(client: httpx.Client):
    lists = complete(client, prompt="😀a", logprobs=0, echo=True, max_tokens=0)["choices"][0]["logprobs"]
    assert lists["tokens"][-5:] == ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "a"]
    assert lists["text_offset"][-5:] == [0, 0, 0, 0, 1]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    text=st.sampled_from([HARD, "😀😀", "\ufffd\ufffd", "漢字かな", "e\u0301a\u0328"]),
    seed=st.integers(0, 2**31),
    n=st.integers(1, 3),
    stop=st.lists(st.sampled_from(["\ufffd", "😀", "字", "a\u0328", "aa", "é"]), max_size=2),
    include=st.booleans(),
)
def test_pieces_joined_are_the_whole_text(chat_llm: LLM, server_client: httpx.Client, text, seed, n, stop, include):
    """Over bytes of hard texts, in any order: broken characters, runs of U+FFFD, stop strings across tokens."""
    ids = sorted(set(chat_llm.tokenizer.encode(text + "aé", add_special=False)))
    options: dict[str, Any] = {"allowed_token_ids": ids, "temperature": 3.0, "max_tokens": 24, "seed": seed, "n": n, "stop": stop}
    options["include_stop_str_in_output"] = include
    body = complete(server_client, prompt="Once", **options)
    whole = {c["index"]: c["text"] for c in body["choices"]}
    assert texts(stream(server_client, PATH, prompt="Once", **options)) == whole
    (output,) = chat_llm.generate("Once", SamplingParams(**{**options, "stop": tuple(stop)}))
    assert whole == {o.index: o.text for o in output.outputs}
    assert {c["index"]: c["stop_reason"] for c in body["choices"]} == {o.index: o.stop_reason for o in output.outputs}


@pytest.fixture(scope="module")
def server_client(client: httpx.Client) -> httpx.Client:
    """The same client; hypothesis wants no fixture of a function's scope."""
    return client


def test_through_openais_client(server: Any, chat_llm: LLM):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        options: dict[str, Any] = {"model": "stories", "prompt": "Once upon", "max_tokens": 8, "temperature": 0, "logprobs": 2}
        answer = sdk.completions.create(**options, echo=True)
        lists = answer.choices[0].logprobs
        assert lists is not None and lists.tokens and lists.top_logprobs and lists.text_offset
        assert len(lists.tokens) == len(lists.top_logprobs) == 3 + 8 and lists.text_offset[-1] < len(answer.choices[0].text)
        chunks = list(sdk.completions.create(**options, stream=True))
        assert "Once upon" + "".join(c.choices[0].text for c in chunks) == answer.choices[0].text
