"""The prefix cache's contents as a stream of batches, which a subscriber can join late, leave and resume.

Batches are numbered from 1. The last ones are kept, and nothing else is for slow subscribers: who falls behind them, or joins
when the first ones are gone, gets a snapshot of what is cached and goes on from there.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass

from pagedjax.host.cache_log import CacheEvent, Removed, Stored

HISTORY = 1024  # batches
CHUNK = 512  # blocks in a piece of a snapshot


@dataclass(frozen=True)
class Cleared:
    """Nothing is cached any more."""


@dataclass(frozen=True)
class Chunk:
    """Which piece of a snapshot a batch is."""

    index: int
    count: int
    blocks: int  # of the whole snapshot


@dataclass(frozen=True)
class Batch:
    sequence: int
    time: float  # seconds since the epoch
    events: tuple[CacheEvent | Cleared, ...]
    snapshot: Chunk | None = None


class KvFeed:
    """Lives on the event loop."""

    def __init__(self, history: int = HISTORY):
        self.sequence = 0  # of the last batch
        self._blocks: dict[bytes, Stored] = {}
        self._history: deque[Batch] = deque(maxlen=history)
        self._wakes: set[asyncio.Event] = set()

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """What one step brought."""
        for event in events:
            if isinstance(event, Stored):
                self._blocks[event.key] = event
            else:
                self._blocks.pop(event.key, None)
        only_removed = all(isinstance(event, Removed) for event in events)
        told = (Cleared(),) if only_removed and not self._blocks else tuple(events)
        self.sequence += 1
        self._history.append(Batch(self.sequence, time.time(), told))
        for wake in self._wakes:
            wake.set()

    async def subscribe(self, start: int = 0, *, idle_seconds: float = 0.5) -> AsyncGenerator[Batch | None]:
        """Batches from number `start` on (0: whatever is needed to know all that is cached); None after so long without one."""
        cursor, wake = max(1, start), asyncio.Event()
        self._wakes.add(wake)
        try:
            while True:
                first = self._history[0].sequence if self._history else self.sequence + 1
                if cursor > self.sequence + 1 or (cursor < first and self.sequence):
                    chunks = list(self._snapshot())
                    cursor = self.sequence + 1
                    for chunk in chunks:
                        yield chunk
                elif cursor <= self.sequence:
                    cursor += 1
                    yield self._history[cursor - 1 - first]
                else:
                    wake.clear()
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(idle_seconds):
                            await wake.wait()
                            continue
                    yield None
        finally:
            self._wakes.discard(wake)

    def _snapshot(self) -> Iterator[Batch]:
        """What is cached now: numbers end at the last batch's; a clearing first, parents before children."""
        blocks = list(self._parents_first())
        count = max(1, min(-(-len(blocks) // CHUNK), self.sequence))
        size = max(1, -(-len(blocks) // count))
        pieces = list(itertools.batched(blocks, size)) or [()]
        for index, piece in enumerate(pieces):
            number = self.sequence - len(pieces) + 1 + index
            events = (Cleared(), *piece) if index == 0 else piece
            yield Batch(number, time.time(), events, Chunk(index, len(pieces), len(blocks)))

    def _parents_first(self) -> Iterator[Stored]:
        """A block may outlive its parent and see it stored again; one whose parent is gone is of no use to anybody."""
        children: dict[bytes | None, list[Stored]] = {}
        for block in self._blocks.values():
            children.setdefault(block.parent, []).append(block)
        todo = deque(children.get(None, ()))
        while todo:
            block = todo.popleft()
            yield block
            todo.extend(children.get(block.key, ()))
