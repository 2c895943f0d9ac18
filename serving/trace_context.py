"""Where in its own trace a client sends a request from, by W3C's trace context."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")


@dataclass(frozen=True)
class TraceContext:
    """As headers or metadata have it; "" where they say nothing."""

    traceparent: str = ""  # version-traceid-parentid-flags
    tracestate: str = ""

    @property
    def trace_id(self) -> str:
        """For the log; "" where there is none."""
        found = TRACEPARENT.fullmatch(self.traceparent)
        return found[1] if found else ""


def trace_context(given: Iterable[tuple[str, str | bytes]]) -> TraceContext:
    """Of all (name, value) pairs that came with a request, names in lower case. States that came in several belong together."""
    found: dict[str, list[str]] = {"traceparent": [], "tracestate": []}
    for name, value in given:
        if name in found and isinstance(value, str):
            found[name].append(value)
    return TraceContext(next(iter(found["traceparent"]), ""), ",".join(found["tracestate"]))
