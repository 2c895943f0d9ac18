"""A collector of OpenTelemetry on loopback: takes what is sent by OTLP over gRPC, and keeps it."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from loopback import until
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`gate`: nothing is taken while it is not set."""

    endpoint: str = ""
    spans: list[Any] = field(default_factory=list)
    resources: list[dict[str, Any]] = field(default_factory=list)  # of each message
    asked: threading.Event = field(default_factory=threading.Event)  # something was sent
    gate: threading.Event = field(default_factory=threading.Event)

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        self.asked.set()
        while not self.gate.wait(0.05):
            if not context.is_active():
                break
        for group in request.resource_spans:
            self.resources.append(attributes(group.resource))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]
        return pb.ExportTraceServiceResponse()

    def request_spans(self, count: int) -> list[Any]:
        """The next spans of so many whole requests, in the order of their ends; waits for them."""
        until(lambda: len(self._requests()) >= count)
        found = self._requests()
        assert len(found) == count
        return found

    def below(self, span: Any) -> list[Any]:
        return [child for child in self.spans if child.parent_span_id == span.span_id]

    def _requests(self) -> list[Any]:
        return [span for span in self.spans if span.kind == span.SPAN_KIND_SERVER]


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that takes all it gets."""
    collector = Collector()
    collector.gate.set()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.gate.set()
        server.stop(0).wait()


def attributes(of: Any) -> dict[str, Any]:
    """As Python values, by name."""
    return {each.key: _value(each.value) for each in of.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)
