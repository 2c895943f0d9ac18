"""/v1/chat/completions and /v1/models, by hand and through OpenAI's own client."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from sse import stream, texts

from pagedjax import LLM, SamplingParams
from serving.http.chat import template_messages
from serving.http.requests import Message

PATH = "/v1/chat/completions"
HELLO = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]
GREEDY: dict[str, Any] = {"messages": HELLO, "max_tokens": 12, "temperature": 0}


@pytest.fixture(scope="module")
def sdk(server: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def offline(llm: LLM, messages: list[dict[str, Any]], params: SamplingParams, **options: Any) -> str:
    return llm.chat(messages, params, **options)[0].outputs[0].text


def test_an_answer_is_the_offline_one(client: httpx.Client, chat_llm: LLM):
    body = client.post(PATH, json={**GREEDY, "model": "stories"}).json()
    assert body["object"] == "chat.completion" and body["model"] == "stories" and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    text = offline(chat_llm, HELLO, SamplingParams(max_tokens=12, temperature=0))
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    prompt = len(chat_llm.chat_prompt(HELLO))
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (prompt, 12, prompt + 12)
    again = client.post(PATH, json=GREEDY).json()["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] == (prompt - 1) // 16 * 16 > 0


def test_a_stream_begins_with_the_role_and_ends_with_the_usage(client: httpx.Client):
    whole = client.post(PATH, json=GREEDY).json()
    events = stream(client, PATH, **GREEDY, stream_options={"include_usage": True})
    assert events[-1] == "[DONE]"
    first, *middle, last, usage = events[:-1]
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {e["object"] for e in events[:-1]} == {"chat.completion.chunk"} and len({e["id"] for e in events[:-1]}) == 1
    assert all(e["usage"] is None for e in [first, *middle, last])
    assert [c["finish_reason"] for e in middle for c in e["choices"]] == [None] * len(middle)
    assert last["choices"][0]["finish_reason"] == "length"
    assert texts(events)[0] == whole["choices"][0]["message"]["content"]
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]
    plain = stream(client, PATH, **GREEDY)
    assert all("usage" not in e and e["choices"] for e in plain[:-1]) and texts(plain) == texts(events)


def test_usage_in_every_event(client: httpx.Client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(client, PATH, **GREEDY, stream_options=options)[1:-1]
    counts = [e["usage"]["completion_tokens"] for e in events]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-1] == 12


def test_samples(client: httpx.Client):
    body = {**GREEDY, "n": 3, "temperature": 1.5, "seed": 7, "ignore_eos": True}
    choices = client.post(PATH, json=body).json()["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2] and len({c["message"]["content"] for c in choices}) > 1
    events = stream(client, PATH, **body)
    assert texts(events) == {c["index"]: c["message"]["content"] for c in choices}
    roles = [c["index"] for e in events[:-1] for c in e["choices"] if "role" in c["delta"]]
    assert sorted(roles) == [0, 1, 2]


def test_logprobs(client: httpx.Client, chat_llm: LLM):
    body = client.post(PATH, json={**GREEDY, "logprobs": True, "top_logprobs": 3}).json()
    content = body["choices"][0]["logprobs"]["content"]
    output = chat_llm.chat(HELLO, SamplingParams(max_tokens=12, temperature=0, logprobs=3))[0].outputs[0]
    assert len(content) == 12
    for entry, own in zip(content, output.logprobs or (), strict=True):
        assert entry["logprob"] == pytest.approx(own.logprob, abs=1e-4)
        assert [t["logprob"] for t in entry["top_logprobs"]] == pytest.approx([v for _, v in own.top], abs=1e-4)
        assert bytes(entry["bytes"]) == chat_llm.tokenizer.token_bytes(own.token)
        assert entry["top_logprobs"][0] == {k: entry[k] for k in ("token", "logprob", "bytes")}  # it is greedy: exactly the same
    assert "".join(e["token"] for e in content) == body["choices"][0]["message"]["content"]
    pieces = [c["logprobs"]["content"] for e in stream(client, PATH, **GREEDY, logprobs=True)[1:-1] for c in e["choices"]]
    streamed = [e for piece in pieces for e in piece]
    assert [e["token"] for e in streamed] == [e["token"] for e in content] and all(e["top_logprobs"] == [] for e in streamed)


@pytest.mark.parametrize(
    ("extra", "messages", "options"),
    [
        ({"add_generation_prompt": False}, HELLO, {"add_generation_prompt": False}),
        ({"chat_template_kwargs": {"mood": "sad "}}, HELLO, {"chat_template_kwargs": {"mood": "sad "}}),
        ({"messages": [{"role": "developer", "content": "Be kind."}, HELLO[1]]}, HELLO, {}),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]}, None, {}),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            HELLO,
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
        ),
        ({"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}, HELLO, {}),
    ],
)
def test_what_reaches_the_template(client: httpx.Client, chat_llm: LLM, extra, messages, options):
    ids = chat_llm.chat_prompt(messages or [{"role": "user", "content": "a\nb"}], **options)
    body = client.post(PATH, json={**GREEDY, "max_tokens": 1, "return_token_ids": True, **extra}).json()
    assert body["choices"][0]["prompt_token_ids"] == list(ids)
    if extra != {"messages": [{"role": "developer", "content": "Be kind."}, HELLO[1]]} and extra.get("tool_choice") != "none":
        assert ids != chat_llm.chat_prompt(HELLO)


def test_messages_as_templates_know_them():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    given = [{"role": "developer", "content": "x", "name": None}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    system, assistant = template_messages([Message(**message) for message in given])
    assert system == {"role": "system", "content": "x"}
    assert assistant == {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": {"a": [1]}}}]}


def test_stop_strings_and_their_fields(client: httpx.Client):
    text = client.post(PATH, json={**GREEDY, "max_tokens": 30}).json()["choices"][0]["message"]["content"]
    stop = text[10:13]
    body = {**GREEDY, "max_tokens": 30, "stop": [stop, "never there"]}
    choice = client.post(PATH, json=body).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
        text[: text.index(stop)],
        "stop",
        stop,
    )
    shown = client.post(PATH, json={**body, "include_stop_str_in_output": True}).json()["choices"][0]["message"]["content"]
    assert shown == text[: text.index(stop)] + stop
    assert texts(stream(client, PATH, **body))[0] == choice["message"]["content"]


def test_through_openais_client(sdk: openai.OpenAI, chat_llm: LLM):
    chat: Any = sdk.chat.completions
    options: dict[str, Any] = {"model": "stories", "messages": HELLO, "max_completion_tokens": 12, "temperature": 0}
    answer = chat.create(**options, logprobs=True, top_logprobs=2, user="me", extra_body={"top_k": 1, "min_tokens": 2})
    text = answer.choices[0].message.content
    assert text == offline(chat_llm, HELLO, SamplingParams(max_tokens=12, temperature=0))
    assert len(answer.choices[0].logprobs.content) == 12 and answer.usage.prompt_tokens_details.cached_tokens >= 0
    chunks = list(chat.create(**options, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage.completion_tokens == 12 and chunks[-2].choices[0].finish_reason == "length"
    assert [m.id for m in sdk.models.list()] == ["stories"] and sdk.models.retrieve("stories").owned_by == "pagedjax"


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"messages": [{"role": "alien", "content": "x"}]}, openai.BadRequestError, None),
    ],
)
def test_errors_through_openais_client(sdk: openai.OpenAI, change: dict[str, Any], error: type[openai.APIStatusError], param):
    with pytest.raises(error) as caught:
        sdk.chat.completions.create(**{"model": "stories", "messages": HELLO, **change})
    assert caught.value.param == param and caught.value.type in ("invalid_request_error", "not_found_error")
