"""Several replies at once: whole answers for those who do not stream, and one stream for those who do."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass

from pagedjax.host.request import Request
from pagedjax.stream import Delta
from serving.errors import Refusal
from serving.frontend import Call, Frontend
from serving.reply import Pieces, Reply, Update


@dataclass(frozen=True)
class Whole:
    """A request with all of its output: one delta for each sample, by index."""

    request_id: str
    request: Request
    samples: tuple[Delta, ...]


class Collected:
    """The output of a request so far."""

    def __init__(self):
        self._pieces: dict[int, Pieces] = {}

    def add(self, delta: Delta) -> None:
        """Refusal for output that its deadline has cut short."""
        if delta.finish == "deadline":
            raise Refusal("deadline_exceeded", "the deadline passed before the request was done")
        if delta.index in self._pieces:
            self._pieces[delta.index].add(delta)
        else:
            self._pieces[delta.index] = Pieces(delta)

    def pop(self, index: int) -> Delta:
        """All that one sample gave."""
        return self._pieces.pop(index).joined()

    def pop_all(self) -> tuple[Delta, ...]:
        return tuple(self.pop(index) for index in sorted(self._pieces))


@contextlib.asynccontextmanager
async def submit_all(frontend: Frontend, calls: Sequence[Call]) -> AsyncIterator[list[Reply]]:
    """The replies of several calls, all or none: the first refusal is raised. What is still open at the end is cancelled."""
    tasks = [asyncio.ensure_future(frontend.submit(call)) for call in calls]
    try:
        await asyncio.wait(tasks)
        yield [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_close)


def _close(task: "asyncio.Future[Reply]") -> None:
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def read_all(reply: Reply) -> Whole:
    """Refusal where the request does not come to its end, or its deadline passes."""
    assert reply.request is not None
    collected = Collected()
    async for update in reply:
        for delta in update:
            collected.add(delta)
    return Whole(reply.request_id, reply.request, collected.pop_all())


async def answer_all(frontend: Frontend, calls: Sequence[Call]) -> list[Whole]:
    """The whole answers of several calls, in their order; the first error ends them all."""
    async with submit_all(frontend, calls) as replies:
        tasks = [asyncio.ensure_future(read_all(reply)) for reply in replies]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()


async def merge(replies: Sequence[Reply]) -> AsyncGenerator[tuple[int, Update]]:
    """(which reply, its update) as they come. Nothing is read ahead, so that a slow reader of this is one of each reply."""
    room: asyncio.Queue[tuple[int, Update] | None] = asyncio.Queue(1)

    async def read(index: int, reply: Reply) -> None:
        async for update in reply:
            await room.put((index, update))

    async def read_each() -> None:
        tasks = [asyncio.ensure_future(read(index, reply)) for index, reply in enumerate(replies)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        await room.put(None)

    reading, taking = asyncio.ensure_future(read_each()), None
    try:
        while True:
            taking = asyncio.ensure_future(room.get())
            await asyncio.wait((taking, reading), return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                reading.result()  # raises what a reply ended with
                return
            item = taking.result()
            if item is None:
                return
            yield item
    finally:
        reading.cancel()
        if taking is not None:
            taking.cancel()
