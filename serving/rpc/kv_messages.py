"""Batches of the prefix cache's events as messages of smg.grpc.common."""

from typing import Any

import numpy as np
from smg_grpc_proto.generated import common_pb2 as common

from pagedjax.host.cache_log import Removed, Stored
from serving.frontend import Frontend
from serving.kv_events import Batch


def block_hash(key: bytes) -> int:
    """The first 64 bits of a block's key, as the signed integer that the protocol has."""
    return int.from_bytes(key[:8], "little", signed=True)


def batch(given: Batch, load: Any) -> Any:
    snapshot = given.snapshot
    return common.KvEventBatch(
        sequence_number=given.sequence,
        timestamp=given.time,
        events=[_event(event, 0 if snapshot else given.sequence) for event in given.events],
        snapshot=None
        if snapshot is None
        else common.KvSnapshotChunk(index=snapshot.index, count=snapshot.count, blocks=snapshot.blocks),
        dp_rank=0,
        load=load,
    )


def load_only(sequence: int, load: Any) -> Any:
    """No news but the load; repeats the last number of its stream."""
    load.load_only = True
    return common.KvEventBatch(sequence_number=sequence, dp_rank=0, load=load)


def _event(event: object, number: int) -> Any:
    match event:
        case Stored():
            ids = np.frombuffer(event.tokens, np.int32).tolist()
            block = common.KvBlock(block_hash=block_hash(event.key), token_ids=ids, block_size=len(ids))
            stored = common.KvBlocksStored(
                blocks=[block],
                parent_block_hash=None if event.parent is None else block_hash(event.parent),
                tier=common.KV_CACHE_TIER_DEVICE,
                locality=common.KV_CACHE_LOCALITY_LOCAL,
                cache_salt=event.salt or None,
            )
            return common.KvCacheEvent(event_id=number, stored=stored)
        case Removed():
            removed = common.KvBlocksRemoved(block_hashes=[block_hash(event.key)], tier=common.KV_CACHE_TIER_DEVICE)
            return common.KvCacheEvent(event_id=number, removed=removed)
    return common.KvCacheEvent(event_id=number, cleared=common.KvCacheCleared())


def engine_load(frontend: Frontend, sample: int) -> Any:
    """The numbers of GetLoads, and for how long the engine has been silent where it has something to do."""
    load, engine = frontend.load, frontend.llm.engine
    size, usage = engine.config.cache.block_size, load.blocks_used / load.blocks
    return common.EngineLoad(
        running_requests=load.running,
        waiting_requests=load.waiting,
        waiting_uncached_tokens=load.waiting_tokens,
        token_usage=usage,
        active_token_usage=usage,  # cached blocks that nobody uses count as free in both
        gen_throughput=frontend.totals.tokens_per_second(),
        max_running_requests=engine.config.schedule.max_num_seqs,
        sample=sample,
        cache_hit_rate=frontend.totals.hit_rate,
        num_used_tokens=load.blocks_used * size,
        max_total_num_tokens=load.blocks * size,
        engine_silence_ms=int(frontend.step_age() * 1000) if load.running or load.waiting else None,
        engine_reports_steps=True,
    )
