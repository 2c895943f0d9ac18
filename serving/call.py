"""One prompt as a servicer hands it over."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pagedjax.host.request import SamplingParams
from serving.auth import Caller
from serving.trace_context import TraceContext

LONGEST_ID = 256


@dataclass(frozen=True)
class Call:
    """What a client asks for, before the engine or its limits have seen it."""

    prompt: str | Sequence[int]
    params: SamplingParams
    caller: Caller = Caller()
    request_id: str = ""  # the client's, unique among its tenant's open ones; "": made by Frontend.submit
    model: str = ""  # as the client calls it; "": whatever is served
    deadline: float | None = None  # time.monotonic() when its last token must be there
    pool: Literal["interactive", "batch"] = "interactive"
    retention: int = 0  # as in Service
    add_special: bool = True  # of a text: BOS and the like, where the model wants them
    cache_salt: str = ""  # keeps cached prefixes apart within the tenant
    shown: tuple[int, ...] = ()  # as in Request
    # What the log and traces say of it:
    trace: TraceContext = TraceContext()
    header_id: str = ""  # x-request-id of an answer over HTTP
    operation: Literal["chat", "text_completion"] = "text_completion"
    streams: bool = False  # its reader wants it piece by piece

    @property
    def ids(self) -> Mapping[str, str]:
        return known_ids(self.trace, request_id=self.request_id, header_id=self.header_id)


def known_ids(trace: TraceContext, **ids: str) -> Mapping[str, str]:
    """By what a request is found in logs and traces, here and elsewhere; those ids that it has. One that is too long to be taken
    is cut."""
    return {name: value[:LONGEST_ID] for name, value in {**ids, "trace_id": trace.trace_id}.items() if value}
