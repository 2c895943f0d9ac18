"""The judgements of bench.faults: each of them lets a run that went well pass, and finds what breaks it."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import replace

import grpc
import pytest
from google.rpc import status_pb2

from bench.errors import DETAILS, Told, of_grpc, of_http
from bench.faults import checks
from bench.faults.checks import MIB, Verdict
from bench.faults.jobs import make_jobs
from bench.faults.process import errors_in, flags, metrics_of
from bench.faults.records import Answer, End, Outcome, Poll, Rest, Sample, Usage
from pagedjax.errors import UserError
from serving.errors import Refusal
from serving.rpc import status

ANSWERS = {"a": Answer((5, 6, 7), "abc", "length"), "near": Answer((5, 6, 7), "abc", "length", tie=1)}
FULL = Told("queue_full", "RESOURCE_EXHAUSTED", "full", retry=True, quota=True)
BAD = Told("invalid_argument", "400", "no")
END = End(0, "drained, the server ends", signalled=10.0, ended=12.0)
REST = Rest(running=0, waiting=0, open_requests=0, used_tokens=0, held=0, blocks=9, free=9, compiled=0)
WARM = Usage(0.0, 100 * MIB, 20, 30)
POLLS = [
    Poll(float(at), f"{way} {what}", what == "live" or at < 10, 0.01)
    for at in range(12)
    for way in ("grpc", "http")
    for what in ("live", "ready")
]


def sample(*pieces: tuple[int, ...], **fields) -> Sample:
    return Sample(list(pieces), **{"text": "abc", "finish": "length", **fields})


def outcome(*samples: Sample, kind: str = "answer", **fields) -> Outcome:
    return Outcome(kind, "v1 stream", **{"jobs": ("a",), "samples": {(0, i): s for i, s in enumerate(samples)}, **fields})


GOOD = outcome(sample((5,), (6, 7), counted=3, final=(5, 6, 7)), counted=3)
REFUSED = outcome(error=FULL)
MEMORY = [Usage(60.0 * i, 100 * MIB + (i % 2) * MIB, 20, 30) for i in range(11)]


def flat(usage: list[Usage]) -> Verdict:
    return checks.flat_memory(usage, per_minute=MIB, slack=8 * MIB)


def health(polls: list[Poll], end: End = END) -> Verdict:
    return checks.honest_health(polls, end, limit=1.0)


def tokens(*outcomes: Outcome) -> Verdict:
    return checks.whole_streams(outcomes)


def same(*outcomes: Outcome) -> Verdict:
    return checks.offline_answers(outcomes, ANSWERS)


def errors(*outcomes: Outcome) -> Verdict:
    return checks.documented_errors(outcomes)


def drained(end: End = END, *outcomes: Outcome) -> Verdict:
    return checks.clean_end(
        end,
        outcomes
        or (outcome(sample((5, 6, 7)), kind="drain"), outcome(kind="drain", error=Told("draining", "503", "no", retry=True))),
    )


@pytest.mark.parametrize(
    "check",
    [
        lambda: tokens(GOOD, REFUSED, outcome(sample((5,), finish=None), end="left")),
        lambda: same(
            GOOD, outcome(sample((5, 6), finish="abort", text="ab")), outcome(sample((5, 9, 9), text="axx"), jobs=("near",))
        ),
        lambda: checks.same_offline(ANSWERS, dict(ANSWERS)),
        lambda: checks.every_end([GOOD, REFUSED]),
        lambda: errors(
            GOOD, REFUSED, outcome(kind="malformed", error=BAD), outcome(kind="malformed", error=Told("", "UNIMPLEMENTED", ""))
        ),
        lambda: errors(
            outcome(kind="late", error=Told("", "DEADLINE_EXCEEDED", "")),
            outcome(kind="slow", error=Told("slow_reader", "429", "x")),
        ),
        lambda: checks.retry_hints([GOOD, REFUSED]),
        lambda: checks.nothing_held(REST),
        lambda: checks.nothing_leaked(WARM, replace(WARM, threads=19)),
        lambda: flat(MEMORY),
        lambda: health(POLLS),
        drained,
        lambda: checks.load_was_kept(9.5, 10),
    ],
)
def test_a_run_that_went_well_passes(check: Callable[[], Verdict]) -> None:
    found = check()
    assert found.ok and found.wrong == (), found


def slower(polls: list[Poll], **change) -> list[Poll]:
    return [replace(poll, **change) if poll.at == 5 and poll.name == "http live" else poll for poll in polls]


@pytest.mark.parametrize(
    ("check", "says"),
    [
        (lambda: tokens(outcome(sample((5,), (6, 7), final=(5, 6)))), "pieces have 3 tokens, the whole has 2"),
        (lambda: tokens(outcome(sample((5,), (5,), (6, 7), final=(5, 6, 7)))), "pieces have 4 tokens"),
        (lambda: tokens(outcome(sample((5, 6), counted=3))), "2 tokens came, 3 were counted"),
        (lambda: tokens(outcome(sample((5, 6)), counted=3)), "2 tokens came, 3 were counted"),
        (lambda: tokens(outcome(sample((5,), after_end=1))), "1 messages after its end"),
        (lambda: tokens(outcome(sample((5,), finish=None))), "it has no end"),
        (lambda: tokens(outcome(sample((5,)), expected=2)), r"\[\(0, 1\)\] are missing"),
        (lambda: tokens(outcome(sample((5,)), sample((5,)))), r"\[\(0, 1\)\] too many"),
        (lambda: same(outcome(sample((5, 9, 7)))), "token 1 is 9, and 6 in the answer"),
        (lambda: same(outcome(sample((5, 6)))), "it ended after 2 tokens by length"),
        (lambda: same(outcome(sample((5, 6, 7), finish="stop"))), "by stop, the answer after 3 by length"),
        (lambda: same(outcome(sample((5, 6, 7, 8), finish=None))), "4 tokens came, the answer has 3"),
        (lambda: same(outcome(sample((5, 6, 7), text="abd"))), "its text is 'abd', and 'abc'"),
        (lambda: same(outcome(sample((9,), text="x"), jobs=("near",))), "token 0 is 9"),
        (lambda: same(REFUSED), "nothing was compared"),
        (lambda: checks.same_offline(ANSWERS, {"a": ANSWERS["a"]}), "near"),
        (lambda: checks.every_end([outcome(end="hung", seconds=300)]), "nothing for 300 s"),
        (lambda: errors(outcome(error=Told("internal", "INTERNAL", "x"))), "the server is to blame"),
        (lambda: errors(outcome(error=Told("", "500", "x"))), "the server is to blame"),
        (lambda: errors(outcome(error=Told("", "UNKNOWN", "x"))), "the server is to blame"),
        (lambda: errors(outcome(error=BAD)), "which such a request must not get"),
        (lambda: errors(outcome(error=Told("", "transport", "cut"))), "which such a request must not get"),
        (lambda: errors(outcome(error=Told("queue_full", "429", "x", wrong="no hint"))), "no hint"),
        (lambda: errors(outcome(kind="malformed")), "malformed by v1 stream was answered"),
        (lambda: checks.retry_hints([outcome(error=replace(FULL, retry=False))]), "says no time to come back"),
        (lambda: checks.retry_hints([outcome(error=replace(FULL, quota=False))]), "says not what is full"),
        (lambda: checks.retry_hints([GOOD]), "nobody was refused"),
        (lambda: checks.nothing_held(replace(REST, free=8)), "8 of 9 blocks are free"),
        (lambda: checks.nothing_held(replace(REST, running=1)), "running is 1"),
        (lambda: checks.nothing_held(replace(REST, open_requests=2)), "open_requests is 2"),
        (lambda: checks.nothing_held(replace(REST, compiled=1)), "compiled is 1"),
        (lambda: checks.nothing_leaked(WARM, replace(WARM, threads=21)), "21 threads, 20 when it was warm"),
        (lambda: checks.nothing_leaked(WARM, replace(WARM, files=31)), "31 files"),
        (lambda: flat([replace(u, rss=u.rss + 3 * i * MIB) for i, u in enumerate(MEMORY)]), "it grew by 30.0 MiB in 10.0 minutes"),
        (lambda: flat(MEMORY[:3]), "3 samples are too few"),
        (lambda: health(slower(POLLS, seconds=2.0)), "http live took 2.00 s"),
        (lambda: health(slower(POLLS, says=False)), "http live says False after 5.0 s, while it serves"),
        (lambda: health(slower(POLLS, says=None)), "http live says None"),
        (lambda: health([replace(p, says=True) for p in POLLS]), "grpc ready did not turn"),
        (lambda: health([replace(p, says=p.at < 10) for p in POLLS]), "grpc live says no while the server drains"),
        (lambda: health([p for p in POLLS if p.name != "http ready"]), "only .* were asked"),
        (lambda: drained(replace(END, exit_code=70)), "the exit code is 70"),
        (lambda: drained(replace(END, exit_code=None)), "the exit code is None"),
        (lambda: drained(replace(END, last_line="killed")), "the last line is 'killed'"),
        (lambda: drained(replace(END, errors=("Traceback",))), "its log says Traceback"),
        (lambda: drained(END, outcome(kind="drain", error=Told("cancelled", "499", "x"))), "drain by v1 stream: 499 cancelled"),
        (lambda: drained(END, outcome(kind="drain", error=Told("draining", "503", "x"))), "nothing ran while it drained"),
        (lambda: checks.load_was_kept(8, 10), "8.0 requests a second were sent, 10.0 were to be"),
    ],
)  # fmt: skip
def test_what_breaks_a_run_is_found(check: Callable[[], Verdict], says: str) -> None:
    found = check()
    assert not found.ok and re.search(says, "\n".join(found.wrong)), found


def test_memory_that_peaks_once_does_not_grow() -> None:
    assert flat([replace(u, rss=400 * MIB if i == 9 else u.rss) for i, u in enumerate(MEMORY)]).ok
    assert checks.slope([replace(u, rss=u.rss + 3 * i * MIB) for i, u in enumerate(MEMORY)]) == pytest.approx(MIB / 20, rel=0.1)


# --- errors, as clients see them ------------------------------------------------------------------------------------


def trailers(refusal: Refusal) -> list[tuple[str, bytes]]:
    """What a client gets of it."""
    sent: list[tuple[str, bytes]] = []

    class Context:
        async def abort(self, code: grpc.StatusCode, message: str, found: tuple) -> None:
            sent.extend(found)

    asyncio.run(status.abort(Context(), refusal))  # pyright: ignore[reportArgumentType]
    return sent


def test_errors_over_grpc() -> None:
    full = trailers(Refusal("queue_full", "full"))
    told = of_grpc(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", full)
    assert (told.code, told.label, told.retry, told.quota, told.wrong) == (
        "queue_full",
        "RESOURCE_EXHAUSTED queue_full",
        True,
        True,
        "",
    )
    assert of_grpc(grpc.StatusCode.ABORTED, "full", full).wrong == "queue_full must be RESOURCE_EXHAUSTED; got ABORTED"
    no_push = [pair for pair in full if pair[0] != "grpc-retry-pushback-ms"]
    assert "must say when to come back" in of_grpc(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", no_push).wrong
    bare = of_grpc(grpc.StatusCode.UNIMPLEMENTED, None, None)
    assert (bare.code, bare.wrong) == ("", "")
    packed = status_pb2.Status(code=8)
    assert "is in no table" in of_grpc(grpc.StatusCode.INTERNAL, "", [(DETAILS, packed.SerializeToString())]).wrong


def body(**fields: object) -> bytes:
    return json.dumps({"error": {"message": "no", "type": "x", "param": None, "code": "queue_full", **fields}}).encode()


JSON = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("status", "headers", "content", "says"),
    [
        (429, {**JSON, "retry-after": "1"}, body(), "^$"),
        (429, JSON, body(), "queue_full must say when to come back"),
        (429, {**JSON, "retry-after": "soon"}, body(), "must say when to come back"),
        (400, {**JSON, "retry-after": "1"}, body(), "queue_full must be 429; got 400"),
        (400, JSON, body(code="context_length_exceeded"), "^$"),
        (400, JSON, body(code="other"), "'other' with status 400 is in no table"),
        (404, JSON, body(code=None), "^$"),
        (400, JSON, body(code=None), "is in no table"),
        (400, JSON, body(message=""), "an error must hold"),
        (400, JSON, body(more=1), "an error must hold"),
        (400, JSON, b"{}", "a 400 must hold an error"),
        (400, JSON, b"{", "a 400 must hold an error"),
        (500, {"content-type": "text/plain"}, b"Internal Server Error", "a 500 must be JSON"),
    ],
)
def test_errors_over_http(status: int, headers: dict[str, str], content: bytes, says: str) -> None:
    assert re.search(says, of_http(status, headers, content).wrong)


@pytest.mark.parametrize("context", [256, 2048])
def test_all_that_is_asked_fits(context: int) -> None:
    jobs = make_jobs(512, context, 0, text=True)
    every = [job for each in jobs.values() for job in each]
    assert all(len(job.prompt) + job.max_tokens <= context and max(job.prompt, default=0) < 512 for job in every)
    assert max(len(job.prompt) for job in every) == context - 1 and len({job.name for job in every}) == len(every)
    assert make_jobs(512, context, 0, text=True) == jobs != make_jobs(512, context, 1, text=True)
    with pytest.raises(UserError, match="the context must be 256 tokens at least; got 128"):
        make_jobs(512, 128, 0, text=True)


def test_what_is_read_of_a_process() -> None:
    page = '# HELP a b\nvllm:x{model_name="m",engine="0"} 2.0\nvllm:x{model_name="n"} 1e3\nplain 3\n'
    assert metrics_of(page) == {"vllm:x": {'model_name="m",engine="0"': 2.0, 'model_name="n"': 1000.0}, "plain": {"": 3.0}}
    assert flags({"cache.kv_memory": 5, "buckets.decode_rows": (1, 2)}) == ["--kv-memory", "5", "--decode-rows", "1", "2"]
    lines = ['{"level": "info", "message": "an Error"}', '{"level": "error", "message": "x"}', "Traceback (most", "load 1 MiB"]
    assert errors_in(lines) == tuple(lines[1:3])
