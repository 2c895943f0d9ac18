"""What a request gives, for a reader on the event loop that may be slow.

The engine's thread never waits for a reader. After each step it wakes the event loop once, and every reply that got something takes
it over. A reader that keeps up sees one update for each step of its request; for one that does not, the steps run together into one
update. What has not been read is bounded: beyond `max_unread` the request is ended and its reader gets the error slow_reader.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

from pagedjax.host.request import FinishReason, Request, Usage
from pagedjax.stream import Delta, Stream
from serving.errors import Refusal, refusal

Update = tuple[Delta, ...]  # one for each sequence that has news, by index


class Pieces:
    """The unread output of one sequence."""

    def __init__(self, first: Delta):
        self._last = first
        self._prompt_logprobs = first.prompt_logprobs
        self._texts, self._tokens = [first.text], list(first.tokens)
        self._logprobs = None if first.logprobs is None else list(first.logprobs)

    def add(self, delta: Delta) -> None:
        self._last = delta
        self._prompt_logprobs = self._prompt_logprobs or delta.prompt_logprobs
        self._texts.append(delta.text)
        self._tokens += delta.tokens
        if delta.logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *delta.logprobs]

    def joined(self) -> Delta:
        """As if it had come in one step."""
        return replace(
            self._last,
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            logprobs=None if self._logprobs is None else tuple(self._logprobs),
            prompt_logprobs=self._prompt_logprobs,
        )


def weight(delta: Delta) -> int:
    """Tokens and logprob entries in it; not those of the prompt, which come once and are as long as it is."""
    return len(delta.tokens) + sum(1 + len(entry.top) for entry in delta.logprobs or ())


class Reply:
    """Iterate it, once: `async for update in reply`. Leaving early cancels the request, and so does leaving `async with reply`.
    Raises Refusal where the request does not come to its end. All of it belongs to the event loop's thread."""

    def __init__(
        self, request_id: str, *, max_unread: int, on_step: Callable[["Reply", int], None], on_end: Callable[["Reply"], None]
    ):
        """`request_id`: as the client knows it. `on_step` is told the number of new tokens after each step."""
        self.request_id = request_id
        self.request: Request | None = None  # from `begin` on
        self.error: Refusal | None = None  # why it did not come to its end
        self.finishes: dict[int, FinishReason] = {}  # by sequence
        self.usages: dict[int, Usage] = {}
        self.tokens = 0  # of all its sequences, so far
        self.submitted = time.perf_counter()
        self._stream: Stream | None = None
        self._aborted = self._ended = False
        self._pending: dict[int, Pieces] = {}
        self._unread, self._max_unread = 0, max_unread
        self._news = asyncio.Event()
        self._on_step, self._on_end = on_step, on_end

    @property
    def unread(self) -> int:
        """Tokens and logprob entries that wait for the reader."""
        return self._unread

    @property
    def ended(self) -> bool:
        """Whether the engine is done with it; there may be something left to read."""
        return self._ended

    @property
    def stream(self) -> Stream:
        assert self._stream is not None, "the reply has not begun"
        return self._stream

    def begin(self, request: Request, stream: Stream) -> None:
        self.request, self._stream = request, stream
        stream.wake(asyncio.get_running_loop(), self._take)
        if self._aborted:
            stream.cancel()

    def abort(self) -> None:
        """The reply ends with finish "cancelled" for what has not ended. May be called at any time, and again."""
        self._aborted = True
        if self._stream is not None and not self._ended:
            self._stream.cancel()

    def close(self) -> None:
        """The reader leaves: what is not finished is cancelled, what is not read is dropped."""
        self._pending.clear()
        self._unread = 0
        if not self._ended:
            self.abort()
            self._end(Refusal("cancelled", "the reader left"))

    def _take(self) -> None:
        if self._ended:
            return
        tokens = 0
        try:
            for delta in self.stream.take():
                tokens += len(delta.tokens)
                self._keep(delta)
        except Exception as error:  # the engine's thread ended
            self._end(refusal(error))
            return
        self.tokens += tokens
        if tokens:
            self._on_step(self, tokens)
        if self._unread > self._max_unread:
            self._pending.clear()
            self._unread = 0
            self.abort()
            self._end(Refusal("slow_reader", f"the reader left more than {self._max_unread} tokens and logprobs unread"))
        elif self.stream.ended:
            self._end(None)
        self._news.set()

    def _keep(self, delta: Delta) -> None:
        self._unread += weight(delta)
        if delta.index in self._pending:
            self._pending[delta.index].add(delta)
        else:
            self._pending[delta.index] = Pieces(delta)
        if delta.finish is not None:
            self.finishes[delta.index] = delta.finish
        if delta.usage is not None:
            self.usages[delta.index] = delta.usage

    def _end(self, error: Refusal | None) -> None:
        self._ended, self.error = True, error
        self._news.set()
        self._on_end(self)

    async def __aiter__(self) -> AsyncGenerator[Update]:
        try:
            while True:
                if self._pending:
                    update = tuple(self._pending[index].joined() for index in sorted(self._pending))
                    self._pending.clear()
                    self._unread = 0
                    yield update
                elif self._ended:
                    break
                else:
                    self._news.clear()
                    await self._news.wait()
            if self.error is not None:
                raise self.error
        finally:
            self.close()

    async def __aenter__(self) -> "Reply":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
