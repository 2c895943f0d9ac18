"""The HTTP server as an ASGI app, and as a listener beside the gRPC one."""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Generator, Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagedjax.errors import UserError
from serving.auth import Caller, Keys
from serving.call import known_ids
from serving.config import ServeConfig
from serving.errors import Refusal
from serving.frontend import Frontend
from serving.http import chat, completions, responses, status, text
from serving.http.failures import failure
from serving.http.shapes import to_json
from serving.http.site import Site, get_site
from serving.http.traffic import Traffic
from serving.metrics import Requests
from serving.trace_context import trace_context

KEEP_ALIVE_SECONDS = 65  # longer than the pools of most clients and proxies hold on to an idle connection


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is to blame."},
    "5XX": {"model": ErrorBody, "description": "The server is."},
}


def make_app(frontend: Frontend, keys: Keys) -> ASGIApp:
    """The app of a frontend, which may still be without its model."""
    app = FastAPI(title="pagedjax", docs_url=None, redoc_url=None, swagger_ui_oauth2_redirect_url=None)
    requests, traffic = Requests(), Traffic(WholeBody(app, frontend.config.limits.max_message_bytes))
    frontend.observers.append(requests.observe)
    app.state.site = Site(frontend, keys, requests, traffic)
    for part in (chat, completions, responses, text, status):
        app.include_router(part.router, responses=ERRORS)
    for kind in (RequestValidationError, HTTPException, Refusal, UserError, Exception):
        app.add_exception_handler(kind, _answer_error)
    return traffic


async def _answer_error(request: Request, error: Exception) -> Response:
    """Of a request that no endpoint has seen: what its headers and its body say is checked before."""
    ids = known_ids(trace_context(request.headers.items()), header_id=request.headers.get("x-request-id", ""))
    failed = failure(error, ids)
    if isinstance(error, RequestValidationError):
        error = Refusal("invalid_argument", failed.body["error"]["message"])
    if isinstance(error, Refusal | UserError):
        get_site(request).frontend.refuse(error, Caller(), ids)
    return _json(failed.status, failed.body, failed.headers)


def _json(status: int, body: Mapping[str, Any], headers: Mapping[str, str]) -> Response:
    """In ASCII: a message may repeat what a request said, which may be no Unicode."""
    return Response(to_json(body), status, dict(headers), "application/json")


class WholeBody:
    """Reads a request's body before anything else sees it, and no more of it than it may have."""

    def __init__(self, app: ASGIApp, most: int):
        self.app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > self._most:
                error = Refusal("message_too_large", f"a body may have {self._most} bytes")
                failed = failure(error)
                headers = {**failed.headers, "connection": "close"}  # the rest of the body is still on its way
                await _json(failed.status, failed.body, headers)(scope, receive, send)
                return
            if not message.get("more_body", False):
                break
        rest: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def again() -> Message:
            return rest.pop() if rest else await receive()

        await self.app(scope, again, send)


class _Server(uvicorn.Server):
    """Signals are for the process to take, not for one of its ports."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


class HttpListener:
    """An open port with uvicorn behind it, on the event loop it was made on."""

    def __init__(self, settings: uvicorn.Config, listening: socket.socket):
        self._server = _Server(settings)
        host, port = listening.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))

    async def stop(self, grace: float) -> None:
        """Takes nothing new at once; what is open may go on for so many seconds."""
        self._server.config.timeout_graceful_shutdown = max(1, round(grace))
        self._server.should_exit = True
        await self._task


async def open_http(frontend: Frontend, keys: Keys) -> HttpListener:
    """Listens where the configuration says. UserError where it cannot."""
    config = frontend.config
    settings = _settings(make_app(frontend, keys), config)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(config.host, config.http_port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        listening = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"host must have an address here; got {config.host}: {error.strerror}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        listening.close()
        where = f"{config.host}:{config.http_port}: {error.strerror}"
        raise UserError(f"the HTTP port must be free, and of this machine; got {where}") from error
    return HttpListener(settings, listening)


def _settings(app: ASGIApp, config: ServeConfig) -> uvicorn.Config:
    """UserError for TLS files that are none."""
    settings = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        ssl_certfile=config.tls_cert or None,
        ssl_keyfile=config.tls_key or None,
        ssl_ca_certs=config.tls_client_ca or None,
        ssl_cert_reqs=ssl.CERT_REQUIRED if config.tls_client_ca else ssl.CERT_NONE,
    )
    try:
        settings.load()
    except OSError as error:  # those of the ssl module are some, too
        files = ", ".join(filter(None, (config.tls_cert, config.tls_key, config.tls_client_ca)))
        raise UserError(f"TLS files must be readable, and PEM; got {files}: {error.strerror or error}") from error
    return settings
