"""The server as a process of its own: started, watched from outside, told to end."""

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from bench.faults.records import Poll, Rest, Usage

READY = re.compile(r"ready: .* at ([^ ,\"]+), ([^ ,\"]+)")
ABOUT_A_REQUEST = re.compile(r'"level": "info", "message": "(request|refused)"')
METRIC = re.compile(r"^(\S+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Server:
    """A process that takes requests. Its log goes to a file: to a pipe it would have to wait for who reads it."""

    process: asyncio.subprocess.Process
    grpc: str  # host:port
    url: str
    file: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> list[str]:
        """Its lines, without those that tell of one request."""
        with self.file.open(encoding="utf-8", errors="replace") as lines:
            return [line.rstrip() for line in lines if not ABOUT_A_REQUEST.search(line)]


def flags(options: Mapping[str, Any]) -> list[str]:
    """`pagedjax serve`'s, for fields of EngineConfig by their paths."""
    shown = {
        name.rpartition(".")[2]: " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in options.items()
    }
    return [part for name, value in shown.items() for part in (f"--{name.replace('_', '-')}", *value.split())]


async def start(model: str, options: Mapping[str, Any], file: Path, more: Sequence[str] = ()) -> Server:
    """`file`: for its log. RuntimeError, with the end of that, where it ends before it is ready."""
    command = ["-m", "pagedjax", "serve", model, "--served-model-name", "model", "--grpc-port", "0", "--http-port", "0"]
    command += ["--log-format", "json", *flags(options), *more]
    with file.open("wb") as log:
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stderr=log, stdout=asyncio.subprocess.DEVNULL)
    while process.returncode is None:
        if found := READY.search(file.read_text(encoding="utf-8", errors="replace")):
            return Server(process, found[1], f"http://{found[2]}", file)
        await asyncio.sleep(0.05)
    raise RuntimeError(f"the server ended with {process.returncode}: {file.read_text(errors='replace')[-2000:]}")


def errors_in(log: Sequence[str]) -> tuple[str, ...]:
    """Lines that are an error's, or no log line at all (a traceback of a library)."""
    found = []
    for line in log:
        try:
            level = json.loads(line)["level"]
        except (ValueError, KeyError, TypeError):
            level = "none" if re.search("Traceback|Error|destroyed", line) else "info"
        if level not in ("debug", "info", "warning"):
            found.append(line)
    return tuple(found)


async def stop(server: Server) -> None:
    """Whatever it is at."""
    if server.process.returncode is None:
        server.process.kill()
    await server.process.wait()


# --- from outside ---------------------------------------------------------------------------------------------------


def usage(pid: int, at: float) -> Usage:
    """By /proc: Linux only."""
    folder = Path("/proc") / str(pid)
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return Usage(at, int(status["VmRSS"].split()[0]) << 10, int(status["Threads"]), len(list((folder / "fd").iterdir())))


async def watch_usage(server: Server, found: list[Usage], clock: Callable[[], float], *, every: float) -> None:
    while server.process.returncode is None:
        try:
            found.append(usage(server.pid, clock()))
        except (FileNotFoundError, ProcessLookupError, KeyError):
            return  # it has just ended
        await asyncio.sleep(every)


async def watch_health(server: Server, *, begin: float, every: float, limit: float) -> list[Poll]:
    """By a process of its own, as an orchestrator is one, until the server has ended. `begin`: time.monotonic() of second 0."""
    command = ["-m", "bench.faults.health", server.grpc, server.url, str(server.pid), str(begin), str(every), str(limit)]
    process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return [Poll(*json.loads(line)) for line in said.splitlines()]


def metrics_of(page: str) -> dict[str, dict[str, float]]:
    """The values of each metric, by the text of its labels."""
    found: dict[str, dict[str, float]] = {}
    for name, labels, value in METRIC.findall(page):
        if not name.startswith("#"):
            found.setdefault(name, {})[labels] = float(value)
    return found


async def rest(server: Server) -> Rest:
    """What the server says of itself, by both protocols."""
    async with grpc.aio.insecure_channel(server.grpc) as channel, httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        load = (await stub.GetLoads(vllm.GetLoadsRequest())).loads[0]
        info = await stub.GetServerInfo(vllm.GetServerInfoRequest())
        page = metrics_of((await client.get("/metrics", timeout=30)).text)
    blocks = page["pagedjax:blocks"]
    state = lambda name: int(sum(value for labels, value in blocks.items() if f'state="{name}"' in labels))
    after = sum(value for labels, value in page["pagedjax:compilations_total"].items() if 'phase="after_start"' in labels)
    return Rest(
        running=load.num_running_reqs + int(sum(page["vllm:num_requests_running"].values())),
        waiting=load.num_waiting_reqs + int(sum(page["vllm:num_requests_waiting"].values())),
        open_requests=info.active_requests,
        used_tokens=load.num_used_tokens,
        held=state("used") + state("shared"),
        blocks=int(sum(blocks.values())),
        free=state("free") + state("cached"),
        compiled=int(after),
    )


async def at_rest(server: Server, *, patience: float) -> Rest:
    """`rest`, once it says that nothing is at work, or after so many seconds."""
    until = time.monotonic() + patience
    while True:
        found = await rest(server)
        if not (found.running or found.waiting or found.open_requests or found.held) or time.monotonic() > until:
            return found
        await asyncio.sleep(0.1)


async def settled(server: Server, clock: Callable[[], float], most: Usage | None, *, patience: float) -> Usage:
    """What the process holds once connections that were closed are gone: as soon as it is no more than `most`, or when it does not
    get less for a second."""
    until, lowest, since = time.monotonic() + patience, usage(server.pid, clock()), time.monotonic()
    while time.monotonic() < until:
        now = usage(server.pid, clock())
        if most is not None and now.files <= most.files and now.threads <= most.threads:
            return now
        if now.files < lowest.files or now.threads < lowest.threads:
            lowest, since = now, time.monotonic()
        if most is None and time.monotonic() - since > 1:
            return now
        await asyncio.sleep(0.1)
    return usage(server.pid, clock())
