"""vllm.grpc.engine.VllmEngine by the stubs of the independent package smg-grpc-proto, on a loopback port."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loopback import Server
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc

from pagedjax import SamplingParams

GREEDY = {"temperature": 0.0, "max_tokens": 40}


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as made:
        yield made


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return vllm_engine_pb2_grpc.VllmEngineStub(channel)


def request(ids: list[int], stream: bool = False, name: str = "", **params: Any) -> Any:
    return pb.GenerateRequest(
        request_id=name,
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**{**GREEDY, **params}),
        stream=stream,
    )


def until(true: Callable[[], bool]) -> None:
    for _ in range(3000):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come true")


def test_chunks_joined_are_the_whole_and_the_offline_answer(server: Server, stub: Any) -> None:
    ids = server.llm.tokenizer.encode("Once upon a time")
    (offline,) = server.llm.generate([ids], SamplingParams(temperature=0, max_tokens=40, logprobs=2, prompt_logprobs=0))
    (unary,) = stub.Generate(request(ids, logprobs=2, prompt_logprobs=0))
    *chunks, last = [r for r in stub.Generate(request(ids, stream=True, logprobs=2, prompt_logprobs=0))]
    whole, end = unary.complete, last.complete
    assert tuple(whole.output_ids) == offline.outputs[0].token_ids == tuple(end.output_ids)
    assert [t for c in chunks for t in c.chunk.token_ids] == list(whole.output_ids) and len(chunks) > 20
    assert (whole.finish_reason, whole.prompt_tokens, whole.completion_tokens) == ("length", len(ids), 40)
    assert sum(c.chunk.completion_tokens for c in chunks) == 40 and whole.WhichOneof("matched_stop") is None
    expected = [p.logprob for p in offline.outputs[0].logprobs]
    assert list(whole.output_logprobs.token_logprobs) == pytest.approx(expected, abs=1e-4)
    assert [x for c in chunks for x in c.chunk.output_logprobs.token_logprobs] == list(whole.output_logprobs.token_logprobs)
    assert [len(t.values) for t in whole.output_logprobs.top_logprobs] == [2] * 40
    assert list(whole.input_logprobs.token_ids) == ids and not whole.input_logprobs.token_logprobs[0].HasField("value")
    assert [e.value for e in whole.input_logprobs.token_logprobs[1:]] == pytest.approx([p.logprob for p in offline.prompt_logprobs])
    assert chunks[0].chunk.input_logprobs == whole.input_logprobs and not chunks[1].chunk.HasField("input_logprobs")
    until(server.is_free)


def test_health_and_info(server: Server, stub: Any, channel: grpc.Channel) -> None:
    assert stub.HealthCheck(pb.HealthCheckRequest()) == pb.HealthCheckResponse(healthy=True, message="ready")
    info = stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.served_model_name, info.max_context_length, info.vocab_size) == ("stories", 128, 512)
    assert info.architectures == ["LlamaForCausalLM"] and info.bos_token_id == 1 and info.max_req_input_len == 127
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "vllm.grpc.engine.VllmEngine"):
        until(lambda name=name: health.Check(health_pb2.HealthCheckRequest(service=name)).status == 1)
