"""What is refused, with which status, and how it is said; and that no field is taken and ignored."""

import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Server, running
from pydantic import ValidationError
from sse import data_of, stream

from pagedjax import LLM
from pagedjax.errors import QueueFull
from pagedjax.host.request import SamplingParams
from serving.auth import Key, Keys
from serving.events import Ended, Refused
from serving.http.forms import GUIDED
from serving.http.requests import ChatRequest, CompletionRequest, Conversation, Harmless, Sampling
from serving.http.sampling import SAME_NAME, sampling_params
from serving.limits import Limits
from serving.log import FIELDS, LOG

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hi"}]
DEEP = functools.reduce(lambda inner, _: {"a": inner}, range(400), {})
DOCS = Path(__file__).parents[3] / "docs" / "serving-http.md"


def refused(response: httpx.Response, status: int, says: str, param: str | None) -> None:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and response.status_code == status, response.text
    assert re.search(says, error["message"]), error
    assert error["param"] == param
    assert error["type"].endswith("_error")


@pytest.mark.parametrize(
    ("path", "body", "says", "param"),
    [
        (CHAT, {"messages": HELLO, "tempature": 1}, "^tempature is not a field that is known", "tempature"),
        (CHAT, {"messages": HELLO, "stream_options": {"x": 1}, "stream": True}, "^stream_options.x is not a", "stream_options.x"),
        (TEXT, {"prompt": "a", "messages": HELLO}, "^messages is not a field", "messages"),
        (TEXT, {}, "^prompt must be given", "prompt"),
        (TEXT, {"prompt": None}, "^prompt must be given; got null", "prompt"),
        (TEXT, {"prompt": "a", "temperature": "1"}, "^temperature must be a valid number; got '1'", "temperature"),
        (TEXT, {"prompt": "a", "n": 1.5}, "^n must be a valid integer", "n"),
        (TEXT, {"prompt": "a", "n": True}, "^n must be a valid integer", "n"),
        (TEXT, {"prompt": "a", "n": 0}, "^n must be between 1 and 128", "n"),
        (TEXT, {"prompt": "a", "n": 17}, "^n, best_of and beams may be 16; got 17", "n"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "^logprobs must be between 0 and 20", "logprobs"),
        (TEXT, {"prompt": "a", "top_p": 0}, r"^top_p must be in \(0, 1\]; got 0", "top_p"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "^max_tokens must be at least 1; got 0", "max_tokens"),
        (TEXT, {"prompt": "a", "logit_bias": {"9999": 1}}, "logit_bias must be token ids below 512; got 9999", "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "^each token of logit_bias must be an integer", "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"5": "x"}}, "^logit_bias values must be numbers; got 'x'", "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"5": 10**400}}, r"^logit_bias values must be in \[-100, 100\]", "logit_bias"),
        (TEXT, {"prompt": "a", "max_tokens": 10**40}, "^max_tokens must be below 2", "max_tokens"),
        (TEXT, {"prompt": "a", "min_tokens": 10**12}, "^min_tokens must be below 2", "min_tokens"),
        (TEXT, {"prompt": "a", "top_k": 10**12}, "^top_k must be below 2", "top_k"),
        (TEXT, {"prompt": "a", "allowed_token_ids": [-1], "guided_regex": "a"}, "^guided_regex must allow", "guided_regex"),
        (TEXT, {"prompt": "a", "stop": ["a"] * 17}, "^stop may hold 16 strings", "stop"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "^suffix must be absent", "suffix"),
        (TEXT, {"prompt": "a", "length_penalty": 2}, "^length_penalty and early_stopping must", "length_penalty"),
        (TEXT, {"prompt": "a", "best_of": 1, "n": 2}, "^best_of must be between n, which is 2", "best_of"),
        (TEXT, {"prompt": "a", "use_beam_search": True, "echo": True, "logprobs": 1}, "^logprobs must not", "logprobs"),
        (TEXT, {"prompt": "a", "use_beam_search": False, "beam_width": 2}, "^beam_width must go with", "beam_width"),
        (TEXT, {"prompt": []}, "^prompt must be a text, a list of token ids, or a list of either", "prompt"),
        (TEXT, {"prompt": ["a", 1]}, "^prompt must be a text.*got 1 in a list", "prompt"),
        (TEXT, {"prompt": [1, 512]}, "prompt must be token ids below 512; got 512", "prompt"),
        (TEXT, {"prompt": ["a"] * 65}, "^a call may hold 64 prompts; got 65", "prompt"),
        (TEXT, {"prompt": "a " * 200}, "^a prompt may have 127 tokens where the context is 128", "prompt"),
        (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "^stream_options must go", "stream_options"),
        (TEXT, {"prompt": "a", "stream": True, "stream_options": {"include_obfuscation": True}}, "be false", "stream_options"),
        (CHAT, {"messages": []}, "^messages must ", "messages"),
        (CHAT, {"messages": [{"role": 1}]}, "^messages.0.role must be a valid string", "messages.0.role"),
        (CHAT, {"messages": [{"role": "alien"}]}, "^the chat template refused the messages: .*no role alien", None),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"^messages\[0\].content parts", "messages"),
        (CHAT, {"messages": HELLO, "tools": [{"type": "web"}]}, "^tools.0.type must be 'function'", "tools.0.type"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "^top_logprobs must go with logprobs=true", "top_logprobs"),
        (CHAT, {"messages": HELLO, "max_tokens": 1, "max_completion_tokens": 2}, "^max_tokens and", "max_tokens"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, "must not hold", "chat_template_kwargs"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"template": 1}}, "must not hold", "chat_template_kwargs"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"self": 1}}, "must not hold", "chat_template_kwargs"),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": {"chat_template": ["x"]}}, "^the chat template must be one of", None),
        (CHAT, {"messages": HELLO, "chat_template_kwargs": DEEP}, "nested more than 128 levels", "chat_template_kwargs"),
        (CHAT, {"messages": [{**HELLO[0], "more": DEEP}]}, "nested more than 128 levels", "messages.0.more"),
        (CHAT, {"messages": [{"role": "a", "tool_calls": [{"function": {"arguments": "{"}}]}]}, "must be JSON", "messages"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [1]}]}, r"tool_calls\[0\] must be an object", "messages"),
        (RESPONSES, {"input": "a", "previous_response_id": "r"}, "^previous_response_id cannot be", "previous_response_id"),
        (RESPONSES, {"input": "a", "include": ["x"]}, "^include cannot be", "include"),
        (RESPONSES, {"input": [{"type": "function_call"}]}, r"^input\[0\] must be a message", "input"),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"content parts must be texts", "input"),
        (RESPONSES, {"input": "a", "seed": 1}, "^seed is not a field", "seed"),
        ("/tokenize", {}, "^prompt or messages must be given", "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "^tools must go with messages", "tools"),
        ("/detokenize", {"tokens": [-1]}, "^each of tokens must be a token id; got -1", "tokens"),
    ],
)  # fmt: skip
def test_bad_requests(client: httpx.Client, path: str, body: dict[str, Any], says: str, param: str | None):
    refused(client.post(path, json=body), 400, says, param)
    if body.get("stream"):
        return
    streamed = client.post(path, json={**body, "stream": True}) if path.startswith("/v1") and "stream_options" not in body else None
    if streamed is not None:  # before the first byte an error has its status in a stream, too
        refused(streamed, 400, says, param)


@pytest.mark.parametrize(
    ("content", "kind", "says"),
    [
        (b"{", "application/json", "^the body must be JSON"),
        (b'{"prompt": "a"}', "text/plain", "^the body must be JSON, with content-type: application/json"),
        (b"[" * 100_000, "application/json", "body"),
        (b'{"prompt": "a", "temperature": ' + b"9" * 400 + b"}", "application/json", "^temperature must be"),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", "^temperature must be"),
        (b'{"prompt": "a", "seed": ' + b"9" * 30 + b"}", "application/json", "^seed must be in"),
        (b"\xff\xfe", "application/json", "body"),
        (b'{"prompt": "\\ud800"}', "application/json", "valid Unicode; got a lone surrogate"),
        (b'{"prompt": "a", "\\ud800": 1}', "application/json", "body"),
        (b'{"prompt": "a", "cache_salt": "\\ud800"}', "application/json", "^cache_salt must be valid Unicode"),
        (b'{"prompt": "a", "guided_regex": "\\ud800"}', "application/json", "^structured_outputs.regex must be valid Unicode"),
        (b'{"prompt": ' + b"[" * 800 + b"]" * 800 + b"}", "application/json", "^prompt must be a text"),
    ],
)
def test_bodies_that_are_no_requests(client: httpx.Client, content: bytes, kind: str, says: str):
    response = client.post(TEXT, content=content, headers={"content-type": kind})
    error = response.json()["error"]
    assert response.status_code == 400 and re.search(says, error["message"]), error


def test_other_statuses(client: httpx.Client):
    for path in (TEXT, CHAT):
        body = {"model": "gpt", "prompt": "a"} if path == TEXT else {"model": "gpt", "messages": HELLO}
        refused(client.post(path, json=body), 404, "^the model served here is 'stories'; got 'gpt'", "model")
    refused(client.get("/v1/models/gpt"), 404, "got 'gpt'", "model")
    refused(client.get("/nothing"), 404, "Not Found", None)
    refused(client.get(TEXT), 405, "Method Not Allowed", None)
    refused(
        client.post(TEXT, json={"prompt": "a"}, headers={"x-request-timeout": "soon"}), 400, "must be seconds; got 'soon'", None
    )
    refused(client.post(TEXT, json={"prompt": "a"}, headers={"x-priority": "high"}), 400, "a priority is an integer", "x-priority")
    late = client.post(TEXT, json={"prompt": "a", "max_tokens": 120, "ignore_eos": True}, headers={"x-request-timeout": "0.001"})
    refused(late, 504, "deadline", None)


def test_bodies_that_are_too_large(chat_llm: LLM):
    with running(chat_llm, limits=Limits(max_message_bytes=4096)) as server, server.client() as client:
        body = {"prompt": "a" * 5000}
        refused(client.post(TEXT, json=body), 413, "^a body may have 4096 bytes", None)
        chunks = (b" " * 1000 for _ in range(50))  # without a content-length
        refused(client.post(TEXT, content=chunks, headers={"content-type": "application/json"}), 413, "4096 bytes", None)
        assert client.post(TEXT, json={"prompt": "a" * 100, "max_tokens": 1}).status_code == 200


def test_a_body_full_of_errors_is_told_the_first():
    for body in (
        {"messages": [1] * 1000},
        {"messages": HELLO, "tools": [1] * 1000},
        {"messages": HELLO, "stop_token_ids": ["a"] * 1000},
    ):
        with pytest.raises(ValidationError) as caught:
            ChatRequest.model_validate(body)
        assert caught.value.error_count() == 1


def test_long_chats_are_refused_before_they_are_rendered(chat_llm: LLM):
    with running(chat_llm, limits=Limits(max_prompt_chars=100)) as server, server.client() as client:
        for content in ("a" * 101, [{"type": "text", "text": "a" * 60}] * 2):
            body = {"messages": [{"role": "user", "content": content}]}
            for path in (CHAT, "/tokenize"):
                refused(client.post(path, json=body), 400, "^a prompt may have 100 characters; got 1[23]?", "prompt")
        assert client.post(CHAT, json={"messages": HELLO, "max_tokens": 1}).status_code == 200


def test_an_overload_says_when_to_come_back(server: Server, client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    def full(_: Any) -> None:
        raise QueueFull("the queue is full", retry_after=2.3)

    monkeypatch.setattr(server.llm.engine, "add", full)
    for body in ({"prompt": "a"}, {"prompt": ["a", "b"]}, {"prompt": "a", "stream": True}):
        response = client.post(TEXT, json=body)
        refused(response, 429, "the queue is full", None)
        assert response.headers["retry-after"] == "3" and response.json()["error"]["type"] == "rate_limit_error"


def test_an_error_of_ours_keeps_its_words(
    server: Server, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(server.frontend, "tokenize", broken)
    response = client.post("/tokenize", json={"prompt": "a"}, headers={"x-request-id": "mine"})
    records = [record for record in caplog.records if record.name == LOG.name]
    assert [(r.getMessage(), vars(r)[FIELDS]) for r in records] == [("an answer failed", {"header_id": "mine"})]
    refused(response, 500, "an error of the server's own", None)
    assert "secret" not in response.text and response.json()["error"]["type"] == "server_error"


def test_an_error_after_the_first_byte_is_one_event(server: Server, client: httpx.Client, slow_steps: None):
    body = {"prompt": "Once", "max_tokens": 100, "ignore_eos": True, "stream": True}
    response = client.post(TEXT, json=body, headers={"x-request-timeout": "1"})
    *pieces, last = data_of(response.text)
    assert response.status_code == 200 and len(pieces) > 1
    assert last["error"]["code"] == "deadline_exceeded" and all("choices" in piece for piece in pieces)


def test_keys(chat_llm: LLM):
    def key(name: str, **more: Any) -> Key:
        return Key(name, hashlib.sha256(name.encode()).hexdigest(), **more)

    keys = Keys((key("a", tenant="red"), key("b", tenant="*", priority=-5)))
    with running(chat_llm, keys) as server, server.client() as client:
        body = {"prompt": "a", "max_tokens": 1}
        for path in ("/health", "/ready", "/version", "/metrics", "/ui"):
            assert client.get(path).status_code == 200
        for path in ("/v1/models", "/ui/state"):
            refused(client.get(path), 401, "an API key is needed", None)
        refused(client.post(TEXT, json=body), 401, "an API key is needed", None)
        refused(client.post(TEXT, json=body, headers={"authorization": "Bearer c"}), 401, "not known", None)
        other = {"authorization": "Bearer a", "x-tenant": "blue"}
        refused(client.post(TEXT, json=body, headers=other), 403, "not of tenant 'blue'", "x-tenant")
        refused(
            client.post(TEXT, json=body, headers={"authorization": "Bearer a", "x-priority": "-1"}), 403, "may have", "x-priority"
        )
        assert client.post(TEXT, json=body, headers={"authorization": "Bearer a"}).status_code == 200
        assert client.get("/v1/models", headers={"x-api-key": "a"}).status_code == 200
        gateway = {"authorization": "Bearer b", "x-tenant": "blue", "x-priority": "-3"}
        assert client.post(TEXT, json=body, headers=gateway).status_code == 200
        codes = [event.refusal.code for event in server.events if isinstance(event, Refused)]
        assert codes == ["unauthenticated"] * 4 + ["permission_denied"] * 2
        requests = [event.request for event in server.events if isinstance(event, Ended)]
        assert [(r.service.tenant, r.service.priority, r.salt) for r in requests] == [("red", 0, "red"), ("blue", -3, "blue")]


# --- no field is taken and ignored ----------------------------------------------------------------------------------

VALUES: dict[str, Any] = {
    "n": 2, "min_tokens": 2, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5, "presence_penalty": 1.0,
    "frequency_penalty": 1.0, "repetition_penalty": 1.5, "seed": 1, "logit_bias": {"5": 1.0}, "allowed_token_ids": [5],
    "bad_words": ["a"], "stop": ["x"], "stop_token_ids": [7], "include_stop_str_in_output": True, "ignore_eos": True,
    "skip_special_tokens": False, "best_of": 3, "max_tokens": 5,
}  # fmt: skip
ELSEWHERE = {  # honoured, or refused, by something else than SamplingParams; each has a test of its own
    *("model", "stream", "stream_options", "cache_salt", "service_tier", "return_token_ids"),
    *("response_format", "structured_outputs", *GUIDED),
    *("use_beam_search", "beam_width", "length_penalty", "early_stopping"),
}


@pytest.mark.parametrize(("name", "value"), VALUES.items())
def test_a_field_changes_the_sampling_parameters(name: str, value: Any):
    for make in (lambda **b: ChatRequest(messages=HELLO, **b), lambda **b: CompletionRequest(prompt="a", **b)):
        plain, changed = sampling_params(make(), {}), sampling_params(make(**{name: value}), {})
        expected = {5: 1.0} if name == "logit_bias" else tuple(value) if isinstance(value, list) else value
        assert getattr(changed, name) == expected != getattr(plain, name)


def test_every_field_is_accounted_for():
    assert {*VALUES, *ELSEWHERE, *Harmless.model_fields} == set(Sampling.model_fields)
    assert {*SAME_NAME, "logit_bias", "max_tokens"} == {*VALUES, "length_penalty", "early_stopping"}
    assert set(SAME_NAME) <= set(Sampling.model_fields) and set(SAME_NAME) <= set(SamplingParams.__dataclass_fields__)
    others = {"max_completion_tokens", "logprobs", "top_logprobs", "tool_choice", "parallel_tool_calls"}
    assert set(ChatRequest.model_fields) == {*Sampling.model_fields, *Conversation.model_fields, *others}
    others = {"prompt", "suffix", "echo", "logprobs", "add_special_tokens"}
    assert set(CompletionRequest.model_fields) == {*Sampling.model_fields, *others}


def test_the_makers_defaults_hold_until_a_request_says_otherwise():
    defaults = {"temperature": 0.6, "top_k": 20, "max_tokens": 99}
    chat = sampling_params(ChatRequest(messages=HELLO, top_k=0), defaults)
    assert (chat.temperature, chat.top_k, chat.max_tokens) == (0.6, 0, 99)
    assert sampling_params(ChatRequest(messages=HELLO), {}).max_tokens is None  # as long as there is room
    assert sampling_params(CompletionRequest(prompt="a"), {}).max_tokens == 16
    beams = sampling_params(CompletionRequest(prompt="a", use_beam_search=True, n=2, early_stopping=True), defaults)
    assert (beams.beam_width, beams.top_k, beams.max_tokens, beams.early_stopping) == (2, 0, 99, True)


def test_harmless_fields_are_taken_and_documented(client: httpx.Client):
    values = dict.fromkeys(Harmless.model_fields, "anything")
    plain = client.post(TEXT, json={"prompt": "Once", "temperature": 0}).json()
    body = client.post(TEXT, json={"prompt": "Once", "temperature": 0, **values}).json()
    assert body["choices"] == plain["choices"]
    listed = re.search(r"Taken and not used: (.*?)\.\n", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    assert listed and set(re.findall("`([a-z_]+)`", listed[1])) == set(Harmless.model_fields)


def test_cache_salt_and_tier_reach_the_engine(server: Server, client: httpx.Client):
    options = {"prompt": "The quick brown fox jumps over the dog", "max_tokens": 1}
    cached = lambda **body: client.post(TEXT, json={**options, **body}).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached(cache_salt="a") == 0 < cached(cache_salt="a") and cached(cache_salt="b") == 0
    assert cached(service_tier="flex", cache_salt="a") > 0
    assert [e.request.service.pool for e in server.events if isinstance(e, Ended)][-1] == "batch"
    refused(client.post(TEXT, json={**options, "service_tier": "priority"}), 400, "^service_tier must be 'auto'", "service_tier")


def test_streams_of_bad_requests_are_no_streams(client: httpx.Client):
    with pytest.raises(AssertionError, match="top_p must be"):
        stream(client, TEXT, prompt="a", top_p=2)
