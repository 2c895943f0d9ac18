"""One server in this process, on loopback, with all that is behind it, and the requests that are sent to it."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from starlette.types import ASGIApp, Message

from bench.fuzz import bodies, messages
from bench.fuzz.judge import Judged, judge_grpc, judge_http
from pagedjax import LLM, SamplingParams
from serving.auth import Keys
from serving.config import ServeConfig
from serving.frontend import Frontend
from serving.http.app import make_app, open_http
from serving.limits import Limits
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub
from serving.rpc.listen import open_grpc

# One conversation after the other, and the way of the hermes family to call tools: for models that have no template of their own.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
)
LIMITS = Limits(max_message_bytes=1 << 20, max_samples=4, max_batch=8, max_stops=8, max_form_bytes=1 << 13)
OPTIONS: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 16}
OPTIONS |= {"buckets.decode_rows": (8,), "buckets.prefill_tokens": (64,), "cache.kv_memory": 4 << 20, "dtype": "float32"}
ENDLESS = ("SubscribeKvEvents", "Watch")  # their first message is enough
PATIENCE = 60.0  # seconds for an answer
CHECKED = 500  # requests between two looks at whether the server still works
ENOUGH = 200  # things that are wrong, after which it ends
LOGGERS = ("pagedjax.serving", "grpc", "grpc._cython.cygrpc", "uvicorn.error", "asyncio")


@dataclass
class Report:
    """What came of all requests."""

    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)  # by transport: how often which status
    wrong: list[str] = field(default_factory=list)
    checks: int = 0  # times that the server was found to work
    seconds: float = 0.0

    @property
    def total(self) -> int:
        return sum(count.total() for count in self.counts.values())

    def take(self, transport: str, number: int, asked: Any, judged: Judged) -> None:
        self.counts.setdefault(transport, Counter())[judged.label] += 1
        if judged.wrong:
            self.wrong.append(f"request {number} over {transport}: {judged.wrong}; sent {asked!r:.500}")


@dataclass(frozen=True)
class Server:
    llm: LLM
    frontend: Frontend
    app: ASGIApp
    grpc: str
    http: str


class Errors(logging.Handler):
    """Keeps what is logged as an error: nothing that a client sends may be one."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(f"{record.name}: {self.format(record)}"[-600:])


@contextlib.contextmanager
def listening() -> Iterator[Errors]:
    """Meanwhile all errors of the server's log are kept."""
    errors = Errors()
    for name in LOGGERS:
        logging.getLogger(name).addHandler(errors)
    try:
        yield errors
    finally:
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(errors)


@contextlib.asynccontextmanager
async def serving(llm: LLM) -> AsyncIterator[Server]:
    """Both ports open, and the same app without one."""
    if llm.tokenizer is not None and not llm.tokenizer.templates:
        llm.tokenizer = dataclasses.replace(llm.tokenizer, templates={"default": TEMPLATE})
    frontend = Frontend(ServeConfig(grpc_port=0, http_port=0, served_model_name="fuzzed", limits=LIMITS), "fuzzed")
    rpc, http = await open_grpc(frontend, Keys()), await open_http(frontend, Keys())
    await frontend.start(llm)
    try:
        yield Server(llm, frontend, make_app(frontend, Keys()), rpc.address, http.address)
    finally:
        await rpc.stop(0)
        await http.stop(1)
        frontend.close()


# --- one request ----------------------------------------------------------------------------------------------------


async def call_app(app: ASGIApp, sent: bodies.Sent) -> tuple[int, dict[str, str], bytes]:
    """(status, headers, body) of a request without a socket: the app as uvicorn would call it, by a client that stays."""
    path, _, query = sent.path.partition("?")
    scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": sent.method, "scheme": "http"}
    scope |= {"path": path, "raw_path": path.encode("utf-8", "replace"), "query_string": query.encode(), "root_path": ""}
    scope |= {"headers": list(sent.headers), "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2), "state": {}}
    left = [{"type": "http.request", "body": sent.body, "more_body": False}]
    status, headers, body = 0, {}, bytearray()

    async def receive() -> Message:
        return left.pop() if left else await asyncio.Future()

    async def send(message: Message) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status = message["status"]
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            body.extend(message.get("body", b""))

    await app(scope, receive, send)
    return status, headers, bytes(body)


async def over_asgi(app: ASGIApp, sent: bodies.Sent) -> Judged:
    return judge_http(sent.method, sent.path, *await call_app(app, sent))


async def over_socket(address: str, sent: bodies.Sent) -> Judged:
    """Through uvicorn, by a client that checks nothing of what it sends."""
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"{sent.method} {sent.path} HTTP/1.1".encode("ascii", "backslashreplace")
        length = (b"content-length", str(len(sent.body)).encode())
        lines = [head, *(name + b": " + value for name, value in (*sent.headers, length, (b"connection", b"close")))]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + sent.body)
        answer = await reader.read(-1)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *rest = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in rest)}
    if first.startswith("HTTP/1.1 400") and body == b"Invalid HTTP request received.":
        return Judged("400 no HTTP")
    status = int(first.split()[1])
    return judge_http(sent.method, sent.path, status, headers, _unchunked(body) if "transfer-encoding" in headers else body)


def _unchunked(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return whole


async def over_grpc(channel: grpc.aio.Channel, sent: messages.Sent) -> Judged:
    """Bytes as they are, over a loopback connection."""
    name, method = sent.method.rpartition("/")[2], messages.METHODS[sent.method]
    options: dict[str, Any] = {"metadata": sent.metadata, "timeout": PATIENCE if name not in ("FlushCache", *ENDLESS) else 0.5}
    if method.client_streaming:
        call: Any = channel.stream_stream(sent.method)(iter([sent.message]), **options)
    elif method.server_streaming:
        call = channel.unary_stream(sent.method)(sent.message, **options)
    else:
        call = channel.unary_unary(sent.method)(sent.message, **options)
    try:
        if not method.server_streaming:
            await call
        else:
            async for _ in call:
                if name in ENDLESS:
                    call.cancel()
                    return Judged("OK")
    except grpc.aio.AioRpcError as error:
        details = (error.code(), error.details(), error.trailing_metadata())
        return judge_grpc(name, *details, own_deadline=options["timeout"] < PATIENCE)
    return Judged("OK")


# --- all of them ----------------------------------------------------------------------------------------------------


async def works(server: Server, channel: grpc.aio.Channel, expected: str) -> str:
    """Asks what was asked before all else, by each protocol; what is wrong, "" for nothing."""
    body = json.dumps({"prompt": "Once upon", "max_tokens": 8, "temperature": 0, "ignore_eos": True}).encode()
    asked = bodies.Sent("POST", "/v1/completions", ((b"content-type", b"application/json"),), body)
    status, _, answer = await call_app(server.app, asked)
    text = json.loads(answer)["choices"][0]["text"] if status == 200 else answer
    if text != expected:
        return f"over HTTP it answers {text!r:.200}, and {expected!r} was right"
    params = pb.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    try:
        whole = await InferenceStub(channel).Generate(pb.GenerateRequest(prompts=[pb.Prompt(text="Once upon")], params=params))
    except grpc.aio.AioRpcError as error:
        return f"over gRPC it answers {error.code().name}: {error.details()}"
    text = whole.completions[0].samples[0].text
    return "" if text == expected else f"over gRPC it answers {text!r:.200}, and {expected!r} was right"


async def fuzz(llm: LLM, count: int, seed: int, *, workers: int = 8, first: int = 0, sockets: float = 0.05) -> Report:
    """`count` requests from number `first` on, of which each depends on `seed` and its number alone. `sockets`: the share of HTTP
    that goes through one."""
    report, numbers, begin = Report(seed), iter(range(first, first + count)), time.perf_counter()
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    expected = (await asyncio.to_thread(llm.generate, "Once upon", greedy))[0].outputs[0].text
    with listening() as errors:
        async with serving(llm) as server, grpc.aio.insecure_channel(server.grpc) as channel:

            async def worker() -> None:
                for number in numbers:
                    transport, asked, judged = await one(server, channel, random.Random(f"{seed}-{number}"), sockets)
                    report.take(transport, number, asked, judged)
                    if errors.seen:
                        report.wrong.append(f"about request {number}, {asked!r:.300}: the log says {errors.seen[0]}")
                        errors.seen.clear()
                    if (number + 1) % CHECKED == 0:
                        await look(number)
                    if server.frontend.state != "ready" or len(report.wrong) > ENOUGH:
                        return

            async def look(number: int) -> None:
                if wrong := await works(server, channel, expected):
                    report.wrong.append(f"after request {number}: {wrong}")
                report.checks += 1

            await asyncio.gather(*(worker() for _ in range(workers)))
            await look(first + count - 1)
            report.wrong += await held(server)
    report.seconds = time.perf_counter() - begin
    return report


async def one(server: Server, channel: grpc.aio.Channel, rng: random.Random, sockets: float) -> tuple[str, Any, Judged]:
    """(transport, request, what came of it)."""
    try:
        async with asyncio.timeout(2 * PATIENCE):
            if rng.random() < 0.45:
                call = messages.request(rng)
                return "gRPC", call, await over_grpc(channel, call)
            asked = bodies.request(rng)
            if rng.random() < sockets:
                return "HTTP over a socket", asked, await over_socket(server.http, asked)
            return "HTTP", asked, await over_asgi(server.app, asked)
    except TimeoutError:
        return "none", None, Judged("no answer", f"nothing came for {2 * PATIENCE:.0f} s")


async def held(server: Server) -> list[str]:
    """What is still open or held when nothing is asked any more."""
    until = time.monotonic() + PATIENCE
    while server.llm.engine.has_work() and time.monotonic() < until:
        await asyncio.sleep(0.01)
    pool, wrong = server.llm.engine.scheduler.pool, []
    wrong += [f"{server.frontend.open_requests} requests are open"] if server.frontend.open_requests else []
    wrong += [f"{pool.capacity - pool.num_free} blocks are held"] if pool.num_free != pool.capacity else []
    return wrong + ([f"the server is {server.frontend.state}"] if server.frontend.state != "ready" else [])
