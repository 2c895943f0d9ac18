"""Why each request was served as it was: one list of decisions for each, kept for a while after it ended."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Decision:
    """At `time` (seconds of the scheduler's clock) this happened to one sequence of a request."""

    time: float
    index: int
    what: str  # queued, waits, admitted, chunk, found, preempted, resumed, dropped, finished
    why: dict[str, Any]


@dataclass
class Trace:
    """Decisions by request. Of ended requests the last `kept` stay."""

    kept: int = 1000
    _decisions: dict[str, list[Decision]] = field(default_factory=dict)
    _ended: dict[str, None] = field(default_factory=dict)

    def note(self, request_id: str, index: int, time: float, what: str, **why: Any) -> None:
        self._decisions.setdefault(request_id, []).append(Decision(time, index, what, why))

    def waits(self, request_id: str, index: int, time: float, reason: str) -> None:
        """Noted when the reason is another than before. What follows its semicolon is how things stood when it was noted: that
        changes with every step."""
        before = self._decisions.get(request_id)
        cause = reason.partition(";")[0]
        if not before or before[-1].what != "waits" or before[-1].why["because"].partition(";")[0] != cause:
            self.note(request_id, index, time, "waits", because=reason)

    def begin(self, request_id: str) -> None:
        """A new request, maybe with the id of one that has ended."""
        self._decisions.pop(request_id, None)
        self._ended.pop(request_id, None)

    def end(self, request_id: str) -> None:
        self._ended[request_id] = None
        while len(self._ended) > self.kept:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._decisions.pop(oldest, None)

    def of(self, request_id: str) -> tuple[Decision, ...]:
        """In order; empty for a request that is not known (any more)."""
        return tuple(self._decisions.get(request_id, ()))

    def line(self, request_id: str) -> str:
        """The same as one line of JSON."""
        return json.dumps({"request_id": request_id, "decisions": list(self._rows(request_id))})

    def _rows(self, request_id: str) -> Iterator[dict[str, Any]]:
        for decision in self.of(request_id):
            yield {"time": round(decision.time, 6), "index": decision.index, "what": decision.what, **decision.why}
