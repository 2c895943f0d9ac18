"""The load: how much the server can do, and then more than that, with clients that misbehave in every way."""

import asyncio
import gc
import random
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from socket import SO_RCVBUF, SOL_SOCKET
from typing import Any
from urllib.parse import urlsplit

import grpc.aio
import httpx

from bench.errors import Told, of_grpc
from bench.faults import by_grpc, by_http, malformed
from bench.faults.process import Server
from bench.faults.records import Job, Manner, Outcome

Way = Callable[[Any, Sequence[Job], Outcome, Manner], Awaitable[None]]
GRPC: dict[str, Way] = {
    "v1": by_grpc.v1_whole,
    "v1 stream": by_grpc.v1_stream,
    "vllm": by_grpc.vllm_whole,
    "vllm stream": by_grpc.vllm_stream,
    "vllm aborted": by_grpc.vllm_aborted,
}
HTTP: dict[str, Way] = {"http": by_http.http_whole, "http stream": by_http.http_stream}
PLAIN = ("v1", "v1 stream", "vllm", "vllm stream", "http", "http stream")
STREAMS = ("v1 stream", "vllm stream", "http stream")
BATCHES = ("v1", "v1 stream", "http", "http stream")
CHANNELS = 4  # gRPC connections that the clients share
PATIENCE = 300.0  # seconds until a request counts as hung

AS_EVER = Manner()

# How often each kind comes, of those that ask for work. "late" come in storms besides.
MIX = {"answer": 58, "batch": 4, "form": 6, "sampled": 6, "longest": 2, "cancel": 10, "abort": 5, "late": 5, "slow": 2, "half": 2}
MALFORMED = 0.25  # as many for each that asks for work
STORM = 40  # requests at once whose deadlines can hardly be met


@dataclass
class Clients:
    """Connections to one server. `slow`: those that take little at a time."""

    channels: list[grpc.aio.Channel]
    http: httpx.AsyncClient
    slow: httpx.AsyncClient
    host: str
    port: int


@asynccontextmanager
async def connected(server: Server) -> AsyncIterator[Clients]:
    """Nothing is connected when it is left."""
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    settings: dict[str, Any] = {"base_url": server.url, "timeout": None}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
    small = httpx.AsyncHTTPTransport(socket_options=[(SOL_SOCKET, SO_RCVBUF, 4096)], limits=limits)
    where = urlsplit(server.url)
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(server.grpc, options)) for _ in range(CHANNELS)]
        http = await stack.enter_async_context(httpx.AsyncClient(**settings, limits=limits, trust_env=False))
        slow = await stack.enter_async_context(httpx.AsyncClient(**settings, transport=small, trust_env=False))
        yield Clients(channels, http, slow, where.hostname or "", where.port or 0)
    gc.collect()  # calls that were given up hold on to their connection until then


@dataclass
class Load:
    """What is sent, and what came of it."""

    clients: Clients
    jobs: Mapping[str, Sequence[Job]]
    rng: random.Random
    clock: Callable[[], float]
    outcomes: list[Outcome] = field(default_factory=list)
    usual: float = 0.1  # seconds that an answer takes

    async def ask(self, kind: str, way: str, jobs: Sequence[Job], manner: Manner = AS_EVER) -> Outcome:
        """One request, to its end."""
        outcome = Outcome(kind, way, tuple(job.name for job in jobs), jobs[0].n if jobs else 1, began=self.clock())
        self.outcomes.append(outcome)
        leaves = manner.leave_after if way != "vllm aborted" else None
        try:
            async with asyncio.timeout(PATIENCE if leaves is None else leaves):
                await self._send(way, jobs, outcome, manner)
        except TimeoutError:
            outcome.end = "hung" if leaves is None else "left"
        except grpc.aio.AioRpcError as error:
            outcome.error = of_grpc(error.code(), error.details(), error.trailing_metadata())
        except (httpx.HTTPError, OSError) as error:
            outcome.error = Told("", "transport", f"{type(error).__name__}: {error}")
        except (ValueError, KeyError, TypeError) as error:  # an answer in a shape that it must not have
            outcome.error = Told("", "unreadable", f"{type(error).__name__}: {error}")
        outcome.seconds = self.clock() - outcome.began
        return outcome

    async def _send(self, way: str, jobs: Sequence[Job], outcome: Outcome, manner: Manner) -> None:
        if way == "half":
            outcome.jobs, outcome.end = (), "left"
            await by_http.half_a_request(self.clients.host, self.clients.port, jobs, sent=self.rng.random())
        elif way == "malformed http":
            await malformed.by_http(self.clients.http, outcome, self.rng)
        elif way == "malformed grpc":
            await malformed.by_grpc(self.rng.choice(self.clients.channels), outcome, self.rng)
        elif way in GRPC:
            await GRPC[way](self.rng.choice(self.clients.channels), jobs, outcome, manner)
        else:
            await HTTP[way](self.clients.slow if manner.pause else self.clients.http, jobs, outcome, manner)

    def make(self, kind: str) -> Awaitable[Outcome]:
        """One request of a kind, with whatever is left to chance."""
        rng, usual = self.rng, self.usual
        source = {"batch": "batch", "form": "form", "sampled": "sampled", "longest": "longest", "slow": "slow", "abort": "long"}
        jobs = [rng.choice(self.jobs[source.get(kind, "answer")])]
        match kind:
            case "batch":
                return self.ask(kind, rng.choice(BATCHES), self.jobs["batch"])
            case "cancel":
                way = rng.choice(PLAIN)
                if way in STREAMS and way != "vllm stream" and rng.random() < 0.5:
                    return self.ask(kind, way, jobs, Manner(messages=rng.randint(1, 6)))
                return self.ask(kind, way, jobs, Manner(leave_after=rng.expovariate(1 / usual)))
            case "abort":
                return self.ask(kind, "vllm aborted", jobs, Manner(leave_after=rng.expovariate(1 / usual)))
            case "late":
                return self.ask(kind, rng.choice(PLAIN), jobs, Manner(deadline=max(0.001, rng.expovariate(1 / usual))))
            case "slow":
                return self.ask(kind, rng.choice(STREAMS), jobs, Manner(pause=rng.uniform(0.5, 4)))
            case "half":
                return self.ask(kind, "half", jobs)
            case "malformed":
                return self.ask(kind, rng.choice(("malformed http", "malformed grpc")), [])
        return self.ask(kind, rng.choice(PLAIN), jobs)


async def closed_loop(load: Load, readers: int, seconds: float) -> float:
    """Answers a second where so many clients ask one after the other; the first part of the time is not counted."""
    done: list[float] = []
    until = time.perf_counter() + seconds

    async def client() -> None:
        while time.perf_counter() < until:
            outcome = await load.make("answer")
            if outcome.accepted:
                done.append(time.perf_counter())

    await asyncio.gather(*(client() for _ in range(readers)))
    begin = until - 0.7 * seconds
    load.usual = statistics.median([o.seconds for o in load.outcomes if o.accepted] or [load.usual])
    return sum(begin <= at < until for at in done) / (0.7 * seconds)


async def open_loop(load: Load, rate: float, seconds: float, *, storms: int) -> float:
    """Requests at random times (Poisson), whether or not those before are answered; how many a second were sent that ask for work.
    `storms`: how often many come at once that are late already."""
    kinds = {kind: weight for kind, weight in MIX.items() if kind != "form" or "form" in load.jobs}
    tasks: set[asyncio.Task[Outcome]] = set()
    begin = load.clock()

    def send(kind: str) -> None:
        task = asyncio.ensure_future(load.make(kind))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def arrivals(each: float, kinds: Mapping[str, float]) -> int:
        at, count = load.rng.expovariate(each), 0
        while at < seconds:
            await asyncio.sleep(max(0.0, begin + at - load.clock()))
            send(*load.rng.choices(list(kinds), list(kinds.values())))
            at, count = at + load.rng.expovariate(each), count + 1
        return count

    async def storm() -> None:
        for number in range(storms):
            await asyncio.sleep(max(0.0, begin + (number + 0.5) * seconds / storms - load.clock()))
            for _ in range(STORM):
                send("late")

    sent, _, _ = await asyncio.gather(arrivals(rate, kinds), arrivals(MALFORMED * rate, {"malformed": 1}), storm())
    taken = load.clock() - begin
    while tasks:
        await asyncio.wait(tasks)
    return sent / max(taken, seconds)


async def while_it_drains(load: Load, server: Server, running: int) -> tuple[float, list[Outcome]]:
    """Streams that run when the server is told to end, and requests that come then, until one is refused by each protocol. When it
    was told, and what came of them."""
    jobs, first = load.jobs["long"], len(load.outcomes)
    tasks = [asyncio.ensure_future(load.ask("drain", STREAMS[i % 3], [jobs[i % len(jobs)]])) for i in range(running)]
    await asyncio.sleep(0)  # they begin
    while not all(o.samples or o.error for o in load.outcomes[first:]):
        await asyncio.sleep(0.01)
    signalled = load.clock()
    server.process.terminate()
    for way in ("v1", "http"):
        refused = False
        while not refused and not all(task.done() for task in tasks):
            outcome = await load.ask("drain", way, [load.jobs["longest"][0]])
            refused = outcome.error is not None
            if outcome.error is not None and not outcome.error.code and all(task.done() for task in tasks):
                load.outcomes.remove(outcome)  # the port was closed already
            await asyncio.sleep(0.02)
    await asyncio.gather(*tasks)
    return signalled, load.outcomes[first:]
