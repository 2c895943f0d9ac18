"""`pagedjax serve`: a model behind gRPC and HTTP."""

import asyncio
from collections.abc import Sequence
from typing import Any

from pagedjax.commands.start import start
from pagedjax.flags import engine_config
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
    return asyncio.run(serve(config, command.model, lambda: start(command.model, command.engine), openers(config), ready=announce))


def openers(config: ServeConfig) -> list[Open]:
    """What listens, by the configuration."""
    wanted = ((open_grpc, config.grpc_port), (open_http, config.http_port))
    return [open_one for open_one, port in wanted if port is not None]


def announce(frontend: Frontend, listeners: Sequence[Listener]) -> None:
    """The one line that says that requests are taken, and where."""
    LOG.info("ready: %s at %s", frontend.model_name, ", ".join(listener.address for listener in listeners))
