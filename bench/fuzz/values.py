"""Odd values of JSON, and ways to spoil a good one. All chance is of one random.Random, so that a request can be made again."""

import copy
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

INTEGERS = (0, 1, -1, 2, 3, 7, 16, 17, 20, 21, 127, 128, 129, 511, 512, 513, 2**15, 2**16, 2**31 - 1, 2**31, -(2**31), 2**32 - 1)
HUGE = (2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**30, -(10**40), 10**308, 10**400, 10**4000)
FLOATS = (0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 2.0, 1e-5, 1e-45, 5e-324, 1e-320, 3.4e38, 3.5e38, 1e300, 1.7976931348623157e308)
NO_NUMBERS = (math.nan, math.inf, -math.inf)
TEXTS = (
    *("", " ", "a", "Once upon a time", "\0", "\n", "\r\n", "\t", "null", "true", "0", "-1", "1e9", "NaN", "None", "[]", "{}"),
    *("é", "冷", "🙂", "👩‍👩‍👧", "\u200b", "\u2028", "\ufeff", "\ufffd", "\u0301" * 40, "\x7f", "\x1b[2J", "ﷺ" * 30, "ß" * 300),
    *(
        "\ud800",
        "a\udfff",
        "\ud83d",
        "<s>",
        "</s>",
        "<unk>",
        "<|im_start|>",
        "[INST]",
        "{{ 7 * 7 }}",
        "{% for %}",
        "%s%n",
        "../../x",
    ),
    *(
        "default",
        "auto",
        "none",
        "required",
        "never",
        "text",
        "json_object",
        "json_schema",
        "function",
        "user",
        "system",
        "developer",
    ),
)
NAMES = (
    *(
        "model",
        "messages",
        "prompt",
        "n",
        "stream",
        "stop",
        "tools",
        "x",
        "",
        "schema",
        "json",
        "type",
        "name",
        "__class__",
        "self",
    ),
    *(
        "template",
        "chat_template",
        "content",
        "role",
        "__proto__",
        "model_config",
        "\ud800",
        "\0",
        "tool_calls",
        "function",
        "$ref",
    ),
)
# Schemas, expressions and grammars, right and wrong.
FORMS = (
    {"type": "object"},
    {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False},
    {"$ref": "#"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"$ref": "https://example.invalid/schema"},
    {"type": "string", "pattern": "(a+)+$", "minLength": 5, "maxLength": 10**9},
    {"type": "array", "items": {"type": "array"}, "minItems": 10**6},
    {"type": "number", "minimum": 1e308, "maximum": -1e308},
    {"anyOf": []},
    {"enum": []},
    {"const": "\ud800"},
    {"type": ["string", 3]},
    {"properties": 3},
    {"type": "integer", "minimum": 10**400},
    *(
        "(",
        "[",
        "a{1,100000}",
        "((a{1,100}){1,100}){1,100}",
        "(?<=a)b",
        "\\",
        "^$",
        ".*",
        "\ud800",
        "[^\\x00-\\x7f]{3}",
        "(?P<x>a)(?P=x)",
    ),
    *("start: ", "start: start", 'start: "a" | start "b"', "root ::= root", "start: /(/", "%ignore /a/", "start: a\na: b\nb: a"),
)


def odd(rng: random.Random, depth: int = 3) -> Any:
    """A value of any kind; lists and objects are nested up to `depth`."""
    kinds: tuple[Callable[[], Any], ...] = (
        lambda: None,
        lambda: rng.random() < 0.5,
        lambda: rng.choice(INTEGERS),
        lambda: rng.choice(HUGE),
        lambda: rng.choice(FLOATS),
        lambda: rng.choice(NO_NUMBERS),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice(TEXTS) * rng.choice((1, 2, 100)),
        lambda: copy.deepcopy(rng.choice(FORMS)),
        lambda: [odd(rng, depth - 1) for _ in range(rng.randint(0, 3))] if depth else [],
        lambda: {rng.choice(NAMES): odd(rng, depth - 1) for _ in range(rng.randint(0, 3))} if depth else {},
        lambda: [rng.choice((1, "a", None, 0.5))] * rng.choice((1, 17, 65, 400)),
        lambda: nested(rng, rng.choice((5, 70, 150, 400, rng.randint(850, 1000)))),
    )
    return rng.choice(kinds)()


def nested(rng: random.Random, depth: int) -> Any:
    value: Any = rng.choice((1, "a", {}))
    name = rng.choice(("items", "a", "not"))
    for _ in range(depth):
        value = [value] if rng.random() < 0.5 else {name: value}
    return value


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of all that is in it."""
    todo = [value]
    while todo:
        each = todo.pop()
        items = each.items() if isinstance(each, dict) else enumerate(each) if isinstance(each, list) else ()
        for key, inner in items:
            yield each, key
            if isinstance(inner, dict | list):
                todo.append(inner)


def spoil(rng: random.Random, value: dict[str, Any]) -> Any:
    """The same object with up to three things in it changed; now and then something else."""
    for _ in range(rng.choice((0, 0, 1, 1, 1, 1, 2, 3))):
        places = list(_places(value))
        if not places:
            return odd(rng)
        container, key = rng.choice(places)
        match rng.randrange(8):
            case 0:
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(NAMES)] = odd(rng)
            case 2 if isinstance(container, dict):
                container[rng.choice(NAMES)] = container.pop(key)
            case 3 if isinstance(container, list):
                container.extend([container[key]] * rng.choice((1, 20, 300)))
            case 4:
                container[key] = [container[key]]
            case 5:
                container[key] = nearby(rng, container[key])
            case _:
                container[key] = odd(rng)
    return value if rng.random() > 0.01 else odd(rng)


def nearby(rng: random.Random, value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice((*INTEGERS, *HUGE, value + 1, value - 1, -value))
    if isinstance(value, float):
        return rng.choice((*FLOATS, *NO_NUMBERS, -value, value * 2))
    if isinstance(value, str):
        return rng.choice((rng.choice(TEXTS), value + rng.choice(TEXTS), value.upper(), value[:-1], value * 50))
    return odd(rng)


def encoded(rng: random.Random, value: Any) -> bytes:
    """As JSON; now and then what is none, or no UTF-8."""
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):  # a number with too many digits, or too deep for this side
        text = '{"prompt": ' + "[" * 5000
    data = text.encode()
    if rng.random() > 0.12:
        return data
    at = rng.randrange(len(data) + 1)
    match how := rng.randrange(9):
        case 0 | 1 | 2:
            return spoiled_at(rng, data, at, how)
        case 3:
            return data + rng.choice((b" ", b"\0", b"}", data))
        case 4:
            return b"\xef\xbb\xbf" + data
        case 5:
            return text.encode("utf-16")
        case 6:
            return rng.randbytes(rng.randint(0, 300))
        case 7:
            return b'{"a":' * 20_000
    return b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}"


def spoiled_at(rng: random.Random, data: bytes, at: int, how: int) -> bytes:
    """The data cut off there (0), with bytes more (1), or with another byte (2)."""
    if how == 0:
        return data[:at]
    if how == 1:
        return data[:at] + rng.randbytes(rng.randint(1, 8)) + data[at:]
    return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
