"""grpc.health.v1: what orchestrators ask, and clients that balance by themselves. The package's servicer forgets all watchers of a
name when one of them leaves, so that the others never hear of the end."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING


class Health(health_pb2_grpc.HealthServicer):
    """Lives on the event loop."""

    def __init__(self):
        self._statuses: dict[str, Any] = {}  # by service
        self._wakes: set[asyncio.Event] = set()

    def set(self, statuses: Mapping[str, Any]) -> None:
        """Of services by their names; whoever watches is told."""
        self._statuses.update(statuses)
        for wake in self._wakes:
            wake.set()

    async def Check(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no service of this name here")
        return pb.HealthCheckResponse(status=self._statuses[request.service])

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """The status now, and each other one that follows."""
        told, wake = None, asyncio.Event()
        self._wakes.add(wake)
        try:
            while True:
                wake.clear()
                status = self._statuses.get(request.service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != told:
                    told = status
                    yield pb.HealthCheckResponse(status=status)
                await wake.wait()
        finally:
            self._wakes.discard(wake)
