"""Tool calls: what templates write of a call is read back, in whatever pieces it comes."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from pagedjax.errors import UserError
from pagedjax.text.chat import render
from pagedjax.text.tool_calls import FAMILIES, ToolCall, ToolCallReader, family_named, family_of

GOLDEN = Path(__file__).parents[1] / "golden"
TEMPLATES = {path.stem: path.read_text() for path in (GOLDEN / "chat_templates").glob("*.jinja")}
WANTED = {
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "deepseek-ai-DeepSeek-V3.1": "deepseek",
    "ibm-granite-granite-3.3-2B-Instruct": "granite",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "openai-gpt-oss-120b": "gpt_oss",
    "microsoft-Phi-3.5-mini-instruct": None,
}
ENDS = ("<|im_end|>", "</s>", "<｜end▁of▁sentence｜>", "<|call|>")
KINDS = {"dict": "object", "float": "number", "tuple": "array", "any": None}


@pytest.mark.parametrize("name", WANTED)
def test_the_family_of_a_template(name: str):
    family = family_of(TEMPLATES[name])
    assert (None if family is None else family.name) == WANTED[name]


def tool(function: dict[str, Any]) -> dict[str, Any]:
    """As OpenAI's API has it; the leaderboard has names of Python's types."""

    def plain(schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        made = {key: plain(value) for key, value in schema.items()}
        if isinstance(made.get("type"), str):
            made["type"] = KINDS.get(made["type"], made["type"]) or "object"
        return made

    return {"type": "function", "function": function | {"parameters": plain(function["parameters"])}}


def examples() -> list[tuple[list[dict[str, Any]], list[dict[str, Any]], list[tuple[str, dict[str, Any]]]]]:
    """(messages, tools, the calls that are right) of the leaderboard's sample."""
    found = []
    for line in (GOLDEN / "bfcl" / "sample.jsonl").read_text().splitlines():
        row = json.loads(line)
        calls = [
            (name, {key: values[0] for key, values in arguments.items() if values[0] != ""})
            for truth in row["ground_truth"]
            for name, arguments in truth.items()
        ]
        found.append((row["question"], [tool(f) for f in row["function"]], calls))
    return found


def written(template: str, messages: list[dict[str, Any]], tools: list[dict[str, Any]], calls: Any, content: str) -> str:
    """What the model has to say for these calls: the template's text of them, without the end of the turn."""
    made = [
        {"id": f"{i:09d}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    variables = {"tools": tools, "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": False}
    before = render(template, messages, variables | {"add_generation_prompt": True})
    after = render(template, [*messages, {"role": "assistant", "content": content, "tool_calls": made}], variables)
    same = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))
    text = after[same:].strip()
    for end in ENDS:
        text = text.removesuffix(end)
    return text


def read(family: str, tools: list[dict[str, Any]], text: str, seed: int) -> tuple[str, list[ToolCall]]:
    """The text in random pieces."""
    rng, reader = random.Random(seed), ToolCallReader(family_named(family), tools)
    said, calls, at = "", [], 0
    while at < len(text):
        size = rng.choice((1, 2, 3, 7, 30))
        more, found = reader.feed(text[at : at + size])
        said, calls, at = said + more, calls + found, at + size
    more, found = reader.end()
    return said + more, calls + found


@pytest.mark.parametrize("name", [name for name, family in WANTED.items() if family not in (None, "granite")])
@pytest.mark.parametrize("content", ["", "I will look: <that> up."])
def test_what_a_template_writes_is_read_back(name: str, content: str):
    family = WANTED[name]
    assert family is not None
    if family in ("mistral", "gpt_oss"):  # these write no content beside calls
        content = ""
    for i, (messages, tools, calls) in enumerate(examples()):
        several = calls[:1] if family == "gpt_oss" else calls
        text = written(TEMPLATES[name], messages, tools, several, content)
        said, found = read(family, tools, text, i)
        assert [(call.name, json.loads(call.arguments)) for call in found] == several, text
        assert said.strip().removeprefix("<think></think>").removeprefix("<think>\n\n</think>").strip() == content


@pytest.mark.parametrize("family", ["granite", "mistral", "llama3"])
def test_lists_of_objects(family: str):
    begin = {"granite": "<|tool_call|>", "mistral": "[TOOL_CALLS]", "llama3": ""}[family]
    for i, (_, tools, calls) in enumerate(examples()):
        if family == "llama3":
            calls = calls[:1]
            text = json.dumps({"name": calls[0][0], "parameters": calls[0][1]})
        else:
            text = begin + json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls])
        said, found = read(family, tools, text, i)
        assert [(call.name, json.loads(call.arguments)) for call in found] == calls and said == ""


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_a_text_without_calls_is_what_it_is(family: str):
    for i, text in enumerate(
        ("", "x", " two < three [TOOL <tool \n\n", "a <tool_cal and <｜tool▁ or [TOOL_CALL", "is {it} so?", "日本 🙂\n ")
    ):
        assert read(family, [], text, i) == (text, [])


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("hermes", 'so: <tool_call>\n{"name": "f", "arguments": {"a": 1}</tool_call> and'),
        ("hermes", "<tool_call>\n[1, 2]</tool_call>"),
        ("hermes", '<tool_call>{"name": "f"'),
        ("qwen3_coder", "<tool_call>\n<function f>\n</tool_call>"),
        ("deepseek", "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜>"),
        ("granite", "<|tool_call|>nothing"),
        ("mistral", '[TOOL_CALLS][{"name": 3, "arguments": {}}]'),
        ("gpt_oss", " to=functions.f<|message|>x<|call|>"),
        ("llama3", ' <|python_tag|>{"a": 1} '),
    ],
)
def test_what_is_no_call_stays_text(family: str, text: str):
    said, calls = read(family, [], text, 0)
    assert calls == [] and said == text


def test_a_call_is_there_when_its_block_ends():
    reader = ToolCallReader(family_named("hermes"), [])
    assert reader.feed('Yes.\n<tool_call>\n{"name": "f", "arguments"') == ("Yes.", [])
    assert reader.feed(': {"é": [1]}}\n</tool_call>\n<tool') == ("", [ToolCall("f", '{"é": [1]}')])
    assert reader.feed("_call>") == ("", [])
    assert reader.end() == ("<tool_call>", [])


def test_white_space_around_calls_is_theirs_in_any_pieces():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    text = f"a \n {call} \n\n {call}\n b \n"
    for size in (1, 2, 5, 100):
        reader = ToolCallReader(family_named("hermes"), [])
        parts = [reader.feed(text[i : i + size]) for i in range(0, len(text), size)] + [reader.end()]
        assert ("".join(said for said, _ in parts), sum(len(calls) for _, calls in parts)) == ("ab \n", 2)


def test_an_unknown_family():
    with pytest.raises(UserError, match="a tool parser must be one of qwen3_coder, hermes, .*; got 'x'"):
        family_named("x")
