"""Spans of requests for OpenTelemetry (the extra otel), sent to a collector by OTLP over gRPC.

A request is one span, in the client's trace where it names one, and its phases are spans below: prepare (limits, tokenizing),
queue, prefill and decode. They are made when the request is over. Spans wait in a bounded queue, of which the oldest are dropped
when it is full, and a thread of its own sends them: neither the engine nor an answer ever waits for the collector. Attributes have
the names of the semantic conventions for generative AI, and of vLLM's spans where these have none.
"""

import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from serving.call import Call
from serving.events import Ended, Event, Refused
from serving.frontend import VERSION
from serving.trace_context import TraceContext

FLUSH_SECONDS = 5.0  # that the end of the process waits for spans to be sent
QUEUED_SPANS = 8192  # that may wait: those of some 1600 requests
LONGEST = 1000  # characters of an attribute, which may repeat what a client sent
NOT_AN_END = ("cancelled", "deadline", "constraint")  # finishes that are errors


class Spans:
    """An observer of a Frontend, by `observe`; to be closed."""

    def __init__(self, endpoint: str, model: str, *, queued: int = QUEUED_SPANS, every: float = 1.0):
        """`model`: as clients call it. `queued`: spans that may wait; `every`: seconds after which they are sent. What else OTLP's
        exporter knows (headers, certificates, sampling, attributes of the resource) is set by OpenTelemetry's own environment
        variables."""
        self._model = model
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        resource = Resource.create({SERVICE_NAME: "pagedjax", SERVICE_VERSION: VERSION}).merge(OTELResourceDetector().detect())
        limits = SpanLimits(max_span_attribute_length=LONGEST)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, span_limits=limits)
        batch = min(512, queued)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, queued, every * 1000, batch))
        self._tracer = self._provider.get_tracer("pagedjax", VERSION)

    def observe(self, event: Event) -> None:
        match event:
            case Refused(call=Call() as call):
                self._refused(event, call)
            case Ended():
                self._ended(event)

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Sends what waits. What has not left after so many seconds is given up."""
        flushing = threading.Thread(target=self._provider.shutdown, name="spans", daemon=True)
        flushing.start()
        flushing.join(seconds)
        if flushing.is_alive():
            self._exporter.shutdown()

    def _refused(self, event: Refused, call: Call) -> None:
        now = time.time_ns()
        span = self._begin(call, now - _ns(event.seconds))
        _fail(span, event.refusal.code)
        span.end(now)

    def _ended(self, event: Ended) -> None:
        now = time.time_ns()
        handed_over = now - _ns(event.seconds)
        span = self._begin(event.call, handed_over - _ns(event.prepared))
        span.set_attributes(_answer(event))
        failed = [finish for finish in event.finishes if finish in NOT_AN_END]
        if event.refusal is not None or failed:
            _fail(span, failed[0] if event.refusal is None else event.refusal.code)
        below = set_span_in_context(span)
        for name, begin, end in _phases(event):
            child = self._tracer.start_span(name, below, start_time=handed_over + _ns(begin))
            child.end(handed_over + _ns(end))
        span.end(now)

    def _begin(self, call: Call, start: int) -> Span:
        return self._tracer.start_span(
            f"{call.operation} {self._model}",
            _parent(call.trace),
            kind=SpanKind.SERVER,
            attributes=_question(call, self._model),
            start_time=start,
        )


def _parent(trace: TraceContext) -> Context:
    """An empty one where the client's is none, or not as W3C has it."""
    given = {"traceparent": trace.traceparent, "tracestate": trace.tracestate}
    return TraceContextTextMapPropagator().extract({name: value for name, value in given.items() if value}, Context())


def _fail(span: Span, code: str) -> None:
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR, code))


def _question(call: Call, model: str) -> dict[str, Any]:
    params, caller = call.params, call.caller
    told: dict[str, Any] = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": "pagedjax",
        "gen_ai.request.model": call.model or model,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.stream": call.streams,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.top_k": params.top_k or None,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.response.id": call.request_id,
        "pagedjax.header_id": call.header_id or None,
        "pagedjax.tenant": caller.tenant or None,
        "pagedjax.key": caller.name or None,
    }
    return _known(told)


def _answer(event: Ended) -> dict[str, Any]:
    first, waited = event.first_token, _waited(event)
    told: dict[str, Any] = {
        "gen_ai.response.finish_reasons": list(event.finishes) or None,
        "gen_ai.usage.input_tokens": len(event.request.prompt),
        "gen_ai.usage.output_tokens": event.tokens,
        "gen_ai.usage.cache_read.input_tokens": min((usage.cached for usage in event.usages), default=None),
        "gen_ai.latency.time_in_queue": waited,
        "gen_ai.latency.time_to_first_token": None if first is None else event.prepared + first,
        "gen_ai.latency.time_in_model_prefill": None if first is None or waited is None else max(0.0, first - waited),
        "gen_ai.latency.time_in_model_decode": None if first is None else event.seconds - first,
        "gen_ai.latency.e2e": event.prepared + event.seconds,
    }
    return _known(told)


def _known(told: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in told.items() if value is not None}


def _waited(event: Ended) -> float | None:
    """Seconds in the queue; None where no sequence came to its end, which alone has it."""
    return min((usage.waited for usage in event.usages), default=None)


def _phases(event: Ended) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end), in seconds after the engine got the request; those that are known."""
    yield "prepare", -event.prepared, 0.0
    first, waited = event.first_token, _waited(event)
    if waited is not None:
        yield "queue", 0.0, min(waited, event.seconds)
        if first is not None:
            yield "prefill", min(waited, first), first
    if first is not None:
        yield "decode", first, event.seconds


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
