"""`pagedjax serve`: a model behind gRPC and HTTP."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pagedjax import terminal
from pagedjax.commands.start import start
from pagedjax.flags import engine_config
from pagedjax.host.request import SamplingParams
from pagedjax.llm import LLM
from serving.config import ServeConfig
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
    return asyncio.run(serve(config, command.model, lambda: load(command.model, command.engine), openers(config), ready=announce))


def load(model: str, flags: Any) -> LLM:
    """The engine, once it has made a token: before that it is not ready. Says how long that took."""
    llm = start(model, flags)
    llm.generate([[0]], SamplingParams(max_tokens=1, temperature=0, seed=0))
    age = process_age()
    if age is not None:
        terminal.note(f"start    {age:.1f} s from the start of the process to a first token")
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
