"""HTTP requests: good ones of every endpoint, with all of its fields, and what is made of them."""

import copy
import random
from dataclasses import dataclass
from typing import Any

from bench.fuzz.values import FORMS, TEXTS, encoded, nearby, odd, spoil

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
PART = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": ["</a>", "<s>"]}
TAGS = (
    {
        "type": "triggered_tags",
        "triggers": ["<a"],
        "tags": [PART],
        "at_least_one": True,
        "stop_after_first": False,
        "excludes": ["b"],
    },
    {"type": "tags_with_separator", "separator": ",", "tags": [PART], "at_least_one": True},
    {
        "type": "sequence",
        "elements": [
            {
                "type": "repeat",
                "min": 1,
                "max": 2,
                "content": {"type": "or", "elements": [{"type": "regex", "pattern": "[a/]"}, PART]},
            },
            {"type": "optional", "content": {"type": "grammar", "grammar": 'start: "a"'}},
            {"type": "star", "content": {"type": "token", "token": 1}},
            {"type": "any_text", "excludes": ["</s>"]},
            {"type": "const_string", "value": "!"},
        ],
    },
)
TOOL = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA, "strict": True}}
SAMPLING: dict[str, Any] = {
    "model": "fuzzed",
    "n": 2,
    "max_tokens": 2,
    "min_tokens": 1,
    "temperature": 0.7,
    "top_k": 5,
    "top_p": 0.9,
    "min_p": 0.1,
    "typical_p": 0.9,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "seed": 3,
    "logit_bias": {"5": 1.5, "7": -100},
    "allowed_token_ids": [5, 6, 7, 300],
    "bad_words": ["bad"],
    "stop": ["the", "\n"],
    "stop_token_ids": [9],
    "include_stop_str_in_output": True,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "best_of": 2,
    "use_beam_search": False,
    "beam_width": None,
    "length_penalty": 1.0,
    "early_stopping": False,
    "cache_salt": "salt",
    "service_tier": "flex",
    "return_token_ids": True,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    "structured_outputs": {"regex": "[ab]{2}"},
    "guided_json": SCHEMA,
    "guided_regex": "a|b",
    "guided_choice": ["a", "b"],
    "guided_grammar": 'start: "a"',
    "user": "me",
    "store": False,
    "metadata": {"a": "b"},
}
ALONE = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "1"},
    {"role": "user", "content": "And?", "name": "me"},
]
CHAT: dict[str, Any] = {
    "messages": MESSAGES,
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "look"}},
    "parallel_tool_calls": False,
    "add_generation_prompt": True,
    "chat_template_kwargs": {"enable_thinking": False, "chat_template": "default"},
    "max_completion_tokens": 2,
    "logprobs": True,
    "top_logprobs": 2,
}
NEEDED = {"messages": MESSAGES[1:2]}
RESPONSES: dict[str, Any] = {
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    "instructions": "Be brief.",
    "max_output_tokens": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "include": ["message.output_text.logprobs"],
    "top_logprobs": 2,
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "truncation": "disabled",
    "tool_choice": "auto",
    "service_tier": "auto",
    "metadata": {"a": "b"},
    "user": "me",
    "chat_template_kwargs": {"enable_thinking": False},
}
STREAM = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
HEADERS = (
    "x-priority",
    "x-tenant",
    "x-request-timeout",
    "traceparent",
    "authorization",
    "x-api-key",
    "x-request-id",
    "accept",
    "x-odd",
)
KINDS = (
    "application/json",
    "application/json; charset=utf-8",
    "application/json;charset=utf-16",
    "text/plain",
    "",
    "multipart/form-data",
)
GETS = (
    "/v1/models",
    "/v1/models/",
    "/tokenizer_info",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/ui/state",
    "/openapi.json",
    "/ui",
)


@dataclass(frozen=True)
class Sent:
    """An HTTP request. `headers`: names in lower case."""

    method: str
    path: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def some_of(rng: random.Random, fields: dict[str, Any], share: float) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if rng.random() < share}


def _sampling(rng: random.Random) -> dict[str, Any]:
    """A few fields that mostly go together, and an answer that is short."""
    fields = some_of(rng, SAMPLING, rng.choice((0, 0.05, 0.1, 0.3)))
    for name in rng.sample(ALONE, len(ALONE) - 1):
        fields.pop(name, None)
    return {"max_tokens": rng.choice((1, 1, 1, 2)), **fields, **(STREAM if rng.random() < 0.2 else {})}


def good(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """(path, body) of a request that is mostly right."""
    match rng.randrange(7):
        case 0 | 1:
            more = some_of(rng, {"echo": True, "logprobs": 2, "add_special_tokens": False, "suffix": None}, 0.3)
            prompt = rng.choice(("Once", [1, 403, 407], ["Once", "Tom"], [[1, 2], [3]], "a " * 70, ""))
            return "/v1/completions", {"prompt": prompt, **_sampling(rng), **more}
        case 2 | 3:
            return "/v1/chat/completions", {**NEEDED, **_sampling(rng), **some_of(rng, CHAT, rng.choice((0.1, 0.4)))}
        case 4:
            needed = {"input": rng.choice(("Hi", RESPONSES["input"])), "max_output_tokens": 1}
            return "/v1/responses", {
                **needed,
                **some_of(rng, RESPONSES, rng.choice((0.1, 0.4))),
                **({"stream": True} if rng.random() < 0.2 else {}),
            }
        case 5:
            either = (
                {"prompt": "Once"}
                if rng.random() < 0.5
                else {**NEEDED, **some_of(rng, {"tools": [TOOL], "add_generation_prompt": False}, 0.5)}
            )
            return "/tokenize", {
                **either,
                **some_of(rng, {"model": "fuzzed", "return_token_strs": True, "add_special_tokens": True}, 0.3),
            }
    return "/detokenize", {"tokens": [1, 403, 407], **some_of(rng, {"model": "fuzzed"}, 0.3)}


def formed(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """With a form, or tools, that may be anything."""
    form = copy.deepcopy(rng.choice(FORMS)) if rng.random() < 0.7 else odd(rng)
    where = rng.choice(("response_format", "json", "regex", "grammar", "choice", "structural_tag", "tools"))
    if where == "tools":
        function = {"name": rng.choice(("look", *TEXTS)), "parameters": form}
        return body | {"tools": [{"type": "function", "function": function}], "tool_choice": rng.choice(("required", "auto"))}
    if where == "structural_tag":
        part = spoil(rng, copy.deepcopy(rng.choice(TAGS)))
        return body | {"response_format": {"type": where, "format": part if rng.random() < 0.9 else form}}
    if where == "response_format":
        return body | {where: {"type": "json_schema", "json_schema": {"name": "a", "schema": form}}}
    return body | {"structured_outputs": {where: [form] if where == "choice" else form}}


def headers(rng: random.Random) -> tuple[tuple[bytes, bytes], ...]:
    kind = rng.choice(KINDS) if rng.random() < 0.03 else KINDS[0]
    found = [(b"host", b"fuzz"), (b"content-type", kind.encode())]
    while rng.random() < 0.08:
        value = rng.choice((rng.choice(TEXTS), str(nearby(rng, 5)), str(nearby(rng, 0.5)), "Bearer x", "t" * 5000, "5", "a b"))
        found.append(
            (
                rng.choice(HEADERS).encode(),
                value.encode("utf-8", "replace").replace(b"\n", b"").replace(b"\r", b"").replace(b"\0", b""),
            )
        )
    return tuple(found)


def request(rng: random.Random) -> Sent:
    """One that may be wrong in any way."""
    if rng.random() < 0.03:
        path = rng.choice((*GETS, f"/v1/models/{rng.choice(TEXTS)!r}", "/nothing", "/v1/completions"))
        return Sent(rng.choice(("GET", "GET", "HEAD", "DELETE", "PUT", "OPTIONS")), path, headers(rng), b"")
    path, body = good(rng)
    body = copy.deepcopy(body)
    if rng.random() < 0.1 and path.startswith("/v1"):
        body = formed(rng, body)
    return Sent("POST", path, headers(rng), encoded(rng, spoil(rng, body)))
