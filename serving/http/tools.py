"""Tool calls of chat: what a request asks for, what the model is held to, and how its text is parted into words and calls.

Left to itself (tool_choice auto) a model writes calls in the way of its template's family. Where calls are asked for (required, or
a function's name) it writes JSON by a schema over the tools, whatever its template teaches.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pagedjax.errors import check
from pagedjax.host.constraint import StructuredOutputsParams
from pagedjax.text import Tokenizer
from pagedjax.text.chat import pick_template
from pagedjax.text.tool_calls import Family, ToolCallReader, family_named, family_of
from serving.http.requests import ChatRequest, Tool
from serving.http.shapes import CallPiece

NewId = Callable[[], str]


class CallReader(Protocol):
    """Reads one sample's text as it comes."""

    def read(self, text: str, *, ended: bool) -> tuple[str, list[CallPiece]]:
        """(what of it is no call, new pieces of calls). `ended`: nothing follows."""
        ...


@dataclass(frozen=True)
class ToolUse:
    """How one request calls tools."""

    make_reader: Callable[[], CallReader]  # for each sample
    form: StructuredOutputsParams | None = None  # that calls are forced into
    shown: tuple[int, ...] = ()  # special tokens that the reader must see


def tool_use(body: ChatRequest, tokenizer: Tokenizer, parser: str) -> ToolUse | None:
    """None where the model may call nothing. `parser`: the name of the family, "auto": as the template teaches. UserError for what
    cannot be honoured."""
    tools, choice = body.tools or [], body.tool_choice
    names = [tool.function.name for tool in tools]
    check(len(set(names)) == len(names), f"tools must have names of their own; got {sorted(names)!r:.200}")
    if choice == "none":
        return None
    forced = choice not in (None, "auto")
    check(bool(tools) or not forced, f"tool_choice must go with tools; got {choice!r:.80} and none")
    if not tools:
        return None
    check(
        body.response_format is None or body.response_format.type == "text",
        "response_format must not go with tools, unless tool_choice is none: an answer of that form could call nothing",
    )
    family = _family(body, tokenizer, parser)
    make_id = _short_id if family is not None and family.name == "mistral" else _long_id
    one = body.parallel_tool_calls is False
    if not forced:
        check(
            family is not None,
            "tools must go with a tool_choice of required, none or a function, since the model's chat template teaches no way to "
            "call them that is known here (the server's --tool-parser can name one)",
        )
        assert family is not None
        shown = {} if body.skip_special_tokens is False else _special(tokenizer, family)
        plain = [tool.model_dump(exclude_unset=True) for tool in tools]
        return ToolUse(lambda: WrittenCalls(family, plain, make_id, one=one, marks=tuple(shown.values())), shown=tuple(shown))
    name = _named(choice, names) if isinstance(choice, Mapping) else None
    schema = _calls_schema(tools, one=one) if name is None else _arguments_schema(names.index(name), tools[names.index(name)])
    return ToolUse(lambda: ForcedCalls(name, make_id), form=StructuredOutputsParams(json=schema))


def _family(body: ChatRequest, tokenizer: Tokenizer, parser: str) -> Family | None:
    if parser != "auto":
        return family_named(parser)
    name = (body.chat_template_kwargs or {}).get("chat_template")
    return family_of(pick_template(tokenizer.templates, name, has_tools=True))


def _special(tokenizer: Tokenizer, family: Family) -> dict[int, str]:
    """The marks of calls that are special tokens, which otherwise are no part of the text."""
    found = {tokenizer.hf.token_to_id(mark): mark for mark in family.marks}
    return {token: mark for token, mark in found.items() if token in tokenizer.special_ids}


def _long_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _short_id() -> str:
    """Mistral's templates take nine letters and digits, and nothing else."""
    return uuid.uuid4().hex[:9]


# --- calls that are asked for --------------------------------------------------------------------------------------


def _named(choice: Mapping[str, Any], names: Sequence[str]) -> str:
    function = choice.get("function")
    right = set(choice) == {"type", "function"} and choice["type"] == "function" and isinstance(function, Mapping)
    rule = 'tool_choice must be none, auto, required or {"type": "function", "function": {"name": …}}'
    check(right and isinstance(function, Mapping) and set(function) == {"name"}, f"{rule}; got {choice!r:.200}")
    assert isinstance(function, Mapping)
    check(function["name"] in names, f"tool_choice must name one of the tools; got {function['name']!r:.80}")
    return function["name"]


def _arguments_schema(i: int, tool: Tool, at: str = "#") -> dict[str, Any]:
    """What a tool's arguments must be, as a part of a schema at the JSON pointer `at`. Without parameters: an empty object."""
    given = tool.function.parameters
    if given is None:
        return {"type": "object", "additionalProperties": False}
    kind = given.get("type", "object")
    check(kind == "object", f'tools[{i}].function.parameters.type must be "object"; got {kind!r:.80}')
    return {"type": "object", **_moved(given, at)}


def _moved(schema: Any, at: str) -> Any:
    """A schema whose references to itself ("#/$defs/…") are those of its new place."""
    if isinstance(schema, Mapping):
        return {
            key: at + value[1:] if key == "$ref" and isinstance(value, str) and value.startswith("#") else _moved(value, at)
            for key, value in schema.items()
        }
    return [_moved(value, at) for value in schema] if isinstance(schema, list) else schema


def _calls_schema(tools: Sequence[Tool], *, one: bool) -> dict[str, Any]:
    """[{"name": …, "arguments": {…}}, …], of at least one call."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": _arguments_schema(i, tool, f"#/items/anyOf/{i}/properties/arguments"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, tool in enumerate(tools)
    ]
    schema = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return {**schema, "maxItems": 1} if one else schema


class ForcedCalls:
    """Reads what the schemas above force. Arguments are passed on as they come."""

    _HEAD = re.compile(r'[\[\]{},\s]*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?={)')

    def __init__(self, name: str | None, make_id: NewId):
        """`name`: of the one function that is called, whose arguments are the whole text."""
        self._name, self._make_id = name, make_id
        self._held = ""
        self._count = 0  # calls that have begun
        self._object = Brackets()

    def read(self, text: str, *, ended: bool) -> tuple[str, list[CallPiece]]:
        self._held += text
        pieces: list[CallPiece] = []
        while self._held:
            begins: dict[str, str] = {}
            if not self._object.inside:
                name = self._next_call()
                if name is None:
                    break
                begins = {"id": self._make_id(), "name": name}
                self._count += 1
            end = self._object.take(self._held)
            pieces.append(CallPiece(self._count - 1, self._held[:end], **begins))
            self._held = self._held[end:]
        said = self._held if ended and not self._count else ""  # cut off before there was a call
        return said, pieces

    def _next_call(self) -> str | None:
        """The name of the call that begins here, once its arguments do; they are what is held then."""
        if self._name is not None:
            text = self._held.lstrip()
            if self._count or not text.startswith("{"):
                return None
            self._held = text
            return self._name
        found = self._HEAD.match(self._held)
        if found is None:
            return None
        self._held = self._held[found.end() :]
        return json.loads(found[1])


class Brackets:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self):
        self._depth, self._in_string, self._escaped = 0, False, False

    @property
    def inside(self) -> bool:
        return self._depth > 0

    def take(self, text: str) -> int:
        """Characters of it that are of the object."""
        for i, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = char == "\\", char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if not self._depth:
                    return i + 1
        return len(text)


# --- calls that a model writes -------------------------------------------------------------------------------------


class WrittenCalls:
    """Reads calls in the way of a family, each when it is complete. What cannot be read as a call is text."""

    def __init__(self, family: Family, tools: Sequence[Mapping[str, Any]], make_id: NewId, *, one: bool, marks: Sequence[str]):
        """`one`: of several calls the first alone counts. `marks`: special tokens of the family, which are no part of the text."""
        self._reader, self._make_id, self._one = ToolCallReader(family, tools), make_id, one
        self._marks, self._held = marks, ""
        self._count = 0

    def read(self, text: str, *, ended: bool) -> tuple[str, list[CallPiece]]:
        said, calls = self._reader.feed(text)
        if ended:
            more, last = self._reader.end()
            said, calls = said + more, calls + last
        pieces = []
        for call in calls[: max(0, 1 - self._count)] if self._one else calls:
            pieces.append(CallPiece(self._count, call.arguments, id=self._make_id(), name=call.name))
            self._count += 1
        return self._without_marks(said, ended=ended), pieces

    def _without_marks(self, said: str, *, ended: bool) -> str:
        """Holds back what may become a mark."""
        text = self._held + said
        for mark in self._marks:
            text = text.replace(mark, "")
        longest = 0 if ended else max((n for m in self._marks for n in range(1, len(m)) if text.endswith(m[:n])), default=0)
        self._held = text[len(text) - longest :]
        return text[: len(text) - longest]
