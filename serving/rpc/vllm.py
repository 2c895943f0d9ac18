"""vllm.grpc.engine.VllmEngine: what gateways speak to a worker (smg, llm-d)."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from pagedjax.llm import LLM
from serving import profile
from serving.auth import require_admin
from serving.call import Call, known_ids
from serving.errors import Refusal, form_failed
from serving.frontend import VERSION, Frontend
from serving.gather import Collected
from serving.reply import Reply
from serving.rpc import kv_messages
from serving.rpc import vllm_messages as messages
from serving.rpc.guard import caller, deadline, trace
from serving.tokenizer_files import archive, chunks


class VllmEngine(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Every method of the protocol. Embed is not there: the models generate."""

    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    # --- requests ---------------------------------------------------------------------------------------------------

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        with self._frontend.reading(caller(), known_ids(trace(context), request_id=request.request_id)):
            call = self._call(request, context)
        async with await self._frontend.submit(call) as reply:
            await context.send_initial_metadata((("x-request-id", reply.request_id),))
            async for answer in _answers(reply, streams=request.stream):
                yield answer

    def _call(self, request: Any, context: grpc.aio.ServicerContext) -> Call:
        messages.check_supported(request)
        given, llm = request.sampling_params, self._frontend.llm
        cut = messages.truncation(given, llm.engine.config.schedule.max_model_len)
        return Call(
            messages.prompt(request, cut),
            messages.sampling_params(given),
            caller(),
            request_id=request.request_id,
            deadline=deadline(context),
            trace=trace(context),
            streams=request.stream,
        )

    async def Embed(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        raise Refusal("unimplemented", "the model generates text and has no embeddings to give")

    async def Abort(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        for request_id in request.request_ids:
            self._frontend.abort(request_id, caller())
        return pb.AbortResponse()

    # --- what it is -------------------------------------------------------------------------------------------------

    async def HealthCheck(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        state = self._frontend.state
        healthy = state == "ready" and self._frontend.is_live()
        return pb.HealthCheckResponse(healthy=healthy, message=state if healthy or state != "ready" else "a step hangs")

    async def GetModelInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        llm = self._frontend.llm
        tokenizer, context_length = llm.tokenizer, llm.engine.config.schedule.max_model_len
        return pb.GetModelInfoResponse(
            model_path=llm.model,
            is_generation=True,
            max_context_length=context_length,
            vocab_size=llm.engine.model.vocab_size,
            served_model_name=self._frontend.model_name,
            tokenizer_path="" if tokenizer is None else llm.model,
            model_type=llm.engine.model.architecture,
            architectures=await asyncio.to_thread(_architectures, llm),
            eos_token_ids=llm.defaults.stop_ids,
            bos_token_id=0 if tokenizer is None else tokenizer.bos_id or 0,
            max_req_input_len=context_length - 1,
            default_sampling_params_json=json.dumps(llm.defaults.sampling()),
        )

    async def GetServerInfo(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        frontend = self._frontend
        config = frontend.llm.engine.config
        return pb.GetServerInfoResponse(
            active_requests=frontend.open_requests,
            is_paused=frontend.state == "draining",
            last_receive_timestamp=frontend.last_received,
            uptime_seconds=time.time() - frontend.started,
            server_type="pagedjax",
            data_parallel_size=1,
            kv_cache_dtype=config.dtype if config.cache.kv_dtype == "auto" else config.cache.kv_dtype,
            block_size=config.cache.block_size,
            model_dtype=config.dtype,
            max_num_seqs=config.schedule.max_num_seqs,
        )

    async def GetLoads(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        frontend, size = self._frontend, self._frontend.llm.engine.config.cache.block_size
        load, rank = frontend.load, request.dp_rank if request.HasField("dp_rank") else 0
        if rank != 0:
            raise Refusal("invalid_argument", f"dp_rank must be 0, since there is one replica here; got {rank}", param="dp_rank")
        usage = load.blocks_used / load.blocks
        core = pb.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=load.blocks_used * size,
            max_total_num_tokens=load.blocks * size,
            token_usage=usage,
            gen_throughput=frontend.totals.tokens_per_second(),
            cache_hit_rate=frontend.totals.hit_rate,
            utilization=max(usage, load.running / frontend.llm.engine.config.schedule.max_num_seqs),
            max_running_requests=frontend.llm.engine.config.schedule.max_num_seqs,
            num_waiting_uncached_tokens=load.waiting_tokens,
        )
        stamp = datetime.now(UTC).isoformat()
        return pb.GetLoadsResponse(timestamp=stamp, version=VERSION, dp_rank_count=1, loads=[core])

    async def GetTokenizer(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        data = await asyncio.to_thread(archive, self._frontend.llm)
        await context.send_initial_metadata(())
        for piece, sha256 in chunks(data):
            yield common.GetTokenizerChunk(data=piece, sha256=sha256)

    async def SubscribeKvEvents(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """What is cached, which shows what was asked. Between batches the load alone, unless the subscriber does not know that a
        stream may begin with it."""
        require_admin(caller())
        await context.send_initial_metadata(())
        last, batches = 0, self._frontend.kv_feed.subscribe(request.start_sequence_number)
        async with contextlib.aclosing(batches):
            sample = 0
            async for batch in batches:
                sample += 1
                load = kv_messages.engine_load(self._frontend, sample)
                if batch is not None:
                    last = batch.sequence
                    yield kv_messages.batch(batch, load)
                elif last or request.load_records_before_first_batch:
                    yield kv_messages.load_only(last, load)

    # --- what its owner asks ----------------------------------------------------------------------------------------

    async def FlushCache(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Waits for so many seconds until no request is open; then, or with 0 at once, it fails if one is."""
        require_admin(caller())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, request.timeout_s)):
                await self._frontend.idle()
        count = self._frontend.open_requests
        if count:
            return common.FlushCacheResponse(success=False, message=f"{count} requests are open")
        flushed = await self._frontend.flush_cache()
        return common.FlushCacheResponse(success=True, message=f"{flushed} blocks were forgotten")

    async def StartProfile(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        require_admin(caller())
        asked = [field.name for field, value in request.ListFields() if field.name != "output_dir"]
        if asked:
            raise Refusal(
                "unsupported", f"{asked[0]} is not supported: a trace runs until StopProfile, of all there is", param=asked[0]
            )
        folder = profile.folder(self._frontend.config.profile_folder, request.output_dir)
        await asyncio.to_thread(profile.start, folder)
        return common.ProfileResponse(success=True, message=f"the trace will be in {folder}")

    async def StopProfile(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        require_admin(caller())
        await asyncio.to_thread(profile.stop)
        return common.ProfileResponse(success=True, message="the trace is written")


def _architectures(llm: LLM) -> list[str]:
    """The names that config.json has, where there is one."""
    source = llm.tokenizer_source
    if isinstance(source, Path) and (source / "config.json").is_file():
        return json.loads((source / "config.json").read_text(encoding="utf-8")).get("architectures") or []
    return []


async def _answers(reply: Reply, *, streams: bool) -> AsyncIterator[Any]:
    """Chunks as they come, if so wanted, and of each sequence one `complete` with all of its output."""
    assert reply.request is not None
    ids, params = reply.request.prompt, reply.request.params
    collected = Collected()
    async with contextlib.aclosing(reply.__aiter__()) as updates:
        async for update in updates:
            for delta in update:
                collected.add(delta)
                if delta.finish == "constraint":
                    raise form_failed()
                if streams and delta.tokens:
                    yield messages.chunk(delta, ids, 0 if delta.usage is None else delta.usage.cached)
                if delta.finish is not None:
                    yield messages.complete(collected.pop(delta.index), ids, params.stop_token_ids)
