"""Calls that are no calls: messages that are no protobuf, and errors that must not be too large for the headers they travel in."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from loopback import Server, until
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub

SERVICE = "pagedjax.v1.Inference"


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as made:
        yield made


def reason_of(error: Any) -> str:
    info = error_details_pb2.ErrorInfo()
    rpc_status.from_call(error).details[0].Unpack(info)
    return info.reason


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", b"\x0b" * 200])
@pytest.mark.parametrize(
    "method",
    [
        "unary pagedjax.v1.Inference/Generate",
        "stream pagedjax.v1.Inference/GenerateStream",
        "stream vllm.grpc.engine.VllmEngine/Generate",
        "unary grpc.health.v1.Health/Check",
    ],
)
def test_messages_that_are_no_protobuf(channel: grpc.Channel, method: str, data: bytes) -> None:
    kind, _, name = method.partition(" ")
    with pytest.raises(
        grpc.RpcError, match="a message must be protobuf of its method's type; got [0-9]+ bytes that are not"
    ) as caught:
        call: Any = channel.unary_unary(f"/{name}")(data) if kind == "unary" else list(channel.unary_stream(f"/{name}")(data))
        assert call is None
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and reason_of(caught.value) == "INVALID_ARGUMENT"


def test_a_stream_of_messages_that_are_no_protobuf(channel: grpc.Channel) -> None:
    """Up to the first of them it is answered."""
    name = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    answers = channel.stream_stream(name)(iter([b"\x3a\x01a", b"\xff\xff"]))
    assert SERVICE.encode() in next(answers)
    with pytest.raises(grpc.RpcError, match="a message must be protobuf"):
        next(answers)


def test_long_messages_of_errors_arrive(channel: grpc.Channel) -> None:
    """They are in two headers, which together must not be larger than a client takes."""
    for name in ("x" * 9000, "\U0001f600" * 5000, "\n" * 9000):
        asked = pb.GenerateRequest(prompts=[pb.Prompt(text="a")], model=name)
        with pytest.raises(grpc.RpcError, match="the model served here is 'stories'") as caught:
            InferenceStub(channel).Generate(asked)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND and reason_of(caught.value) == "MODEL_NOT_FOUND"


def test_ids_that_no_header_can_hold(server: Server, channel: grpc.Channel) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    for name in ("é", "🙂", "a\0b"):
        with pytest.raises(grpc.RpcError, match="a request id must be at most 256 printable ASCII characters") as caught:
            list(stub.Generate(vllm.GenerateRequest(request_id=name, text="a")))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    (answer,) = stub.Generate(vllm.GenerateRequest(request_id="a b~", text="a", sampling_params=vllm.SamplingParams(max_tokens=1)))
    assert answer.complete.completion_tokens == 1
    until(server.is_free)


@pytest.mark.parametrize("name", ["min_tokens", "max_tokens", "top_k"])
def test_numbers_that_the_device_cannot_hold(server: Server, channel: grpc.Channel, name: str) -> None:
    """Taken, they would end the engine's thread."""
    asked = pb.GenerateRequest(prompts=[pb.Prompt(text="a")], params=pb.SamplingParams(**{name: 2**32 - 1}))
    with pytest.raises(grpc.RpcError, match=f"{name} must be below 2"):
        InferenceStub(channel).Generate(asked)
    most = pb.SamplingParams(**{"max_tokens": 2**30 - 1, name: 2**30 - 1})
    answer = InferenceStub(channel).Generate(pb.GenerateRequest(prompts=[pb.Prompt(text="a")], params=most))
    assert answer.completions[0].samples[0].token_ids
    until(server.is_free)


def test_a_crowd_before_a_busy_event_loop_is_answered(server: Server, channel: grpc.Channel) -> None:
    """By default gRPC ends a part of it with CANCELLED."""
    gate = threading.Event()
    server.event_loop.call_soon_threadsafe(gate.wait, 60)
    try:
        ask: Any = health_pb2_grpc.HealthStub(channel).Check
        answers = [ask.future(health_pb2.HealthCheckRequest(service=SERVICE)) for _ in range(2500)]
        time.sleep(0.5)  # those that are still on their way would make it easier, not harder
    finally:
        gate.set()
    assert {answer.result().status for answer in answers} == {health_pb2.HealthCheckResponse.SERVING}


def test_a_watcher_that_leaves_takes_no_other_along(server: Server) -> None:
    """Of one name; whoever stays hears of the end."""
    asked, statuses = health_pb2.HealthCheckRequest(service=SERVICE), health_pb2.HealthCheckResponse
    channels = [grpc.insecure_channel(server.address) for _ in range(2)]
    first, second = (health_pb2_grpc.HealthStub(channel).Watch(asked, timeout=60) for channel in channels)
    assert next(first).status == next(second).status == statuses.SERVING
    unknown = health_pb2_grpc.HealthStub(channels[0]).Watch(health_pb2.HealthCheckRequest(service="x"))
    assert next(unknown).status == statuses.SERVICE_UNKNOWN
    with pytest.raises(grpc.RpcError, match="there is no service of this name here") as caught:
        health_pb2_grpc.HealthStub(channels[0]).Check(health_pb2.HealthCheckRequest(service="x"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    channels[0].close()
    server.call(server.frontend.drain)
    assert next(second).status == statuses.NOT_SERVING
    channels[1].close()
