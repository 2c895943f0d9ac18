"""What stands before every method: who calls, and how what goes wrong is told."""

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from pagedjax.errors import EngineStopped, UserError
from serving.auth import Caller, Keys, authenticate
from serving.call import known_ids
from serving.errors import Refusal, refusal
from serving.frontend import Frontend
from serving.log import FIELDS, LOG
from serving.rpc import status
from serving.trace_context import TraceContext, trace_context

OPEN = ("/grpc.health.v1.Health/",)  # asked by who has no key
_caller: ContextVar[Caller] = ContextVar("caller")


def caller() -> Caller:
    """Who the call that is being served comes from."""
    return _caller.get()


def deadline(context: grpc.aio.ServicerContext) -> float | None:
    """The client's deadline, as time.monotonic()."""
    left = context.time_remaining()
    return None if left is None else time.monotonic() + left


def trace(context: grpc.aio.ServicerContext) -> TraceContext:
    """Where in the client's trace the call is."""
    return trace_context(context.invocation_metadata() or ())


class Guard(grpc.aio.ServerInterceptor):
    """Lets in who has a key, and turns a Refusal that a method raises into a status, and so a message that cannot be read."""

    def __init__(self, keys: Keys, frontend: Frontend):
        self._keys, self._frontend = keys, frontend

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        denied = None
        metadata = handler_call_details.invocation_metadata or ()
        ids = known_ids(trace_context(metadata))
        try:
            if not handler_call_details.method.startswith(OPEN):
                with self._frontend.reading(Caller(), ids):
                    _caller.set(_authenticate(self._keys, metadata))
        except Refusal as error:
            denied = error
        return _guarded(handler, denied, lambda error: self._frontend.refuse(error, Caller(), ids))


def _authenticate(keys: Keys, metadata: Any) -> Caller:
    found: dict[str, str] = {}
    for name, value in metadata:
        if name in ("authorization", "x-api-key", "x-tenant", "x-priority"):
            found.setdefault(name, value)
    credentials = (found.get("authorization", ""), found.get("x-api-key", ""))
    return authenticate(keys, credentials, found.get("x-tenant", ""), found.get("x-priority", ""))


def _reader(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """What cannot be parsed is a Refusal in the message's place: raised here it would be an unknown error, with a traceback in the
    log."""

    def read(data: bytes) -> Any:
        try:
            return parse(data)
        except DecodeError:
            return Refusal(
                "invalid_argument", f"a message must be protobuf of its method's type; got {len(data)} bytes that are not"
            )

    return read


async def _readable(requests: AsyncIterator[Any], refuse: Callable[[Refusal], None]) -> AsyncIterator[Any]:
    """The messages of a stream, up to the first that cannot be read."""
    async for request in requests:
        yield _read(request, refuse)


def _read(request: Any, refuse: Callable[[Refusal], None]) -> Any:
    if isinstance(request, Refusal):
        refuse(request)
        raise request
    return request


def _guarded(handler: Any, denied: Refusal | None, refuse: Callable[[Refusal], None]) -> Any:
    """The same method behind the guard; one that answers in a stream stays one, or the call would break. `refuse` tells observers
    of a message that cannot be read."""
    codec = {"request_deserializer": _reader(handler.request_deserializer), "response_serializer": handler.response_serializer}
    if handler.response_streaming:
        inner = handler.stream_stream if handler.request_streaming else handler.unary_stream

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            try:
                if denied is not None:
                    raise denied
                request = _readable(request, refuse) if handler.request_streaming else _read(request, refuse)
                async with contextlib.aclosing(inner(request, context)) as answers:
                    async for answer in answers:
                        yield answer
            except Exception as error:
                await _tell(context, error)

        make = grpc.stream_stream_rpc_method_handler if handler.request_streaming else grpc.unary_stream_rpc_method_handler
        return make(stream, **codec)
    inner = handler.stream_unary if handler.request_streaming else handler.unary_unary

    async def single(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            if denied is not None:
                raise denied
            request = _readable(request, refuse) if handler.request_streaming else _read(request, refuse)
            return await inner(request, context)
        except Exception as error:
            await _tell(context, error)

    make = grpc.stream_unary_rpc_method_handler if handler.request_streaming else grpc.unary_unary_rpc_method_handler
    return make(single, **codec)


async def _tell(context: grpc.aio.ServicerContext, error: Exception) -> None:
    """Always raises."""
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if not isinstance(error, Refusal | UserError | EngineStopped):
        LOG.exception("a method failed", exc_info=error, extra={FIELDS: known_ids(trace(context))})
    await status.abort(context, refusal(error))
