"""What a request gives, on its way from the engine's thread to whoever reads it."""

import asyncio
import contextlib
import queue
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pagedjax.host.request import FinishReason, Logprobs, Usage


@dataclass(frozen=True)
class Delta:
    """New output of one sequence. Pieces of text joined are the whole text."""

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] | None = None
    prompt_logprobs: tuple[Logprobs, ...] | None = None
    finish: FinishReason | None = None
    stop: str | int | None = None  # the stop string or stop token that ended it
    usage: Usage | None = None


class Waker(NamedTuple):
    """How a stream's reader is told that there is something to read."""

    event_loop: asyncio.AbstractEventLoop
    call: Callable[[], None]


def wake_all(streams: Iterable["Stream"]) -> None:
    """Tells the readers of these streams, with one call into each event loop however many of them there are."""
    calls: dict[asyncio.AbstractEventLoop, dict[Callable[[], None], None]] = {}
    for stream in streams:
        if stream.waker is not None:
            calls.setdefault(stream.waker.event_loop, {})[stream.waker.call] = None
    for event_loop, readers in calls.items():
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is waiting
            event_loop.call_soon_threadsafe(_run_each, tuple(readers))


def _run_each(calls: tuple[Callable[[], None], ...]) -> None:
    for call in calls:
        call()


class Stream:
    """What a request gives, as it comes: iterate it, or `async for` it. Ends when all its sequences have.

    Leaving the iteration early (break, an exception, a cancelled task) cancels the request. Times are time.perf_counter().
    """

    def __init__(self, request_id: str, sequences: int, cancel: Callable[[str], None], submitted: float):
        self.request_id = request_id
        self.submitted = submitted
        self.first_token: float | None = None
        self.finished: float | None = None  # when the last of its sequences ended
        self._unfinished = sequences  # as the loop's thread counts; _left is the reader's count
        self._left = sequences
        self._queue: queue.SimpleQueue[Delta | BaseException] = queue.SimpleQueue()
        self._cancel = cancel
        self.waker: Waker | None = None

    def cancel(self) -> None:
        """Ends the request; its blocks are free before the next step. The stream ends with finish "cancelled"."""
        self._cancel(self.request_id)

    def put(self, item: Delta | BaseException) -> None:
        """Called by the loop's thread."""
        if isinstance(item, Delta):
            now = time.perf_counter()
            if self.first_token is None and item.tokens:
                self.first_token = now
            self._unfinished -= item.finish is not None
            if self._unfinished == 0 and self.finished is None:
                self.finished = now
        self._queue.put(item)

    def wake(self, event_loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        """From now on `call` runs on that event loop after each step that put something here, and now if something is there."""
        self.waker = Waker(event_loop, call)
        if not self._queue.empty():
            call()

    def take(self) -> list[Delta]:
        """All that is there, without waiting. Raises what the request ended with, if that comes next and nothing came before it."""
        taken: list[Delta] = []
        while self._left > 0 and not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, BaseException) and taken:
                self._queue.put(item)  # it is the last one
                break
            taken.append(self._open(item))
        return taken

    @property
    def ended(self) -> bool:
        """Whether all that it will give has been read."""
        return self._left <= 0

    def _open(self, item: Delta | BaseException) -> Delta:
        if isinstance(item, BaseException):
            self._left = 0
            raise item
        self._left -= item.finish is not None
        return item

    def __iter__(self) -> Iterator[Delta]:
        try:
            while self._left > 0:
                yield self._open(self._queue.get())
        finally:
            if self._left > 0:
                self.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        event = asyncio.Event()
        self.wake(asyncio.get_running_loop(), event.set)
        try:
            while self._left > 0:
                event.clear()
                while self._left > 0 and not self._queue.empty():
                    yield self._open(self._queue.get_nowait())
                if self._left > 0 and self._queue.empty():
                    await event.wait()
        finally:
            if self._left > 0:
                self.cancel()
