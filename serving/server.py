"""The life of the server: listen, load, be ready, drain, end."""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from pagedjax.llm import LLM
from serving.auth import Keys, read_keys
from serving.config import ServeConfig, check_exposure
from serving.events import Observer
from serving.frontend import Frontend
from serving.log import LOG, requests

FAILED = 70  # exit code after a failed step (EX_SOFTWARE)
CLOSE_SECONDS = 10.0  # that the last step may take at least, when all requests are gone
FLUSH_SECONDS = 1.0  # for answers that are on their way when all else has ended


class Listener(Protocol):
    """An open port."""

    @property
    def address(self) -> str:
        """host:port, as it is."""
        ...

    async def stop(self, grace: float) -> None:
        """Takes nothing new at once; what is open may go on for so many seconds."""
        ...


Open = Callable[[Frontend, Keys], Awaitable[Listener]]  # UserError where it cannot listen


async def serve(
    config: ServeConfig,
    model: str,
    load: Callable[[], LLM],
    open_all: Sequence[Open],
    *,
    observers: Sequence[Observer] = (),
    ready: Callable[[Frontend, Sequence[Listener]], None] = lambda *_: None,
) -> int:
    """Runs until a signal or a failure; the exit code. The ports are open while `load` runs, in a thread of its own, so that health
    can be asked; `load` comes back with every shape compiled. What it raises is raised here. `ready` is called then.
    `observers` hear of every request, beside the log."""
    keys = read_keys(config.api_keys)
    check_exposure(config, bool(keys))
    frontend, stop = Frontend(config, model), asyncio.Event()
    frontend.observers += [requests(prompts=config.log_prompts), *observers]
    failed = asyncio.Event()
    frontend.on_state.append(lambda state: failed.set() if state == "failed" else None)
    listeners: list[Listener] = []
    with _signals(stop):
        try:
            for open_one in open_all:
                listeners.append(await open_one(frontend, keys))
            llm = await _first(_in_thread(load), stop)
            if llm is None:
                LOG.info("stopped while the model was being loaded")
                os._exit(0)  # the thread is inside JAX and cannot be ended
            try:
                await frontend.start(llm)
                ready(frontend, listeners)
                await _first(failed.wait(), stop)
                if frontend.state != "failed":
                    await drain(frontend, failed)
            finally:
                if frontend.state == "failed":
                    await asyncio.sleep(FLUSH_SECONDS / 10)  # the errors of open requests go out
                await _stop(listeners)
                if not await ends(llm.close, max(CLOSE_SECONDS, config.drain_seconds)):
                    LOG.critical("a step hangs, the server ends without it")
                    logging.shutdown()
                    os._exit(FAILED)
        finally:
            await _stop(listeners)
            frontend.close()
    if frontend.failure is not None:
        LOG.critical("the engine failed, the server ends: %s: %s", type(frontend.failure).__name__, frontend.failure)
        return FAILED
    LOG.info("drained, the server ends")
    return 0


async def drain(frontend: Frontend, failed: asyncio.Event) -> None:
    config = frontend.config
    LOG.info("draining: %d requests are open, they have %g s", frontend.open_requests, config.drain_seconds)
    frontend.drain(refuse=False)
    await asyncio.sleep(config.unready_seconds)
    frontend.drain()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(config.drain_seconds):
            await _first(frontend.idle(), failed)
    if frontend.open_requests:
        LOG.warning("%d requests did not end in time and are cancelled", frontend.open_requests)
        frontend.abort_all()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_SECONDS):
                await frontend.idle()


async def ends(close: Callable[[], None], seconds: float) -> bool:
    """Whether `close` comes back in time, in a thread of its own."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await _in_thread(close)
            return True
    return False


async def _stop(listeners: list[Listener]) -> None:
    """Each once."""
    while listeners:
        await listeners.pop().stop(FLUSH_SECONDS)


@contextlib.contextmanager
def _signals(stop: asyncio.Event):
    """SIGTERM and SIGINT set the event; the second of them ends the process at once."""
    loop = asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if stop.is_set():
            LOG.warning("%s again: stopped at once", signal.Signals(number).name)
            logging.shutdown()
            os._exit(128 + number)
        stop.set()

    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def _first[T](work: Awaitable[T], event: asyncio.Event) -> T | None:
    """What the work gives, or None if the event comes first; the work is cancelled then."""
    task, other = asyncio.ensure_future(work), asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait((task, other), return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        other.cancel()


def _in_thread[T](function: Callable[[], T]) -> "asyncio.Future[T]":
    """Like asyncio.to_thread, in a thread that does not hold up the end of the process."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # pyright: ignore[reportArgumentType]

    def run() -> None:
        try:
            result, error = function(), None
        except BaseException as caught:
            result, error = None, caught
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="load", daemon=True).start()
    return future
