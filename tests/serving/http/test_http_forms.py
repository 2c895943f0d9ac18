"""Answers of a form: every way to ask for one, in chat, completions and responses; and what cannot be asked for."""

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from typing import Annotated, Any, Literal
from unittest.mock import ANY

import httpx
import openai
import pydantic
import pytest
from http_server import Server
from sse import data_of, stream, texts

from pagedjax import LLM
from pagedjax.text import Grammars

CHAT, TEXT, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Go."}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tim", "Lily"]}, "age": {"type": "integer", "minimum": 3, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "child", "schema": SCHEMA, "strict": True}}
TAG = {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
CALLS = {"structures": [{"begin": "<f>", "schema": SCHEMA, "end": "</f>"}], "triggers": ["<"]}
COMMON: dict[str, Any] = {"max_tokens": 90, "temperature": 0}


class Child(pydantic.BaseModel):
    name: Literal["Tim", "Lily"]
    age: Annotated[int, pydantic.Field(ge=3, le=9)]


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def is_child(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and value["name"] in ("Tim", "Lily") and 3 <= value["age"] <= 9


def is_tagged(text: str) -> bool:
    return text.startswith("<f>") and text.endswith("</f>") and is_child(text[3:-4])


def answer(client: httpx.Client, path: str, form: dict[str, Any]) -> str:
    body = {**COMMON, **form, **({"messages": HELLO} if path == CHAT else {"prompt": "Once"})}
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    assert choice["finish_reason"] == "stop" and texts(stream(client, path, **body))[0] == text
    return text


@pytest.mark.parametrize(
    ("form", "right"),
    [
        ({"response_format": FORMAT}, is_child),
        ({"structured_outputs": {"json": SCHEMA}}, is_child),
        ({"guided_json": json.dumps(SCHEMA)}, is_child),
        ({"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}}, re.compile("[0-9]{3}-[a-f]{2}").fullmatch),
        ({"guided_regex": "[0-9]{3}-[a-f]{2}"}, re.compile("[0-9]{3}-[a-f]{2}").fullmatch),
        ({"structured_outputs": {"choice": ["red", "green"]}}, ("red", "green").__contains__),
        ({"guided_choice": ["red", "green"]}, ("red", "green").__contains__),
        ({"structured_outputs": {"grammar": 'start: "a" ("b" | start) "d"'}, "max_tokens": 100}, re.compile("a+bd+").fullmatch),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, is_tagged),
        ({"structured_outputs": {"structural_tag": json.dumps({"format": TAG})}}, is_tagged),
        ({"guided_grammar": 'start: "x" [a-c]'.replace("[a-c]", '("b" | "c")')}, ("xb", "xc").__contains__),
    ],
)
def test_forms(client: httpx.Client, form: dict[str, Any], right: Any):
    for path in (CHAT, TEXT):
        assert right(answer(client, path, form))
    body = {**COMMON, "max_tokens": 20, "prompt": "Once", "response_format": {"type": "text"}}
    free = client.post(TEXT, json=body).json()["choices"][0]["text"]
    with contextlib.suppress(ValueError):
        assert not right(free)  # a control


def test_free_text_with_calls_in_it(client: httpx.Client):
    """The model says what it says anyway, since it never writes the trigger."""
    body = {**COMMON, "max_tokens": 20, "prompt": "Once", "response_format": {"type": "structural_tag", **CALLS}}
    held = client.post(TEXT, json=body).json()["choices"][0]["text"]
    assert held == client.post(TEXT, json={**body, "response_format": {"type": "text"}}).json()["choices"][0]["text"]
    forced = client.post(TEXT, json={**body, "max_tokens": 60, "logit_bias": {"63": 90}})  # byte 60, "<", wherever it may stand
    assert forced.json()["choices"][0]["text"].startswith("<f>{")


def test_any_object(client: httpx.Client):
    for form in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}):
        body = {**COMMON, "messages": HELLO, "max_tokens": 12, **form}
        assert client.post(CHAT, json=body).json()["choices"][0]["message"]["content"].lstrip().startswith("{")


def test_responses(client: httpx.Client, sdk: openai.OpenAI):
    form = {"type": "json_schema", "name": "child", "schema": SCHEMA, "strict": True}
    body = {"input": "Go.", "temperature": 0, "max_output_tokens": 90, "text": {"format": form}}
    whole = client.post(RESPONSES, json=body).json()
    text = whole["output"][0]["content"][0]["text"]
    assert is_child(text) and whole["status"] == "completed" and whole["text"]["format"] == form
    events = data_of(client.post(RESPONSES, json={**body, "stream": True}).text)
    assert "".join(e["delta"] for e in events if e["type"] == "response.output_text.delta") == text
    parsed = sdk.responses.parse(model="stories", input="Go.", text_format=Child, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Child)
    body |= {"text": {"format": {"type": "json_object"}}, "max_output_tokens": 9}
    assert client.post(RESPONSES, json=body).json()["output"][0]["content"][0]["text"].lstrip().startswith("{")


def test_parsed_by_openais_client(sdk: openai.OpenAI):
    chat: Any = sdk.chat.completions
    options: dict[str, Any] = {"model": "stories", "messages": HELLO, "temperature": 0, "max_tokens": 90}
    assert isinstance(chat.parse(**options, response_format=Child).choices[0].message.parsed, Child)
    message = chat.create(**options, response_format=FORMAT).choices[0].message
    with chat.stream(**options, response_format=FORMAT) as events:
        assert events.get_final_completion().choices[0].message.content == message.content


def test_forms_are_compiled_beside_the_event_loop(client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    threads, compile_form = [], Grammars.compile

    def watched(self: Grammars, *args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread().name)
        return compile_form(self, *args, **options)

    monkeypatch.setattr(Grammars, "compile", watched)
    answer(client, TEXT, {"guided_choice": ["a"]})
    assert len(threads) == 2 and all(name.startswith("tokenizer") for name in threads)


def test_a_form_that_cannot_go_on(client: httpx.Client, chat_llm: LLM):
    """Its beginning is allowed and its end is not: an error, since what came is not of the form."""
    assert chat_llm.tokenizer is not None
    digits = [t for t in range(512) if (chat_llm.tokenizer.token_bytes(t) or b"x").isdigit()]
    body = {"prompt": "a", "max_tokens": 20, "allowed_token_ids": digits, "guided_regex": "[0-9]{3}[a-z]"}
    response = client.post(TEXT, json=body)
    error = response.json()["error"]
    assert response.status_code == 422 and (error["code"], error["param"]) == ("form_failed", "guided_regex")
    assert error["message"].startswith("an output must be able to go on in its form") and error["type"] == "invalid_request_error"
    events = data_of(client.post(TEXT, json={**body, "stream": True}).text)
    assert events[-1]["error"]["code"] == "form_failed" and re.fullmatch("[0-9]{3}", texts(events[:-1])[0])
    assert all(choice["finish_reason"] is None for event in events[:-1] for choice in event["choices"])
    with_calls = {"messages": HELLO, "structured_outputs": {"regex": "[0-9]{3}[a-z]"}, "allowed_token_ids": digits, "stream": True}
    assert data_of(client.post(CHAT, json=with_calls).text)[-1]["error"]["param"] == "structured_outputs"


def nested(levels: int) -> dict[str, Any]:
    return json.loads('{"items":' * (levels - 1) + "{}" + "}" * (levels - 1))


@pytest.mark.parametrize(
    ("path", "form", "says", "param"),
    [
        (TEXT, {"response_format": {"type": "xml"}}, "^response_format.type must be 'text', 'json_obj", "response_format.type"),
        (TEXT, {"response_format": {"type": "json_schema"}}, "^response_format.json_schema.schema must be", "response_format"),
        (TEXT, {"response_format": {**FORMAT, "type": "json_object"}}, "^response_format.json_schema must go", "response_format"),
        (TEXT, {"response_format": {"type": "structural_tag"}}, "^response_format.format must be given", "response_format"),
        (TEXT, {"response_format": {"type": "text", **CALLS}}, "^response_format.structures must go with", "response_format"),
        (TEXT, {"response_format": {**FORMAT, "type": "structural_tag"}}, "^response_format.json_schema must", "response_format"),
        (CHAT, {"response_format": {"type": "structural_tag", "format": {"type": "x"}}},
         "^response_format must have parts of the types", "response_format"),
        (TEXT, {"response_format": {**FORMAT, "x": 1}}, "^response_format.x is not a field", "response_format.x"),
        (TEXT, {"response_format": FORMAT, "guided_regex": "a"}, "^response_format and guided_regex must not", "response_format"),
        (TEXT, {"structured_outputs": {}}, "must have exactly one of .*; got none", "structured_outputs"),
        (TEXT, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "exactly one of", "structured_outputs"),
        (TEXT, {"structured_outputs": {"json_object": False}}, "exactly one of .*; got none", "structured_outputs"),
        (TEXT, {"structured_outputs": {"whitespace_pattern": "a"}}, "not a field", "structured_outputs.whitespace_pattern"),
        (TEXT, {"guided_choice": []}, "must hold texts that are not empty", "structured_outputs"),
        (TEXT, {"guided_regex": "(["}, "^guided_regex must be one that compiles; got: ", "guided_regex"),
        (CHAT, {"structured_outputs": {"grammar": "start: x"}}, "^structured_outputs.grammar must be", "structured_outputs"),
        (CHAT, {"guided_json": "{"}, "^guided_json must be a JSON schema; got text that is no JSON", "guided_json"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "dict"}}}},
         "^response_format must be one that compiles; got: Invalid type: dict", "response_format"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": nested(70)}}},
         "^a form may be nested 64 levels; got 70", "response_format"),
        (TEXT, {"structured_outputs": {"json": nested(900)}}, "^structured_outputs.json.*nested more than 128 levels", ANY),
        (TEXT, {"guided_json": '{"a":' * 9000}, "^a form may be nested 64 levels; got 9000", "guided_json"),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "f", "parameters": nested(900)}}], "tool_choice": "required"},
         "^tools.0.function.parameters .*nested more than 128 levels", ANY),
        (CHAT, {"guided_choice": ["a" * 70_000]}, "^a form may have 65536 bytes; got 70000", "guided_choice"),
        (CHAT, {"guided_regex": "a", "ignore_eos": True}, "^guided_regex must not go with ignore_eos", "guided_regex"),
        (CHAT, {"guided_regex": "a", "use_beam_search": True}, "cannot honour structured_outputs", None),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}, "^text.format must have a name and a schema; got n", "text"),
        (RESPONSES, {"text": {"format": {"type": "json_object", "name": "a"}}}, "^text.format of type json_object must", "text"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 1}}}}, "^text must be", "text"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "^text.verbosity is not a field", "text.verbosity"),
    ],
)  # fmt: skip
def test_bad_forms(client: httpx.Client, path: str, form: dict[str, Any], says: str, param: str | None):
    prompt = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "a"}, RESPONSES: {"input": "a"}}[path]
    for more in ({}, {"stream": True}):
        response = client.post(path, json={**prompt, **form, **more})
        error = response.json()["error"]
        assert response.status_code == 400 and re.search(says, error["message"]), error
        assert error["param"] == param, error
