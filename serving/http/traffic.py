"""How HTTP requests were answered, and how long that took, under the names that FastAPI's usual instrumentation gives them."""

import time
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.host.histogram import Histogram
from serving.metrics import WHOLE_REQUEST, histogram_metric

PROBES = ("/health", "/ready", "/metrics", "/version", "/ui", "/ui/state", "/")  # asked by machines, again and again
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")  # a client may make up others: they share one label
GONE = 499  # the client left before there was an answer


class Traffic:
    """Counts what goes through `app`, but for probes."""

    def __init__(self, app: ASGIApp):
        self.app = app
        self._answered: Counter[tuple[str, str, str]] = Counter()  # by handler, method, class of status
        self._seconds: dict[tuple[str, str], Histogram] = {}  # by handler and method

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, watched)
        finally:
            self._count(scope, status, time.perf_counter() - begin)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "other"
        if handler in PROBES:
            return
        self._answered[handler, method, f"{status // 100}xx"] += 1
        self._seconds.setdefault((handler, method), Histogram(WHOLE_REQUEST)).observe(seconds)

    def metrics(self) -> Iterator[Metric]:
        family = CounterMetricFamily("http_requests", "Requests over HTTP, probes apart.", labels=["handler", "method", "status"])
        for labels, count in self._answered.items():
            family.add_metric(labels, count)
        yield family
        if self._seconds:
            series = [({"handler": handler, "method": method}, each) for (handler, method), each in self._seconds.items()]
            yield histogram_metric("http_request_duration_seconds", "Until the last byte of the answer was sent.", series)
