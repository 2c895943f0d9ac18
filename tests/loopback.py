"""A server on loopback over stories260K, in a thread of its own, with everything but the process around it."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedjax import LLM
from pagedjax.engine import Engine
from serving.auth import Keys
from serving.config import ServeConfig
from serving.frontend import Frontend
from serving.rpc.listen import GrpcListener, open_grpc

STORIES = Path(__file__).parent / "golden" / "stories260K"
SMALL = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "block_size": 16,
    "buckets.decode_rows": (4,),
    "buckets.prefill_tokens": (32,),
    "cache.kv_memory": 2 << 20,
}


@dataclass
class Server:
    """`call` runs something on the server's event loop."""

    llm: LLM
    frontend: Frontend
    address: str
    event_loop: asyncio.AbstractEventLoop
    listeners: list[GrpcListener] = field(default_factory=list)

    def call(self, function: Callable[[], Any]) -> Any:
        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.event_loop).result(30)

    def slow_steps(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        return slow_steps(self.llm.engine, seconds)

    @contextlib.contextmanager
    def held_steps(self) -> Iterator[None]:
        """Inside, no step comes to its end."""
        engine, step, gate = self.llm.engine, self.llm.engine.step, threading.Event()
        engine.step = lambda: (gate.wait(60), step())[1]
        try:
            yield
        finally:
            gate.set()
            engine.step = step

    def is_free(self) -> bool:
        """Nothing runs, nothing is held."""
        pool = self.llm.engine.scheduler.pool
        return not self.llm.engine.has_work() and pool.num_free == pool.capacity and self.frontend.open_requests == 0


@contextlib.contextmanager
def slow_steps(engine: Engine, seconds: float) -> Iterator[None]:
    """Inside, each step takes so much longer."""
    step = engine.step

    def slow() -> Any:
        time.sleep(seconds)
        return step()

    engine.step = slow
    try:
        yield
    finally:
        engine.step = step


@contextlib.contextmanager
def serving(llm: LLM | None, keys: Keys | None = None, **options: Any) -> Iterator[Server]:
    """`llm` None: a server that has no model yet."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()

    async def begin() -> Server:
        frontend = Frontend(ServeConfig(grpc_port=0, **options), "stories")
        listener = await open_grpc(frontend, keys or Keys())
        if llm is not None:
            await frontend.start(llm)
        return Server(llm, frontend, listener.address, loop, [listener])  # pyright: ignore[reportArgumentType]

    async def end(server: Server) -> None:
        for listener in server.listeners:
            await listener.stop(0)
        server.frontend.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(begin(), loop).result(60)
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(end(server), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def until(true: Callable[[], Any], seconds: int = 60) -> None:
    """Waits for it; fails after so long, or longer."""
    for _ in range(100 * seconds):
        if true():
            return
        time.sleep(0.01)
    raise AssertionError("it does not come true")
