"""pagedjax.v1.Admin: what whoever runs the server asks of it."""

import asyncio
import contextlib
import json
import math
from dataclasses import replace
from typing import Any

import grpc.aio
import jax

from pagedjax.engine import Engine
from pagedjax.state import split_pool
from serving.auth import require_admin
from serving.frontend import Frontend
from serving.proto.pagedjax.v1 import admin_pb2 as pb
from serving.proto.pagedjax.v1 import admin_pb2_grpc
from serving.rpc.guard import caller


class Admin(admin_pb2_grpc.AdminServicer):
    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def Drain(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        require_admin(caller())
        self._frontend.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, request.wait_seconds)):
                await self._frontend.idle()
        return pb.DrainResponse(open_requests=self._frontend.open_requests)

    async def GetBuckets(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        require_admin(caller())
        engine = self._frontend.llm.engine
        return pb.GetBucketsResponse(
            buckets=[
                pb.Bucket(
                    tokens=bucket.tokens,
                    rows=bucket.rows,
                    decode=bucket.is_decode,
                    compile_seconds=compiled.seconds,
                    temp_bytes=compiled.temp_bytes,
                )
                for bucket, compiled in engine.executables.items()
            ],
            computed_tokens=engine.padding.computed,
            padding_tokens=engine.padding.padding,
            compilations_after_start=engine.compilations_after_start,
        )

    async def GetShardingReport(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        require_admin(caller())
        return await self._frontend.llm.loop.call_async(_sharding)

    async def Trace(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        require_admin(caller())
        whose = replace(caller(), tenant=request.tenant) if request.tenant else caller()
        decisions = json.loads(await self._frontend.trace(request.request_id, whose))["decisions"]
        return pb.TraceResponse(decisions=[_decision(each, decisions[0]["time"]) for each in decisions])


def _decision(given: dict[str, Any], begin: float) -> Any:
    why = {name: value for name, value in given.items() if name not in ("time", "index", "what")}
    return pb.Decision(seconds=given["time"] - begin, index=given["index"], what=given["what"], why_json=json.dumps(why))


def _sharding(engine: Engine) -> Any:
    """Runs in the engine's thread: between two steps no array is on its way into one."""
    leaves, _ = jax.tree.flatten_with_path(engine.params)
    pool, scales = split_pool(engine.state.kv)
    return pb.GetShardingReportResponse(
        devices=[str(device) for device in engine.mesh.devices.flat],
        axes=[pb.MeshAxis(name=name, size=size) for name, size in engine.mesh.shape.items()],
        weights=[_array(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves],
        pool=_array("kv", pool),
        pool_scales=None if scales is None else _array("kv_scales", scales),
    )


def _array(name: str, array: jax.Array) -> Any:
    shard = array.sharding.shard_shape(array.shape)
    spec = getattr(array.sharding, "spec", None)
    return pb.ShardedArray(
        name=name,
        shape=array.shape,
        dtype=str(array.dtype),
        spec="" if spec is None else str(tuple(spec)),
        bytes=array.nbytes,
        bytes_per_device=array.dtype.itemsize * math.prod(shard),
    )
