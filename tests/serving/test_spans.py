"""Spans of requests, as a collector gets them: in the client's trace, with what happened to them, and in nobody's way."""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import httpx
import pytest
from collector import Collector, attributes, collecting
from loopback import Server, serving, until
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from pagedjax import LLM, SamplingParams
from pagedjax.commands.serve import tracing
from pagedjax.errors import UserError
from serving.auth import Caller, Keys
from serving.call import Call
from serving.config import ServeConfig
from serving.errors import Refusal
from serving.events import Refused
from serving.http.app import open_http
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub
from serving.spans import Spans

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT, TRACESTATE = f"00-{TRACE}-{PARENT}-01", "vendor=a,other=b"
METADATA = (("traceparent", TRACEPARENT), ("tracestate", "vendor=a"), ("tracestate", "other=b"))
PHASES = ["prepare", "queue", "prefill", "decode"]
REFUSED = Refused(Caller(), Refusal("queue_full", "there is no room"), {}, Call("a", SamplingParams()), 0.25)


@dataclass
class Traced:
    """A server with both ports, whose spans go to a collector of the test's own."""

    server: Server
    channel: grpc.Channel
    http: httpx.Client

    @property
    def inference(self) -> Any:
        return InferenceStub(self.channel)


@pytest.fixture(scope="module")
def both(llm: LLM) -> Iterator[Traced]:
    with serving(llm, http_port=0) as server, grpc.insecure_channel(server.address) as channel:
        listener = asyncio.run_coroutine_threadsafe(open_http(server.frontend, Keys()), server.event_loop).result(30)
        server.listeners.append(listener)  # pyright: ignore[reportArgumentType]
        with httpx.Client(base_url=f"http://{listener.address}", timeout=60, trust_env=False) as http:
            yield Traced(server, channel, http)


@pytest.fixture
def collector(both: Traced) -> Iterator[Collector]:
    observers = both.server.frontend.observers
    with collecting() as collector:
        spans = Spans(collector.endpoint, "stories", every=0.02)
        observers.append(spans.observe)
        yield collector
        until(both.server.is_free)
        observers.remove(spans.observe)
        spans.close()


def asked(text: str = "Once", **params: Any) -> Any:
    given = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, **params}
    return pb.GenerateRequest(prompts=[pb.Prompt(text=text)], params=pb.SamplingParams(**given))


def check_phases(collector: Collector, span: Any) -> None:
    """They follow each other without a gap, from the begin of the request to its end."""
    below = sorted(collector.below(span), key=lambda child: child.start_time_unix_nano)
    assert [child.name for child in below] == PHASES and {child.trace_id for child in below} == {span.trace_id}
    starts = [*(child.start_time_unix_nano for child in below), span.end_time_unix_nano]
    ends = [span.start_time_unix_nano, *(child.end_time_unix_nano for child in below)]
    assert [abs(start - end) <= 2 for start, end in zip(starts, ends, strict=True)] == [True] * 5
    assert sorted(starts) == starts and starts[-1] > starts[0]


def test_a_grpc_request_is_a_span_in_the_clients_trace(both: Traced, collector: Collector) -> None:
    answer = both.inference.Generate(asked(n=2, temperature=0.5, seed=1), metadata=METADATA).completions[0]
    (span,) = collector.request_spans(1)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, TRACESTATE)
    assert (span.name, span.status.code) == ("text_completion stories", span.status.STATUS_CODE_UNSET)
    about = attributes(span)
    latency = {name: about.pop(name) for name in list(about) if name.startswith("gen_ai.latency.")}
    assert about == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pagedjax",
        "gen_ai.request.model": "stories",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 12,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": answer.request_id,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.input_tokens": len(answer.prompt_token_ids),
        "gen_ai.usage.output_tokens": 24,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }
    names = ("time_to_first_token", "time_in_model_decode", "e2e", "time_in_queue", "time_in_model_prefill")
    first, decode, whole, queue, prefill = (latency.pop(f"gen_ai.latency.{name}") for name in names)
    assert whole == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9)
    assert whole == pytest.approx(first + decode) and first > queue + prefill > 0 and queue >= 0 and not latency
    check_phases(collector, span)
    assert collector.resources[0]["service.name"] == "pagedjax"


def test_a_gateways_request_is_one_too(both: Traced, collector: Collector) -> None:
    params = vllm.SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    request = vllm.GenerateRequest(request_id="ours", text="Once", sampling_params=params, stream=True)
    list(vllm_engine_pb2_grpc.VllmEngineStub(both.channel).Generate(request, metadata=METADATA))
    (span,) = collector.request_spans(1)
    about = attributes(span)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert (about["gen_ai.response.id"], about["gen_ai.request.stream"], about["gen_ai.usage.output_tokens"]) == ("ours", True, 4)


@pytest.mark.parametrize("stream", [False, True])
def test_an_http_request_is_a_span_in_the_clients_trace(both: Traced, collector: Collector, stream: bool) -> None:
    body = {"prompt": "Once upon", "temperature": 0, "max_tokens": 8, "ignore_eos": True, "stream": stream}
    headers = {"Traceparent": TRACEPARENT, "Tracestate": TRACESTATE, "x-request-id": "mine", "x-tenant": "a"}
    assert both.http.post("/v1/completions", json=body, headers=headers).status_code == 200
    (span,) = collector.request_spans(1)
    about = attributes(span)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, PARENT, TRACESTATE)
    assert (about["gen_ai.request.stream"], about["pagedjax.header_id"], about["pagedjax.tenant"]) == (stream, "mine", "a")
    assert about["gen_ai.response.id"].startswith("cmpl-") and about["gen_ai.usage.output_tokens"] == 8
    check_phases(collector, span)


@pytest.mark.parametrize("given", [(), (("traceparent", f"00-{TRACE}"),), (("traceparent", f"00-{TRACE}-{'0' * 16}-01"),)])
def test_without_a_trace_context_each_request_has_a_trace_of_its_own(both: Traced, collector: Collector, given: Any) -> None:
    for _ in range(2):
        both.inference.Generate(asked(max_tokens=2), metadata=given)
    spans = collector.request_spans(2)
    assert [span.parent_span_id for span in spans] == [b"", b""]
    assert len({span.trace_id for span in spans} | {bytes.fromhex(TRACE)}) == 3


def test_a_client_that_does_not_sample_has_no_spans(both: Traced, collector: Collector) -> None:
    both.inference.Generate(asked(max_tokens=2), metadata=(("traceparent", f"00-{TRACE}-{PARENT}-00"),))
    both.inference.Generate(asked(max_tokens=3), metadata=METADATA)
    (span,) = collector.request_spans(1)
    assert attributes(span)["gen_ai.request.max_tokens"] == 3


def error_of(span: Any) -> tuple[bool, str, str]:
    return span.status.code == span.status.STATUS_CODE_ERROR, span.status.message, attributes(span).get("error.type", "")


def test_a_cancelled_request_is_an_error(both: Traced, collector: Collector) -> None:
    with both.server.slow_steps(0.01):
        answers = both.inference.GenerateStream(asked(max_tokens=100), metadata=METADATA)
        next(answers)
        answers.cancel()
        (span,) = collector.request_spans(1)
    assert error_of(span) == (True, "cancelled", "cancelled") and span.trace_id.hex() == TRACE
    assert attributes(span)["gen_ai.usage.output_tokens"] >= 1 and "gen_ai.response.finish_reasons" not in attributes(span)
    assert {child.name for child in collector.below(span)} == {"prepare", "decode"}


def test_an_aborted_request_is_an_error(both: Traced, collector: Collector) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(both.channel)
    params = vllm.SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with both.server.slow_steps(0.01):
        answers = stub.Generate(vllm.GenerateRequest(request_id="ours", text="Once", sampling_params=params, stream=True))
        next(answers)
        stub.Abort(vllm.AbortRequest(request_ids=["ours"]))
        list(answers)
    (span,) = collector.request_spans(1)
    assert error_of(span) == (True, "cancelled", "cancelled")
    assert attributes(span)["gen_ai.response.finish_reasons"] == ["cancelled"]


def test_a_refused_request_is_an_error(both: Traced, collector: Collector) -> None:
    with pytest.raises(grpc.RpcError):
        both.inference.Generate(asked("a " * 400), metadata=METADATA)
    assert both.http.post("/v1/completions", json={"prompt": "a " * 400}, headers={"traceparent": TRACEPARENT}).status_code == 400
    both.inference.Generate(asked(max_tokens=2), metadata=METADATA)
    *refused, served = collector.request_spans(3)
    for span in refused:
        assert error_of(span) == (True, "prompt_too_long", "prompt_too_long")
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT) and not collector.below(span)
        assert span.end_time_unix_nano > span.start_time_unix_nano
    assert error_of(served) == (False, "", "")


def test_a_collector_that_hangs_holds_up_nobody(both: Traced) -> None:
    """Requests are answered, what waits is bounded, and the end does not wait for it."""
    observers = both.server.frontend.observers
    with collecting() as collector:
        collector.gate.clear()
        spans = Spans(collector.endpoint, "stories", queued=8, every=0.02)
        observers.append(spans.observe)
        both.inference.Generate(asked(max_tokens=2))
        assert collector.asked.wait(60)
        for _ in range(8):
            both.inference.Generate(asked(max_tokens=2))
        observers.remove(spans.observe)
        assert not collector.spans
        spans.close(0.2)
        assert not collector.gate.is_set()
        collector.gate.set()
        until(lambda: bool(collector.spans))
    assert len(collector.spans) <= 8  # of nine requests with five spans each


def test_the_flag_makes_spans_and_the_end_sends_them() -> None:
    with collecting() as collector:
        with tracing(ServeConfig(otlp_traces_endpoint=collector.endpoint), "stories") as observers:
            for observe in observers:
                observe(REFUSED)
        (span,) = collector.request_spans(1)
    assert error_of(span) == (True, "queue_full", "queue_full") and attributes(span)["gen_ai.request.model"] == "stories"
    assert span.end_time_unix_nano - span.start_time_unix_nano == 250_000_000
    with tracing(ServeConfig(), "stories") as observers:
        assert observers == []


def test_what_a_client_sends_is_cut() -> None:
    call = Call("a", SamplingParams(), request_id="i" * 5000, model="m" * 5000)
    with collecting() as collector:
        spans = Spans(collector.endpoint, "stories")
        spans.observe(Refused(Caller(), Refusal("model_not_found", "another one"), call.ids, call))
        spans.close()
        (span,) = collector.request_spans(1)
    assert attributes(span)["gen_ai.request.model"] == "m" * 1000 and call.ids == {"request_id": "i" * 256}


def test_the_flag_without_the_extra_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "serving.spans")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = ServeConfig(otlp_traces_endpoint="http://127.0.0.1:4317")
    with (
        pytest.raises(UserError, match="must go with the extra otel .* got http://127.0.0.1:4317 and no module opentelemetry.sdk"),
        tracing(config, "stories"),
    ):
        pass


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "grpc://127.0.0.1:4317", "http://a:4317/v1/traces", "http://"])
def test_an_endpoint_is_a_url_without_a_path(endpoint: str) -> None:
    with pytest.raises(UserError, match="otlp_traces_endpoint must be http://HOST:PORT or https://HOST:PORT; got"):
        ServeConfig(otlp_traces_endpoint=endpoint)
