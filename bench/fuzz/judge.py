"""Whether an answer is as documented: its status, its shape, and who is to blame."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc

from bench.errors import OURS, Told, of_grpc, of_http

JSON, EVENTS = "application/json", "text/event-stream"
WITHOUT_DETAILS = {  # what gRPC says by itself, and the health service: the texts that must be in it
    "UNIMPLEMENTED": ("",),
    "RESOURCE_EXHAUSTED": ("larger than max", "received metadata size exceeds"),
    "NOT_FOUND": ("there is no service of this name here",),
}


@dataclass(frozen=True)
class Judged:
    label: str  # for the counts
    wrong: str = ""


def judge_http(method: str, path: str, status: int, headers: Mapping[str, str], body: bytes) -> Judged:
    """Of a whole answer."""
    if method == "HEAD":
        return Judged(str(status), "" if status in (200, 404, 405) else f"HEAD must be 200, 404 or 405; got {status}")
    if status == 200:
        wrong = _wrong_answer(path, headers.get("content-type", ""), body)
        return Judged("200 in pieces" if EVENTS in headers.get("content-type", "") else "200", wrong)
    told = of_http(status, headers, body)
    return Judged(told.label, told.wrong or _blames_us(told))


def _blames_us(told: Told) -> str:
    return (
        f"the server is to blame: {told.message[:200]}"
        if told.code in OURS or told.status in ("500", "INTERNAL", "UNKNOWN")
        else ""
    )


def _wrong_answer(path: str, kind: str, body: bytes) -> str:
    if kind.startswith(EVENTS):
        return _wrong_events(path, body)
    if not kind.startswith(JSON):
        return "" if path in ("/metrics", "/ui") else f"an answer must be JSON; got {kind}"
    try:
        answer = json.loads(body, parse_constant=_no_constant)
    except ValueError as error:
        return f"an answer must be JSON: {error}"
    return SHAPES[path](answer) if path in SHAPES else ""


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _wrong_events(path: str, body: bytes) -> str:
    """Each event is one JSON object; the last one is [DONE], or an error, or the end of a response."""
    events = body.decode("ascii").removesuffix("\n\n").split("\n\n")
    data = [event.rpartition("data: ")[2] for event in events]
    try:
        parsed = [text if text == "[DONE]" else json.loads(text, parse_constant=_no_constant) for text in data]
    except ValueError as error:
        return f"an event must be JSON: {error}"
    last: Any = parsed[-1]
    if path == "/v1/responses":
        return (
            ""
            if last.get("type") in ("response.completed", "response.incomplete", "response.failed")
            else f"it ends with {last!r:.80}"
        )
    if isinstance(last, dict) and "error" in last:
        return _failed_midway(last["error"])
    if last != "[DONE]" or "[DONE]" in parsed[:-1]:
        return f"a stream must end with [DONE], once; got {data[-1]!r:.80}"
    return ""


def _failed_midway(error: Any) -> str:
    code = error.get("code") if isinstance(error, dict) else None
    return "" if code and code not in OURS else f"a stream failed with {error!r:.200}"


def _completion(answer: Any) -> str:
    choices, usage = answer.get("choices"), answer.get("usage")
    if not choices or [choice["index"] for choice in choices] != list(range(len(choices))):
        return f"choices must be there, in order; got {choices!r:.80}"
    if any(choice["finish_reason"] not in ("stop", "length", "tool_calls") for choice in choices):
        return "each choice must have an end"
    right = usage and usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return "" if right else f"usage must add up; got {usage}"


SHAPES: dict[str, Callable[[Any], str]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _completion,
    "/v1/responses": lambda answer: (
        "" if answer.get("status") in ("completed", "incomplete") else f"status is {answer.get('status')}"
    ),
    "/tokenize": lambda answer: "" if len(answer["tokens"]) == answer["count"] else "count must be that of tokens",
    "/detokenize": lambda answer: "" if isinstance(answer["prompt"], str) else "prompt must be a text",
}


def judge_grpc(
    method: str, code: grpc.StatusCode, message: str | None, trailers: Iterable[tuple[str, Any]] | None, *, own_deadline: bool
) -> Judged:
    """Of a call that has ended. `own_deadline`: the client's could have passed."""
    if code is grpc.StatusCode.OK:
        return Judged("OK")
    told = of_grpc(code, message, trailers)
    if told.code or told.wrong:
        return Judged(told.label, told.wrong or _blames_us(told))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and own_deadline:
        return Judged(told.label)
    known = any(text in told.message for text in WITHOUT_DETAILS.get(code.name, ()))
    return Judged(told.label, "" if known else f"a status must have details; got {code.name}: {told.message[:200]}")
