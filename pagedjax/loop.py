"""EngineLoop: the one thread that owns the Engine, and the way in and out of it for everybody else."""

import asyncio
import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from pagedjax.engine import Engine
from pagedjax.errors import EngineStopped, QueueFull, check
from pagedjax.host.beam import choose
from pagedjax.host.cache_log import CacheEvent, CacheLog
from pagedjax.host.pools import POOLS
from pagedjax.host.request import Request, TokenEvent, Usage
from pagedjax.stream import Delta, Stream, wake_all
from pagedjax.text import IncrementalDecoder, Tokenizer


def _stream_of(result: Stream | Exception) -> Stream:
    if isinstance(result, Exception):
        raise result
    return result


def _abandon(future: "Future[Stream | Exception]") -> None:
    """Cancels what was submitted, if it was, for somebody who does not wait for the answer any more."""
    if not future.cancelled() and future.exception() is None and isinstance(result := future.result(), Stream):
        result.cancel()


@dataclass
class _Live:
    """A request as the loop's thread sees it."""

    stream: Stream
    decoders: list[IncrementalDecoder | None]
    counts: list[int]  # output tokens of each sequence; -1: it has ended
    request: Request
    held: list[list[Delta]]  # of each sample, where the best of several are wanted: until all have ended
    shows_stop: bool  # the text of a stop token is part of the text


class Load(NamedTuple):
    """What the engine has in hand, as of the end of its last step or command."""

    running: int = 0  # sequences
    waiting: int = 0
    waiting_tokens: int = 0  # of prompts, that are not cached
    blocks_used: int = 0
    blocks: int = 0  # that the pool has


class EngineLoop:
    """Runs Engine.step while there is work. `submit`, `cancel` and `call` may be called from any thread.

    `load` may be read by any thread at any time. `ended` is done when the engine's thread is: with None after `close`, with the
    error that ended it otherwise.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None):
        """Without a tokenizer there is no text, and stop strings are refused."""
        self.engine, self.tokenizer = engine, tokenizer
        self.load = Load(blocks=engine.scheduler.pool.capacity)
        self.ended: Future[None] = Future()
        self._inbox: queue.SimpleQueue[tuple[Callable[[], None], Future[Any]] | None] = queue.SimpleQueue()
        self._live: dict[str, _Live] = {}
        self._failure: BaseException | None = None
        self._closed = False
        self._busy_since: float | None = None
        self._cache_watcher: Callable[[list[CacheEvent]], object] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Stream:
        """Hands a request to the engine. UserError (QueueFull, too) is raised here, in the caller's thread."""
        (result,) = self.submit_all([request])
        return _stream_of(result)

    async def submit_async(self, request: Request) -> Stream:
        """`submit` for an event loop, which goes on while the engine's thread is in a step. Cancelled meanwhile: the request is
        cancelled, too."""
        submitted = time.perf_counter()
        future = self._ask(lambda: self._add(request, submitted))
        try:
            return _stream_of(await asyncio.wrap_future(future))
        except asyncio.CancelledError:
            future.add_done_callback(_abandon)
            raise

    def submit_all(self, requests: Sequence[Request]) -> list[Stream | Exception]:
        """Hands over several at once, so that they can share their first step. The error of one does not stop the others, but
        after a QueueFull all the rest are refused as well, so that none overtakes another."""
        submitted = time.perf_counter()
        return self._ask(lambda: self._add_all(requests, submitted)).result()

    def cancel(self, request_id: str) -> None:
        """Ends a request. Unknown ids are ignored, since it may just have finished. Never raises: when the engine is down there
        is nothing left to cancel, and nobody takes the command."""
        self._inbox.put((lambda: self._deliver(self.engine.cancel(request_id)), Future()))

    def call[T](self, ask: Callable[[Engine], T]) -> T:
        """What `ask` answers when the engine's thread runs it between two steps; its error is raised here."""
        return self._ask(lambda: ask(self.engine)).result()

    async def call_async[T](self, ask: Callable[[Engine], T]) -> T:
        """`call` for an event loop."""
        return await asyncio.wrap_future(self._ask(lambda: ask(self.engine)))

    async def watch_cache(self, call: Callable[[list[CacheEvent]], None]) -> None:
        """From now on `call` runs on this event loop after each step in which the prefix cache learned or forgot something. One
        watcher at a time."""
        event_loop, tables = asyncio.get_running_loop(), self.engine.scheduler.tables

        def begin(_: Engine) -> None:
            tables.log = CacheLog()
            self._cache_watcher = lambda events: event_loop.call_soon_threadsafe(call, events)

        await self.call_async(begin)

    def _tell_cache(self) -> None:
        log = self.engine.scheduler.tables.log
        events = log.take() if log is not None else []
        if events and self._cache_watcher is not None:
            with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody is waiting
                self._cache_watcher(events)

    def seconds_busy(self) -> float:
        """Since when the engine's thread has been in one step or command; 0 while it waits for something to do."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self) -> None:
        """Cancels everything and ends the thread. Streams that are open end with finish "cancelled"."""
        if not self._closed:
            self._closed = True
            self._inbox.put(None)
            if threading.current_thread() is not self._thread:  # a finalizer may run anywhere
                self._thread.join()

    def _ask[T](self, answer: Callable[[], T]) -> "Future[T]":
        """The future of what `answer` gives in the engine's thread. A command that comes when the thread has ended is refused by
        whoever sees it last: the thread, which empties the inbox, or the second look here."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(answer())
                except Exception as error:
                    future.set_exception(error)

        self._raise_if_down()
        self._inbox.put((run, future))
        self._raise_if_down()
        return future

    def _raise_if_down(self) -> None:
        if self._failure is not None:
            raise EngineStopped("the engine stopped after an error") from self._failure
        if self._closed:
            raise EngineStopped("the engine is closed")

    def _decoder(self, request: Request) -> IncrementalDecoder | None:
        if self.tokenizer is None:
            return None
        params = request.params
        return IncrementalDecoder(
            self.tokenizer,
            stop=params.stop,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            skip_special=params.skip_special_tokens,
            shown=request.shown,
            after=request.prompt,
        )

    # --- the engine's thread ----------------------------------------------------------------------------------------

    def _add_all(self, requests: Sequence[Request], submitted: float) -> list[Stream | Exception]:
        results: list[Stream | Exception] = []
        for request in requests:
            full = results and isinstance(results[-1], QueueFull)
            results.append(results[-1] if full else self._add(request, submitted))
        return results

    def _add(self, request: Request, submitted: float) -> Stream | Exception:
        params = request.params
        try:
            check(
                not params.stop or self.tokenizer is not None,
                f"request {request.id}: stop strings need a tokenizer; the model has none",
            )
            count = params.n if params.beam_width else params.num_sequences
            decoders = [self._decoder(request) for _ in range(count)]
            self.engine.add(request)
        except Exception as error:  # whatever is wrong with this request must not end the others
            return error
        stream = Stream(request.id, params.n, self.cancel, submitted)
        self._live[request.id] = _Live(
            stream, decoders, [0] * count, request, [[] for _ in range(count)], params.include_stop_str_in_output
        )
        return stream

    def _run(self) -> None:
        try:
            while self._take_commands():
                if self.engine.has_work():
                    self._deliver(self.engine.step())
            for request_id in list(self._live):
                self._deliver(self.engine.cancel(request_id))
        except BaseException as error:  # every reader must learn of it, whatever it is
            self._failure = error
            for live in self._live.values():
                failure = EngineStopped(f"the engine stopped after an error: {error}")
                failure.__cause__ = error
                live.stream.put(failure)
            wake_all(live.stream for live in self._live.values())
            self._live.clear()
        self._busy_since = None
        self._refuse_the_rest()
        if self._failure is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(self._failure)

    def _refuse_the_rest(self) -> None:
        while not self._inbox.empty():
            command = self._inbox.get_nowait()
            if command is not None and command[1].set_running_or_notify_cancel():
                command[1].set_exception(EngineStopped("the engine has ended"))

    def _take_commands(self) -> bool:
        """Runs what was sent; waits for something when there is no work, or none until a while has passed. False at the end."""
        while True:
            self.load = self._measure()
            self._tell_cache()
            wait = self.engine.seconds_idle() if self.engine.has_work() else None
            self._busy_since = time.monotonic() if wait == 0 else None
            try:
                command = self._inbox.get(block=wait != 0, timeout=wait or None)
            except queue.Empty:
                self._busy_since = time.monotonic()
                return True
            self._busy_since = time.monotonic()
            if command is None:
                return False
            command[0]()

    def _measure(self) -> Load:
        scheduler = self.engine.scheduler
        waiting, pool = scheduler.entrance.queue, scheduler.pool
        tokens = sum(waiting.tokens(name) for name in POOLS)
        return Load(len(scheduler.running), scheduler.num_waiting, tokens, pool.capacity - pool.num_free, pool.capacity)

    def _deliver(self, events: list[TokenEvent]) -> None:
        touched: dict[str, Stream] = {}
        for event in events:
            live = self._live.get(event.request_id)
            if live is not None and live.counts[event.index] >= 0:
                touched[event.request_id] = live.stream
                delta = self._delta(live, event)
                if delta.finish is not None:
                    live.counts[event.index] = -1
                    if all(count < 0 for count in live.counts):
                        del self._live[event.request_id]
                if len(live.counts) == live.request.params.n:
                    live.stream.put(delta)
                    continue
                live.held[event.index].append(delta)
                if all(count < 0 for count in live.counts):
                    for best in best_samples(live.request, live.held):
                        live.stream.put(best)
        wake_all(touched.values())

    def _delta(self, live: _Live, event: TokenEvent) -> Delta:
        """Decodes the tokens and checks stop strings; a hit ends the sequence in the engine, and what came after is dropped."""
        delta = Delta(
            event.index, "", event.tokens, event.logprobs, event.prompt_logprobs, event.finish, event.stop_id, event.usage
        )
        decoder = live.decoders[event.index]
        if decoder is not None:
            hidden = event.stop_id is not None and not live.shows_stop
            shown = event.tokens[:-1] if hidden else event.tokens
            text = decoder.push(shown)
            if decoder.hit is None and event.finish:
                text += decoder.finish()
            if decoder.hit is not None:
                used = decoder.hit.num_tokens
                kept = used - live.counts[event.index]
                usage = self.engine.finish(event.request_id, event.index, used) or _cut(event.usage, used)
                return replace(
                    delta,
                    text=text,
                    tokens=event.tokens[:kept],
                    logprobs=None if event.logprobs is None else event.logprobs[:kept],
                    finish="stop",
                    stop=decoder.hit.stop,
                    usage=usage,
                )
            delta = replace(delta, text=text)
        live.counts[event.index] += len(event.tokens)
        return delta


def best_samples(request: Request, samples: Sequence[Sequence[Delta]]) -> list[Delta]:
    """Of best_of samples, each in its pieces, the n with the highest mean logprob, in one piece each, best first."""
    entries = [tuple(p for delta in pieces for p in delta.logprobs or ()) for pieces in samples]
    ranked = choose([[p.logprob for p in own] or [-math.inf] for own in entries], request.params.n)
    wants = request.params.logprobs is not None
    return [
        replace(
            samples[i][-1],
            index=index,
            text="".join(delta.text for delta in samples[i]),
            tokens=tuple(t for delta in samples[i] for t in delta.tokens),
            logprobs=entries[i] if wants else None,
            prompt_logprobs=samples[i][0].prompt_logprobs,
        )
        for index, i in enumerate(ranked)
    ]


def _cut(usage: Usage | None, generated: int) -> Usage | None:
    return None if usage is None else replace(usage, generated=generated)
