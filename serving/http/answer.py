"""How an answer leaves: whole or as a stream, and not at all when nobody waits for it any more."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serving.http.failures import Failure, failure
from serving.http.shapes import event, to_json

STREAM_HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


class Answer(Response):
    """Does the work while it watches the connection: when the client goes, the work is cancelled at the await it is in.

    Nothing is sent before the work has something, so that what fails until then has a status of its own. What fails later is one
    last event of the stream.
    """

    def __init__(self, work: Callable[[], Awaitable[Any]] | AsyncGenerator[bytes], headers: Mapping[str, str]):
        """`work`: the body of a JSON answer, or the events of a stream."""
        super().__init__()
        self._work, self._headers = work, headers
        self._ids = {"header_id": headers.get("x-request-id", "")}  # for the log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(
            self._events(self._work, send) if isinstance(self._work, AsyncGenerator) else self._whole(self._work, send)
        )
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, gone):
                task.cancel()
            await asyncio.wait((work, gone))
        if not work.cancelled():
            work.result()

    async def _whole(self, work: Callable[[], Awaitable[Any]], send: Send) -> None:
        try:
            body, status, headers = to_json(await work()).encode(), 200, {}
        except Exception as error:
            failed = failure(error, self._ids)
            body, status, headers = to_json(failed.body).encode(), failed.status, failed.headers
        await self._json(send, status, body, headers)

    async def _json(self, send: Send, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        kind = {"content-type": "application/json", "content-length": str(len(body))}
        await _start(send, status, {**kind, **self._headers, **headers})
        await _body(send, body)

    async def _events(self, events: AsyncGenerator[bytes], send: Send) -> None:
        async with contextlib.aclosing(events):
            failed = await self._first(events, send)
            if failed is None:
                try:
                    async for piece in events:
                        await _body(send, piece, more=True)
                except Exception as error:
                    await _body(send, event(failure(error, self._ids).body), more=True)
                await _body(send, b"")
            else:
                await self._json(send, failed.status, to_json(failed.body).encode(), failed.headers)

    async def _first(self, events: AsyncGenerator[bytes], send: Send) -> Failure | None:
        try:
            piece = await anext(events)
        except Exception as error:
            return failure(error, self._ids)
        await _start(send, 200, {**STREAM_HEADERS, **self._headers})
        await _body(send, piece, more=True)
        return None


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _start(send: Send, status: int, headers: Mapping[str, str]) -> None:
    raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def _body(send: Send, body: bytes, *, more: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})
