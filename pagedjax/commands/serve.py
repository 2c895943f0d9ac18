"""`pagedjax serve`: a model behind gRPC and HTTP."""

import asyncio
import contextlib
import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pagedjax import terminal
from pagedjax.commands.start import start
from pagedjax.errors import UserError
from pagedjax.flags import engine_config
from pagedjax.host.request import SamplingParams
from pagedjax.llm import LLM
from serving.config import ServeConfig
from serving.events import Observer
from serving.frontend import Frontend
from serving.http.app import open_http
from serving.log import LOG, setup
from serving.rpc.listen import open_grpc
from serving.server import Listener, Open, serve


def run(command: Any) -> int:
    """`command` is cli.Serve; the exit code. UserError for wrong flags before anything is opened or loaded."""
    config: ServeConfig = engine_config(command.serve, ServeConfig, "serve.")
    engine_config(command.engine)
    setup(config.log_format)
    with tracing(config, command.model) as observers:
        say = LOG.info if config.log_format == "json" else None  # so that every line is JSON
        make = lambda: load(command.model, command.engine, say=say)
        return asyncio.run(serve(config, command.model, make, openers(config), observers=observers, ready=announce))


@contextlib.contextmanager
def tracing(config: ServeConfig, model: str) -> Iterator[list[Observer]]:
    """Whoever makes spans of requests, where that is asked for; at the end they are sent. Loaded by name: without the flag
    nothing of it is imported. UserError where the extra is not installed."""
    endpoint = config.otlp_traces_endpoint
    if not endpoint:
        yield []
        return
    try:
        module = importlib.import_module("serving.spans")
    except ModuleNotFoundError as error:
        rule = "otlp_traces_endpoint must go with the extra otel (pip install 'pagedjax[otel]')"
        raise UserError(f"{rule}; got {endpoint} and no module {error.name}") from error
    spans = module.Spans(endpoint, config.served_model_name or model)
    try:
        yield [spans.observe]
    finally:
        spans.close()


def load(model: str, flags: Any, *, say: Callable[[str], None] | None = None) -> LLM:
    """The engine, once it has made a token: before that it is not ready. Says how long that took."""
    llm = start(model, flags, say=say)
    llm.generate([[0]], SamplingParams(max_tokens=1, temperature=0, seed=0))
    age = process_age()
    if age is not None:
        (say or terminal.note)(f"start    {age:.1f} s from the start of the process to a first token")
    return llm


def process_age(stat: Path = Path("/proc/self/stat")) -> float | None:
    """Seconds since this process was started; None where the system has no such file (Linux has)."""
    try:
        fields = stat.read_text().rpartition(")")[2].split()  # behind the name, which may have anything in it
    except OSError:
        return None
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


def openers(config: ServeConfig) -> list[Open]:
    """What listens, by the configuration."""
    wanted = ((open_grpc, config.grpc_port), (open_http, config.http_port))
    return [open_one for open_one, port in wanted if port is not None]


def announce(frontend: Frontend, listeners: Sequence[Listener]) -> None:
    """The one line that says that requests are taken, and where."""
    LOG.info("ready: %s at %s", frontend.model_name, ", ".join(listener.address for listener in listeners))
