"""What every endpoint has at hand, and what the headers of a request say."""

import asyncio
import contextlib
import math
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from fastapi import Depends, Request

from pagedjax.errors import UserError, check
from pagedjax.host.request import SamplingParams
from serving.auth import Caller, Keys, authenticate
from serving.call import Call, known_ids
from serving.errors import Refusal
from serving.frontend import Frontend
from serving.http.traffic import Traffic
from serving.metrics import Requests, Snapshot, snapshot
from serving.trace_context import TraceContext, trace_context

PATIENCE = 2.0  # seconds that a scrape waits for the engine's thread, which may be in a long step


@dataclass
class Site:
    """One for each app."""

    frontend: Frontend
    keys: Keys
    requests: Requests
    traffic: Traffic
    _asking: "asyncio.Task[Snapshot] | None" = field(default=None, repr=False)

    async def snapshot(self) -> Snapshot | None:
        """The engine's counters, asked for once for all who wait; None where it does not answer in time, or there is no engine."""
        try:
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self.frontend.llm.loop.call_async(snapshot))
            return await asyncio.wait_for(asyncio.shield(self._asking), PATIENCE)
        except (TimeoutError, RuntimeError, Refusal):
            return None


@dataclass(frozen=True)
class Asked:
    """Who sends a request, and what its headers ask for."""

    site: Site
    caller: Caller
    deadline: float | None  # time.monotonic()
    trace: TraceContext
    header_id: str  # x-request-id, the client's or one of ours
    headers: Mapping[str, str]  # of the answer

    @property
    def frontend(self) -> Frontend:
        return self.site.frontend

    def reading(self) -> contextlib.AbstractContextManager[None]:
        """As of Frontend, for what makes calls of a body."""
        return self.frontend.reading(self.caller, known_ids(self.trace, header_id=self.header_id))

    def check_model(self, model: str | None) -> None:
        """None is whatever is served."""
        served = self.frontend.model_name
        if model not in (None, served):
            raise Refusal("model_not_found", f"the model served here is {served!r}; got {model!r:.200}", param="model")

    @property
    def defaults(self) -> Mapping[str, Any]:
        """What the model's makers recommend, by the names of SamplingParams."""
        return self.frontend.llm.defaults.sampling()

    def call(self, prompt: str | Sequence[int], params: SamplingParams, request_id: str, **more: Any) -> Call:
        """`more`: further fields of Call."""
        about = {"trace": self.trace, "header_id": self.header_id}
        return Call(prompt, params, self.caller, request_id, deadline=self.deadline, **about, **more)


def get_site(request: Request) -> Site:
    return request.app.state.site


def get_caller(request: Request) -> Caller:
    headers = request.headers
    credentials = [*headers.getlist("authorization"), *headers.getlist("x-api-key")]
    return authenticate(get_site(request).keys, credentials, headers.get("x-tenant", ""), headers.get("x-priority", ""))


def get_asked(request: Request, caller: Annotated[Caller, Depends(get_caller)]) -> Asked:
    given = request.headers.get("x-request-id", "")
    check(len(given) <= 256 and given.isprintable(), "x-request-id must be at most 256 printable characters")
    own = given or uuid.uuid4().hex
    where = trace_context(request.headers.items())
    return Asked(get_site(request), caller, _deadline(request), where, own, {"x-request-id": own})


def _deadline(request: Request) -> float | None:
    """Of the header x-request-timeout: seconds until the last token must be there."""
    text = request.headers.get("x-request-timeout")
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        raise UserError(f"x-request-timeout must be seconds; got {text[:80]!r}") from None
    check(0 < seconds < math.inf, f"x-request-timeout must be positive seconds; got {text[:80]}")
    return time.monotonic() + seconds


FromClient = Annotated[Asked, Depends(get_asked)]
OfSite = Annotated[Site, Depends(get_site)]
Known = Annotated[Caller, Depends(get_caller)]
