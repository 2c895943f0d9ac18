"""A small part of `make fuzz`: hundreds of requests that are wrong in every way, over both protocols, against the real engine."""

import asyncio
import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from http_server import chat_model

from bench.fuzz import bodies, messages
from bench.fuzz.drive import Report, fuzz, listening
from bench.fuzz.judge import judge_grpc, judge_http
from pagedjax import LLM
from serving.errors import Refusal
from serving.frontend import Frontend


@pytest.fixture(scope="module")
def own_llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    with chat_model(tmp_path_factory.mktemp("fuzz"), compile_cache) as llm:
        yield llm


def run(llm: LLM, count: int, seed: int = 0, **options: Any) -> Report:
    return asyncio.run(fuzz(llm, count, seed, **options))


def test_no_request_is_answered_by_an_error_of_ours(own_llm: LLM) -> None:
    report = run(own_llm, 1500, seed=20261130)
    assert report.wrong == [] and report.total == 1500 and report.checks >= 3
    assert {"gRPC", "HTTP", "HTTP over a socket"} == set(report.counts)
    assert {"200", "400 invalid_argument"} < set(report.counts["HTTP"])
    assert {"OK", "INVALID_ARGUMENT invalid_argument"} < set(report.counts["gRPC"])


def test_an_error_of_ours_is_found(own_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tenth request fails in the server: as an error without a name, which its log has, too."""
    real, count = Frontend._take, iter(range(10**6))
    monkeypatch.setattr(Frontend, "_take", lambda self, call: 1 / (next(count) % 10) and real(self, call))
    report = run(own_llm, 150)
    assert any("the server is to blame" in wrong for wrong in report.wrong)
    assert any("the log says" in wrong and "ZeroDivisionError" in wrong for wrong in report.wrong)


def test_a_server_that_answers_something_else_is_found(own_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Frontend.submit
    seen: list[int] = []

    async def submit(self: Frontend, call: Any) -> Any:
        seen.append(1)
        if call.prompt == "Once upon":
            raise Refusal("queue_full", "no")
        return await real(self, call)

    monkeypatch.setattr(Frontend, "submit", submit)
    report = run(own_llm, 5)
    assert seen and any("after request 4: over HTTP it answers" in wrong for wrong in report.wrong)


def test_a_request_depends_on_its_number_alone() -> None:
    for make in (bodies.request, messages.request):
        sent = [make(random.Random(f"1-{number}")) for number in range(300)]
        assert sent == [make(random.Random(f"1-{number}")) for number in range(300)]
        assert len({str(each) for each in sent}) > 250


def test_what_is_logged_as_an_error_is_seen() -> None:
    with listening() as errors:
        asyncio.run(_loses_an_error())
    assert len(errors.seen) == 1 and "lost" in errors.seen[0]


async def _loses_an_error() -> None:
    asyncio.get_running_loop().call_exception_handler({"message": "lost"})


JSON = {"content-type": "application/json"}
ERROR = b'{"error": {"message": "no", "type": "x", "param": null, "code": "%s"}}'
EVENTS = {"content-type": "text/event-stream; charset=utf-8"}
USAGE = b'{"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": %d}'
WHOLE = b'{"choices": [{"index": 0, "finish_reason": "stop"}], "usage": ' + USAGE + b"}"


@pytest.mark.parametrize(
    ("path", "status", "headers", "body", "wrong"),
    [
        ("/v1/completions", 200, JSON, WHOLE % 3, ""),
        ("/v1/completions", 200, JSON, WHOLE % 4, "usage must add up"),
        ("/v1/completions", 200, JSON, b'{"choices": []}', "choices must be there"),
        ("/v1/completions", 200, JSON, (WHOLE % 3).replace(b'"stop"', b"null"), "each choice must have an end"),
        ("/v1/completions", 200, JSON, b'{"a": NaN}', "an answer must be JSON: NaN is no JSON"),
        ("/v1/completions", 200, {"content-type": "text/plain"}, b"", "an answer must be JSON; got text/plain"),
        ("/v1/completions", 200, EVENTS, b'data: {"choices": []}\n\ndata: [DONE]\n\n', ""),
        ("/v1/completions", 200, EVENTS, b'data: {"choices": []}\n\n', "must end with [DONE]"),
        ("/v1/completions", 200, EVENTS, b"data: [DONE]\n\ndata: [DONE]\n\n", "must end with [DONE], once"),
        ("/v1/completions", 200, EVENTS, b"data: {\n\ndata: [DONE]\n\n", "an event must be JSON"),
        ("/v1/completions", 200, EVENTS, b"data: " + ERROR % b"form_failed" + b"\n\n", ""),
        ("/v1/completions", 200, EVENTS, b"data: " + ERROR % b"internal" + b"\n\n", "a stream failed with"),
        ("/v1/responses", 200, EVENTS, b'event: x\ndata: {"type": "response.completed"}\n\n', ""),
        ("/v1/responses", 200, EVENTS, b'data: {"type": "response.created"}\n\n', "it ends with"),
        ("/v1/responses", 200, JSON, b'{"status": "completed"}', ""),
        ("/v1/responses", 200, JSON, b'{"status": "in_progress"}', "status is in_progress"),
        ("/tokenize", 200, JSON, b'{"tokens": [1], "count": 2}', "count must be that of tokens"),
        ("/detokenize", 200, JSON, b'{"prompt": 3}', "prompt must be a text"),
        ("/v1/completions", 400, JSON, ERROR % b"invalid_argument", ""),
        ("/v1/completions", 500, JSON, ERROR % b"internal", "the server is to blame: no"),
        ("/v1/completions", 503, JSON, ERROR % b"engine_down", "must say when to come back"),
        ("/v1/completions", 418, JSON, ERROR % b"invalid_argument", "must be 400; got 418"),
    ],
)
def test_answers_over_http_are_judged(path: str, status: int, headers: dict[str, str], body: bytes, wrong: str) -> None:
    found = judge_http("POST", path, status, headers, body).wrong
    assert wrong in found and bool(wrong) == bool(found)


@pytest.mark.parametrize(
    ("code", "message", "own_deadline", "wrong"),
    [
        ("OK", "", False, ""),
        ("UNIMPLEMENTED", "", False, ""),
        ("NOT_FOUND", "there is no service of this name here", False, ""),
        ("NOT_FOUND", "x", False, "a status must have details"),
        ("RESOURCE_EXHAUSTED", "Received message larger than max", False, ""),
        ("RESOURCE_EXHAUSTED", "received metadata size exceeds soft limit", False, ""),
        ("RESOURCE_EXHAUSTED", "trailing metadata too large", False, "a status must have details"),
        ("DEADLINE_EXCEEDED", "", True, ""),
        ("DEADLINE_EXCEEDED", "", False, "a status must have details"),
        ("INTERNAL", "x", False, "a status must have details"),
        ("UNKNOWN", "Unexpected", False, "a status must have details; got UNKNOWN: Unexpected"),
        ("CANCELLED", "", False, "a status must have details"),
    ],
)
def test_answers_over_grpc_are_judged(code: str, message: str, own_deadline: bool, wrong: str) -> None:
    found = judge_grpc("x", grpc.StatusCode[code], message, None, own_deadline=own_deadline).wrong
    assert wrong in found and bool(wrong) == bool(found)
