"""Tool calls in a model's own words: which way of writing them a chat template teaches, and how they are read from a text."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagedjax.errors import check

Tools = Sequence[Mapping[str, Any]]  # as in OpenAI's chat API: {"type": "function", "function": {"name", "parameters"}}


@dataclass(frozen=True)
class ToolCall:
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True)
class Family:
    """One way to write calls: blocks from `begin` to `end`, each of which holds one call or several."""

    name: str
    taught_by: tuple[str, ...]  # what a template of this family has in it, all of it
    begin: str
    end: str | None  # None: to the end of the text
    read: Callable[[str, Tools], list[ToolCall]]  # of what is between the two; ValueError (KeyError, TypeError) where it is none
    opens: bool = False  # a block stands at the beginning of the text or nowhere, and `begin` is a part of it
    words: tuple[str, ...] = ()  # further ones that a call is written with, which vocabularies may have as special tokens

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(word for word in (self.begin, self.end, *self.words) if word)


def read_objects(block: str, tools: Tools) -> list[ToolCall]:
    """JSON: an object with name and arguments (Llama 3: parameters), or a list of these."""
    value = json.loads(block.removeprefix("<|python_tag|>"))
    return [_call(each) for each in (value if isinstance(value, list) else [value])]


def read_parameters(block: str, tools: Tools) -> list[ToolCall]:
    """<function=NAME> <parameter=KEY> VALUE </parameter> … </function>: values are JSON, but for what the tool calls a string."""
    found = re.fullmatch(r"\s*<function=([^>\n]+)>(.*)</function>\s*", block, re.DOTALL)
    if found is None:
        raise ValueError("no function")
    kinds = next((_kinds(tool) for tool in tools if tool.get("function", tool).get("name") == found[1]), {})
    values = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", found[2], re.DOTALL)
    return [ToolCall(found[1], _json({key: _typed(text, kinds.get(key)) for key, text in values}))]


def read_separated(block: str, tools: Tools) -> list[ToolCall]:
    """Several <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>."""
    calls = re.findall(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", block, re.DOTALL)
    if not calls:
        raise ValueError("no call")
    return [_call({"name": name, "arguments": json.loads(arguments)}) for name, arguments in calls]


def read_channel(block: str, tools: Tools) -> list[ToolCall]:
    """The part of a gpt-oss answer behind "to=functions.": NAME, a channel and a format, <|message|>, arguments."""
    found = re.match(r"([\w.-]+)[^{]*?<\|message\|>(.*)", block, re.DOTALL)
    if found is None:
        raise ValueError("no message")
    return [_call({"name": found[1], "arguments": json.loads(found[2])})]


FAMILIES = (  # the first that a template has the words of
    Family("qwen3_coder", ("<tool_call>", "<function="), "<tool_call>", "</tool_call>", read_parameters),
    Family("hermes", ("<tool_call>",), "<tool_call>", "</tool_call>", read_objects),
    Family(
        "deepseek",
        ("<｜tool▁calls▁begin｜>",),
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        read_separated,
        words=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ),
    Family("granite", ("<|tool_call|>",), "<|tool_call|>", None, read_objects),
    Family("mistral", ("[TOOL_CALLS]",), "[TOOL_CALLS]", None, read_objects),
    Family(
        "gpt_oss",
        ("<|channel|>", "to=functions."),
        "to=functions.",
        "<|call|>",
        read_channel,
        words=("<|channel|>", "<|constrain|>", "<|message|>"),
    ),
    Family("llama3", ("ipython",), "{", None, read_objects, opens=True, words=("<|python_tag|>",)),
)


def family_of(template: str) -> Family | None:
    """The family whose way of writing calls a chat template teaches; None where it teaches none that is known."""
    if "<|channel|>" in template and "functions." in template:
        return next(family for family in FAMILIES if family.name == "gpt_oss")
    return next((family for family in FAMILIES if all(word in template for word in family.taught_by)), None)


def family_named(name: str) -> Family:
    """UserError for a name that is none of theirs."""
    found = next((family for family in FAMILIES if family.name == name), None)
    check(found is not None, f"a tool parser must be one of {', '.join(f.name for f in FAMILIES)}; got {name!r}")
    assert found is not None
    return found


class ToolCallReader:
    """Parts a text, as it comes, into what is said and what is called. What looks like a call and cannot be read as one stays text;
    white space around calls belongs to them."""

    def __init__(self, family: Family, tools: Tools):
        self._family, self._tools = family, tools
        self._held = ""  # what is not decided yet
        self._inside = False  # a block
        self._before = ""  # what comes back with a block that is no call
        self._called = False  # calls have just ended: white space behind them is dropped
        self._begun = False  # something other than white space has come

    def feed(self, text: str) -> tuple[str, list[ToolCall]]:
        """(new text that is no call, calls that are complete now)."""
        self._held += text
        said, calls = "", []
        for part in self._parts():
            if isinstance(part, str):
                said += part
            else:
                calls += part
        return said, calls

    def end(self) -> tuple[str, list[ToolCall]]:
        """What is left when the text has ended."""
        if not self._inside:
            said, self._held = self._held, ""
            return said, []
        block, self._held, self._inside = self._held, "", False
        calls = self._read(block)
        return ("", calls) if calls else (self._before + self._begin + block, [])

    @property
    def _begin(self) -> str:
        return "" if self._family.opens else self._family.begin

    def _parts(self) -> Iterator[str | list[ToolCall]]:
        family = self._family
        while True:
            if self._called:
                self._held = self._held.lstrip()
                self._called = not self._held
            if not self._inside:
                at = self._held.find(family.begin)
                if family.opens and at >= 0 and (self._begun or self._held[:at].replace("<|python_tag|>", "").strip()):
                    at = -1
                if at < 0:
                    keep = self._undecided()
                    said, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
                    self._begun = self._begun or bool(said.strip())
                    if said:
                        yield said
                    return
                said, self._inside = "" if family.opens else self._held[:at].rstrip(), True
                self._before, self._held = self._held[len(said) : at], self._held[at + len(self._begin) :]
                if said:
                    yield said
            at = -1 if family.end is None else self._held.find(family.end)
            if family.end is None or at < 0:
                return
            block, self._held, self._inside = self._held[:at], self._held[at + len(family.end) :], False
            calls = self._read(block)
            yield calls or self._before + self._begin + block + family.end
            self._called = bool(calls)

    def _undecided(self) -> int:
        """Characters at the end of what is held that may become white space before a call, or the beginning of one."""
        text, begin = self._held, self._family.begin
        if self._family.opens:
            return len(text) if not self._begun and not text.replace("<|python_tag|>", "").strip() else 0
        start = next((n for n in range(min(len(begin) - 1, len(text)), 0, -1) if text.endswith(begin[:n])), 0)
        return len(text) - len(text[: len(text) - start].rstrip())

    def _read(self, block: str) -> list[ToolCall]:
        try:
            return self._family.read(block.strip(), self._tools)
        except (ValueError, KeyError, TypeError):
            return []


def _call(value: Any) -> ToolCall:
    arguments = value["arguments"] if "arguments" in value else value["parameters"]
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(value["name"], str) or not isinstance(arguments, dict):
        raise ValueError("no call")
    return ToolCall(value["name"], _json(arguments))


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _kinds(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON types of a tool's parameters."""
    properties = (tool.get("function", tool).get("parameters") or {}).get("properties") or {}
    return {name: schema.get("type") for name, schema in properties.items() if isinstance(schema, Mapping)}


def _typed(text: str, kind: Any) -> Any:
    """The value of a parameter that was written as text."""
    if kind == "string":
        return text
    plain = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        return json.loads(plain)
    except ValueError:
        return text
