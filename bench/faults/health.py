"""Asks for health all the time, by both protocols; used by bench.faults: one JSON line for each answer, the fields of a Poll."""

import asyncio
import contextlib
import dataclasses
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.faults.records import Poll

SERVICE = "pagedjax.v1.Inference"


async def watch(address: str, url: str, pid: int, *, begin: float, every: float, limit: float) -> None:
    """Until there is no such process any more. `begin`: time.monotonic() of second 0."""
    async with grpc.aio.insecure_channel(address) as channel, httpx.AsyncClient(base_url=url, trust_env=False) as client:
        stub: Any = health_pb2_grpc.HealthStub(channel)

        async def by_grpc(service: str) -> bool:
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=2 * limit)
            return answer.status == health_pb2.HealthCheckResponse.SERVING

        async def by_http(path: str) -> bool:
            return (await client.get(path, timeout=2 * limit)).status_code == 200

        async def poll(name: str, ask: Callable[[str], Awaitable[bool]], what: str) -> Poll:
            at, says = time.monotonic(), None
            with contextlib.suppress(grpc.aio.AioRpcError, httpx.HTTPError):
                says = await ask(what)
            return Poll(at - begin, name, says, time.monotonic() - at)

        questions = (
            ("grpc live", by_grpc, ""),
            ("grpc ready", by_grpc, SERVICE),
            ("http live", by_http, "/health"),
            ("http ready", by_http, "/ready"),
        )
        while runs(pid):
            for found in await asyncio.gather(*(poll(*question) for question in questions)):
                print(json.dumps(dataclasses.astuple(found)))
            await asyncio.sleep(every)


def runs(pid: int) -> bool:
    """Whether it has not ended: one that nobody has waited for is still there, as a zombie."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(") ")[2][0] != "Z"
    except (OSError, IndexError):
        return False


if __name__ == "__main__":
    asyncio.run(
        watch(
            sys.argv[1], sys.argv[2], int(sys.argv[3]), begin=float(sys.argv[4]), every=float(sys.argv[5]), limit=float(sys.argv[6])
        )
    )
