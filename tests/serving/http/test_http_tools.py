"""Tool calls in chat: those that a model writes, and those that it is made to write. The model is tiny and calls nothing of its own
accord, so a grammar makes it write calls in the way of a family."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import httpx
import jsonschema
import openai
import pytest
from http_server import Server, running
from sse import stream, texts

from pagedjax import LLM
from pagedjax.text.tool_calls import FAMILIES, family_named
from serving.config import ServeConfig, ToolParser
from serving.http.requests import Tool
from serving.http.shapes import CallPiece, joined_calls
from serving.http.tools import CallReader, ForcedCalls, WrittenCalls, _calls_schema

PATH = "/v1/chat/completions"
SAMPLE = Path(__file__).parents[2] / "golden" / "bfcl" / "sample.jsonl"
HELLO = [{"role": "user", "content": "Go."}]


def tool(name: str, **properties: Any) -> dict[str, Any]:
    kind = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": kind}}


DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
ADD = tool("add", a=DIGIT, b={"enum": ["x", "}]"]})
BODY: dict[str, Any] = {"messages": HELLO, "tools": [ADD], "seed": 3, "max_tokens": 200}
CALL = r'\n<tool_call>\n\{"name": "add", "arguments": \{"a": [0-9], "b": "\}\]"\}\}\n</tool_call>'
WRITTEN: dict[str, Any] = {**BODY, "structured_outputs": {"regex": "Sure: [a-z]{5}" + CALL + CALL}}


@pytest.fixture(scope="module")
def server(tools_llm: LLM) -> Iterator[Server]:
    with running(tools_llm) as server:
        yield server
        assert server.frontend.open_requests == 0


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def choices_of(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    response = client.post(PATH, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


def streamed_calls(events: list[Any]) -> dict[int, list[tuple[str, str]]]:
    """(name, arguments) of each call of each choice, put together as the deltas say."""
    found: dict[int, dict[int, list[str]]] = {}
    for choice in (choice for event in events[:-1] for choice in event["choices"]):
        calls = found.setdefault(choice["index"], {})
        pieces = choice["delta"].get("tool_calls", [])
        assert len({piece["index"] for piece in pieces}) == len(pieces)  # many clients look at the first one alone
        for piece in pieces:
            if "id" in piece:
                assert piece["type"] == "function" and piece["index"] == len(calls)
                calls[piece["index"]] = [piece["function"]["name"], ""]
            calls[piece["index"]][1] += piece["function"]["arguments"]
    return {index: [(name, text) for name, text in calls.values()] for index, calls in found.items()}


def plain(message: dict[str, Any]) -> list[tuple[str, str]]:
    return [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]


def test_calls_that_a_model_writes(client: httpx.Client):
    """The words before them are the content; a stream says the same; logprobs and usage are of all tokens."""
    body = {**WRITTEN, "logprobs": True}
    response = client.post(PATH, json=body).json()
    (choice,) = response["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and re.fullmatch("Sure: [a-z]{5}", message["content"])
    assert [name for name, _ in plain(message)] == ["add", "add"]
    for call in message["tool_calls"]:
        assert call["type"] == "function" and re.fullmatch("call_[0-9a-f]{24}", call["id"])
        assert json.loads(call["function"]["arguments"])["b"] == "}]"
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert len(choice["logprobs"]["content"]) == response["usage"]["completion_tokens"]
    events = stream(client, PATH, **body, stream_options={"include_usage": True})
    assert texts(events)[0] == message["content"] and streamed_calls(events) == {0: plain(message)}
    assert events[-3]["choices"][0]["finish_reason"] == "tool_calls"
    assert events[-2]["usage"]["completion_tokens"] == response["usage"]["completion_tokens"]
    assert sum(len(c["logprobs"]["content"]) for e in events[:-2] for c in e["choices"] if c["logprobs"]) == len(
        choice["logprobs"]["content"]
    )
    (alone,) = choices_of(client, **WRITTEN, parallel_tool_calls=False)
    assert plain(alone["message"]) == plain(message)[:1] and alone["finish_reason"] == "tool_calls"
    (unread,) = choices_of(client, **WRITTEN, tool_choice="none")  # a control: nobody reads calls
    assert "<tool_call>" in unread["message"]["content"] and "tool_calls" not in unread["message"]


def test_without_calls_it_is_an_answer(client: httpx.Client):
    for text in ("no", "<tool_call>no</tool_call>"):
        (choice,) = choices_of(client, **BODY, structured_outputs={"choice": [text]})
        assert choice["message"] == {"role": "assistant", "content": text, "refusal": None} and choice["finish_reason"] == "stop"
    body = {**BODY, "max_tokens": 30, "structured_outputs": {"regex": CALL}}  # cut off within the call
    (choice,) = choices_of(client, **body)
    assert choice["finish_reason"] == "length" and choice["message"]["content"].startswith("\n<tool_call>")
    assert texts(stream(client, PATH, **body))[0] == choice["message"]["content"]


def test_a_mark_that_is_a_special_token(tools_llm: LLM, client: httpx.Client):
    """The reader sees it and the client does not. Ids are such as Mistral's templates take."""
    calls = r'start: "Ah " <[507]> "[{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": \"x\"}}]"'
    with running(tools_llm, tool_parser="mistral") as server, server.client() as other:
        body = {**BODY, "structured_outputs": {"grammar": calls}}
        (choice,) = choices_of(other, **body)
        message = choice["message"]
        assert (message["content"], plain(message)) == ("Ah", [("add", '{"a": 1, "b": "x"}')])
        assert re.fullmatch("[0-9a-zA-Z]{9}", message["tool_calls"][0]["id"])
        assert streamed_calls(stream(other, PATH, **body)) == {0: plain(message)}
        broken = {**BODY, "structured_outputs": {"grammar": 'start: "so " <[507]> "no"'}}
        assert choices_of(other, **broken)[0]["message"]["content"] == "so no"
        assert texts(stream(other, PATH, **broken)) == {0: "so no"}
        shown = choices_of(other, **broken, skip_special_tokens=False)[0]["message"]["content"]
        assert shown == "so [TOOL_CALLS]no"
    (choice,) = choices_of(client, **body)  # hermes looks for something else
    assert choice["message"]["content"].startswith("Ah [{") and "tool_calls" not in choice["message"]


def test_required_and_named(client: httpx.Client):
    mul = tool("mul", c={"enum": ["long", "longer"]})
    body = {**BODY, "tools": [ADD, mul], "temperature": 1.5, "n": 4}
    one = {**body, "tool_choice": "required", "parallel_tool_calls": False}
    choices = choices_of(client, **one)
    made = [plain(choice["message"]) for choice in choices]
    assert all(len(calls) == 1 for calls in made) and len({calls[0] for calls in made}) > 1
    assert {choice["finish_reason"] for choice in choices} == {"tool_calls"}
    assert {choice["message"]["content"] for choice in choices} == {None}
    events = stream(client, PATH, **one)
    assert streamed_calls(events) == dict(enumerate(made)) and set(texts(events).values()) == {""}
    named = {**body, "tool_choice": {"type": "function", "function": {"name": "mul"}}}
    choices = choices_of(client, **named)
    made = [plain(c["message"]) for c in choices]
    assert [[(name, *json.loads(text)) for name, text in calls] for calls in made] == [[("mul", "c")]] * 4
    assert streamed_calls(stream(client, PATH, **named)) == {c["index"]: plain(c["message"]) for c in choices}
    (cut,) = choices_of(client, **{**named, "n": 1, "max_tokens": 3})
    ((name, begun),) = plain(cut["message"])
    assert cut["finish_reason"] == "length" and name == "mul" and made[0][0][1].startswith(begun) and begun != made[0][0][1]


def test_several_calls_are_required_one_after_the_other(client: httpx.Client):
    body = {**BODY, "tools": [tool("f", a=DIGIT)], "tool_choice": "required", "temperature": 1.0, "max_tokens": 120, "seed": 1}
    choice = next(c for seed in range(20) for c in choices_of(client, **{**body, "seed": seed}) if len(plain(c["message"])) > 1)
    for name, arguments in plain(choice["message"])[:-1]:
        assert name == "f" and 0 <= json.loads(arguments)["a"] <= 9


def bounded(schema: Any) -> Any:
    """A parameter of the leaderboard in JSON schema's words, and small enough for a tiny model to come to an end."""
    kind = {"dict": "object", "float": "integer", "tuple": "array"}.get(schema.get("type"), schema.get("type"))
    match kind:
        case "object":
            properties = {name: bounded(each) for name, each in schema.get("properties", {}).items()}
            required = [name for name in schema.get("required", ()) if name in properties]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {"type": "array", "items": bounded(schema.get("items", {"type": "string"})), "maxItems": 2}
        case "integer":
            return {"type": "integer", "minimum": 0, "maximum": 99}
        case "boolean":
            return {"type": "boolean"}
    return {"enum": schema["enum"]} if "enum" in schema else {"type": "string", "maxLength": 4}


def test_forced_calls_of_the_leaderboard_fit_their_tools(client: httpx.Client):
    rows = [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()][::4]
    tasks = []
    for i, row in enumerate(rows):
        tools = [
            {"type": "function", "function": {"name": f["name"], "parameters": bounded(f["parameters"])}} for f in row["function"]
        ]
        name = {"type": "function", "function": {"name": tools[-1]["function"]["name"]}}
        base = {"messages": HELLO, "tools": tools, "max_tokens": 400, "seed": i, "parallel_tool_calls": False}
        tasks += [{**base, "tool_choice": choice} for choice in ("required", name)]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda body: choices_of(client, **body)[0], tasks))
    for body, choice in zip(tasks, answers, strict=True):
        schemas = {t["function"]["name"]: t["function"]["parameters"] for t in body["tools"]}
        assert choice["finish_reason"] == "tool_calls", choice
        ((name, arguments),) = plain(choice["message"])
        jsonschema.validate(json.loads(arguments), schemas[name])
        assert body["tool_choice"] == "required" or name == body["tool_choice"]["function"]["name"]
    (free,) = choices_of(client, **{**tasks[0], "tool_choice": "none", "max_tokens": 40})  # a control
    with pytest.raises(ValueError):
        json.loads(free["message"]["content"])


def test_through_openais_client(sdk: openai.OpenAI):
    chat: Any = sdk.chat.completions
    options: dict[str, Any] = {"model": "stories", "messages": HELLO, "tools": [ADD], "seed": 5, "tool_choice": "required"}
    answer = chat.create(**options, parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "add" and json.loads(call.function.arguments)["b"] in ("x", "}]")
    with chat.stream(**options, parallel_tool_calls=False) as events:
        kinds = {event.type for event in events}
        final = events.get_final_completion()
    (streamed,) = final.choices[0].message.tool_calls
    assert streamed.function.arguments == call.function.arguments and "tool_calls.function.arguments.done" in kinds
    again = [*HELLO, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    assert chat.create(**{**options, "messages": again, "tool_choice": "none"}, max_tokens=3).choices[0].message.content


@pytest.mark.parametrize(
    ("change", "says", "param"),
    [
        ({"tool_choice": "some"}, "^tool_choice", None),
        ({"tool_choice": {"type": "function"}}, "^tool_choice must be none, auto, required or", "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "sub"}}}, "one of the tools; got 'sub'", "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "^tool_choice must go with tools; got 'required'", "tool_choice"),
        ({"tools": [ADD, ADD]}, "^tools must have names of their own", "tools"),
        ({"response_format": {"type": "json_object"}}, "^response_format must not go with tools", "response_format"),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, "must not go with calls", "structured_outputs"),
        ({"tools": [{**ADD, "function": {"name": "f", "parameters": {"type": "string"}}}], "tool_choice": "required"},
         r'^tools\[0\].function.parameters.type must be "object"; got \'string\'', "tools"),
        ({"tools": [tool("f", a={"type": "dict"})], "tool_choice": "required"}, "^tools must be one that compiles", "tools"),
        ({"tools": [tool(f"f{i}", a={"enum": ["x" * 99]}) for i in range(999)], "tool_choice": "required"}, "65536 bytes", "tools"),
    ],
)  # fmt: skip
def test_bad_requests(client: httpx.Client, change: dict[str, Any], says: str, param: str | None):
    response = client.post(PATH, json={**BODY, **change})
    error = response.json()["error"]
    assert response.status_code == 400 and re.search(says, error["message"]), error
    assert param is None or error["param"] == param


def test_a_template_that_teaches_no_calls(tools_llm: LLM, client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    """What a schema forces needs nobody to teach it."""
    assert tools_llm.tokenizer is not None
    monkeypatch.setitem(tools_llm.tokenizer.templates, "default", "{{ messages[0].content }}")  # pyright: ignore
    error = client.post(PATH, json=BODY).json()["error"]
    assert (
        error["message"].startswith("tools must go with a tool_choice of required, none or a function")
        and error["param"] == "tools"
    )
    assert plain(choices_of(client, **BODY, tool_choice="required", parallel_tool_calls=False)[0]["message"])


def test_the_parsers_that_can_be_named():
    assert set(get_args(ToolParser)) == {"auto", *(family.name for family in FAMILIES)}
    with pytest.raises(ValueError, match="tool_parser must be one of auto, .*; got 'x'"):
        ServeConfig(tool_parser="x")  # pyright: ignore[reportArgumentType]


# --- readers, in any pieces ------------------------------------------------------------------------------------------


def read(reader: CallReader, pieces: list[str]) -> tuple[str, list[CallPiece]]:
    said, calls = "", []
    for i, piece in enumerate(pieces):
        more, found = reader.read(piece, ended=i == len(pieces) - 1)
        said, calls = said + more, calls + found
    return said, calls


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_readers_in_pieces(size: int):
    def cut(text: str) -> list[str]:
        return [text[i : i + size] for i in range(0, len(text), size)]

    arguments = ['{"a": "\\"}{]", "b": {"c": [{}]}}', "{}", '{ "x" : "\\\\" }']
    text = "[" + ",\n ".join(f'{{"name": "f\\"{i}", "arguments": {a}}}' for i, a in enumerate(arguments)) + "]"
    said, calls = read(ForcedCalls(None, lambda: "id"), cut(text))
    assert said == "" and plain({"tool_calls": joined_calls(calls)}) == [(f'f"{i}', a) for i, a in enumerate(arguments)]
    for whole in arguments:
        said, calls = read(ForcedCalls("f", lambda: "id"), cut(f" {whole} "))
        assert said == "" and plain({"tool_calls": joined_calls(calls)}) == [("f", whole)]
    assert read(ForcedCalls(None, lambda: "id"), cut('[{"name": "f')) == ('[{"name": "f', [])
    marks = family_named("deepseek").marks
    call = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    text = f"<｜so <｜tool▁sep｜>is{call} it <｜tool"
    said, calls = read(WrittenCalls(family_named("deepseek"), [], lambda: "id", one=False, marks=marks), cut(text))
    assert said == "<｜so isit <｜tool"
    assert plain({"tool_calls": joined_calls(calls)}) == [("f", "{}")]


def test_references_within_parameters():
    point = {"type": "object", "properties": {"x": DIGIT}, "required": ["x"], "additionalProperties": False}
    parameters = {"type": "object", "$defs": {"P": point}, "properties": {"p": {"$ref": "#/$defs/P"}}, "required": ["p"]}
    tools = [Tool.model_validate(ADD), Tool.model_validate({**ADD, "function": {"name": "g", "parameters": parameters}})]
    schema = _calls_schema(tools, one=True)
    jsonschema.validate([{"name": "g", "arguments": {"p": {"x": 3}}}], schema)
    for wrong in ([], [{"name": "g", "arguments": {"p": 3}}], [{"name": "h", "arguments": {}}]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
