"""What goes wrong on a real port: overload, slow readers, large messages, a model that is not there, a step that hangs or fails."""

import contextlib
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from loopback import SMALL, STORIES, serving, until
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from pagedjax import LLM, SamplingParams
from serving.limits import Limits
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def request(text: str = "Once", **params: Any) -> Any:
    return pb.GenerateRequest(prompts=[pb.Prompt(text=text)], params=pb.SamplingParams(**{"temperature": 0, **params}))


def details(error: grpc.RpcError, *kinds: Any) -> list[Any]:
    """The details of these kinds, in order."""
    found = []
    for kind in kinds:
        (packed,) = [d for d in rpc_status.from_call(error).details if d.Is(kind.DESCRIPTOR)]
        value = kind()
        packed.Unpack(value)
        found.append(value)
    return found


def test_overload_says_when_to_come_back(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    with serving(llm) as server, grpc.insecure_channel(server.address) as channel, server.slow_steps(0.02):
        stub, most = InferenceStub(channel), scheduler.max_queued
        scheduler.max_queued = 1
        try:
            open_ones = []
            for count in range(1, 5):
                open_ones.append(stub.GenerateStream(request(max_tokens=100, ignore_eos=True)))
                until(lambda count=count: server.frontend.load.running == count)
            waiting = stub.GenerateStream(request(max_tokens=4))
            until(lambda: server.frontend.load.waiting == 1)
            with pytest.raises(grpc.RpcError, match="the queue may hold 1 sequences; 1 wait, 1 more came") as caught:
                stub.Generate(request(max_tokens=4))
        finally:
            scheduler.max_queued = most
        error = caught.value
        retry, quota, info = details(
            error, error_details_pb2.RetryInfo, error_details_pb2.QuotaFailure, error_details_pb2.ErrorInfo
        )
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and info.reason == "QUEUE_FULL"
        assert retry.retry_delay.ToMilliseconds() > 0 and quota.violations[0].subject == "queue_full"
        pushback = int(dict(error.trailing_metadata())["grpc-retry-pushback-ms"])
        assert abs(pushback - retry.retry_delay.ToMilliseconds()) <= 1
        for answer in open_ones:
            answer.cancel()
        assert "".join(s.text for m in waiting for s in m.samples)  # it was taken, and is served
        until(server.is_free)


def test_too_many_streams(llm: LLM) -> None:
    with serving(llm, limits=Limits(max_streams=1)) as server, grpc.insecure_channel(server.address) as channel:
        stub = InferenceStub(channel)
        with server.slow_steps(0.02):
            first = stub.GenerateStream(request(max_tokens=100, ignore_eos=True))
            next(first)
            with pytest.raises(grpc.RpcError, match="1 requests are open, which is as many as there may be") as caught:
                stub.Generate(request())
            (info,) = details(caught.value, error_details_pb2.ErrorInfo)
            assert info.reason == "TOO_MANY_STREAMS"
            first.cancel()
            until(server.is_free)
        assert stub.Generate(request(max_tokens=4)).completions


def test_messages_that_are_too_large(llm: LLM) -> None:
    with serving(llm, limits=Limits(max_message_bytes=1000)) as server, grpc.insecure_channel(server.address) as channel:
        with pytest.raises(grpc.RpcError, match="eceived message larger than max") as caught:
            InferenceStub(channel).Generate(request("x" * 2000))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert InferenceStub(channel).Generate(request(max_tokens=2)).completions


def test_slow_readers_hold_up_nobody(llm: LLM) -> None:
    """Clients that take one message and no more: another's answer is what it always is, and the engine is done with all of them
    while they still do not read. Then they get every token."""
    asked = request(n=4, temperature=1.0, seed=1, max_tokens=120, ignore_eos=True, logprobs=20)
    with serving(llm) as server, contextlib.ExitStack() as stack:
        channels = [stack.enter_context(grpc.insecure_channel(server.address)) for _ in range(5)]
        slow = [InferenceStub(channel).GenerateStream(asked) for channel in channels[1:]]
        first = [next(answers) for answers in slow]
        text = InferenceStub(channels[0]).Generate(request(max_tokens=60)).completions[0].samples[0].text
        assert text == llm.generate("Once", SamplingParams(temperature=0, max_tokens=60))[0].outputs[0].text
        until(lambda: not llm.engine.has_work())
        for message, answers in zip(first, slow, strict=True):
            assert sum(len(s.token_ids) for m in (message, *answers) for s in m.samples) == 4 * 120
        until(server.is_free)


def test_a_server_without_a_model_yet() -> None:
    with serving(None) as server, grpc.insecure_channel(server.address) as channel:
        health, engine = health_pb2_grpc.HealthStub(channel), vllm_engine_pb2_grpc.VllmEngineStub(channel)
        names = ("", "vllm.grpc.engine.VllmEngine")
        until(lambda: health.Check(health_pb2.HealthCheckRequest()).status == SERVING)
        assert [health.Check(health_pb2.HealthCheckRequest(service=n)).status for n in names] == [SERVING, NOT_SERVING]
        assert engine.HealthCheck(vllm.HealthCheckRequest()) == vllm.HealthCheckResponse(healthy=False, message="starting")
        for ask in (lambda: InferenceStub(channel).Generate(request()), lambda: engine.GetModelInfo(vllm.GetModelInfoRequest())):
            with pytest.raises(grpc.RpcError, match="the model is being loaded") as caught:
                ask()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_health_and_loads_while_a_step_hangs(llm: LLM) -> None:
    with serving(llm, wedged_seconds=0.1) as server, grpc.insecure_channel(server.address) as channel:
        engine, health = vllm_engine_pb2_grpc.VllmEngineStub(channel), health_pb2_grpc.HealthStub(channel)
        with server.held_steps():
            answers = InferenceStub(channel).GenerateStream(request(max_tokens=2))
            until(lambda: health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING)
            assert engine.HealthCheck(vllm.HealthCheckRequest()).message == "a step hangs"
            assert engine.GetLoads(vllm.GetLoadsRequest()).loads[0].num_waiting_reqs == 1
            ready = health.Check(health_pb2.HealthCheckRequest(service="pagedjax.v1.Inference"))
            assert ready.status == SERVING, "to be restarted is another thing than to be left out"
        list(answers)
        until(lambda: health.Check(health_pb2.HealthCheckRequest()).status == SERVING)


def test_a_failing_step(compile_cache: str) -> None:
    """Open requests end with INTERNAL, health turns, and new ones are told to go elsewhere."""
    with (
        LLM(STORIES, **SMALL, compile_cache=compile_cache) as own,
        serving(own) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        engine, health = vllm_engine_pb2_grpc.VllmEngineStub(channel), health_pb2_grpc.HealthStub(channel)
        watched = health.Watch(health_pb2.HealthCheckRequest(service="vllm.grpc.engine.VllmEngine"))
        until(lambda: health.Check(health_pb2.HealthCheckRequest(service="pagedjax.v1.Admin")).status == SERVING)
        with server.slow_steps(0.02):
            answers = InferenceStub(channel).GenerateStream(request(max_tokens=100))
            next(answers)

            def fail() -> None:
                raise OSError("the device went away")

            own.engine.step = fail
            with pytest.raises(grpc.RpcError, match="the engine stopped after an error") as caught:
                list(answers)
        assert caught.value.code() is grpc.StatusCode.INTERNAL and "device" not in caught.value.details()
        while next(watched).status != NOT_SERVING:
            pass
        until(lambda: health.Check(health_pb2.HealthCheckRequest()).status == NOT_SERVING)
        assert engine.HealthCheck(vllm.HealthCheckRequest()).message == "failed"
        with pytest.raises(grpc.RpcError, match="the engine has stopped") as caught:
            InferenceStub(channel).Generate(request())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(server.frontend.failure, OSError)
        watched.cancel()
