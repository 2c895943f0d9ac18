"""What the prefix cache learned and forgot, for those who route requests by it."""

from typing import NamedTuple


class Stored(NamedTuple):
    """A block has a name now. `parent`: the key of the block before it; None for the first one of a prompt."""

    key: bytes
    parent: bytes | None
    tokens: bytes  # i32[P]
    salt: str


class Removed(NamedTuple):
    """The block of this key was given out again."""

    key: bytes


CacheEvent = Stored | Removed


class CacheLog:
    """Events since they were last taken, of the blocks of one layer group: the first, which sees all tokens if any group does."""

    group = 0

    def __init__(self):
        self._known: set[bytes] = set()
        self._events: list[CacheEvent] = []

    def stored(self, event: Stored) -> None:
        self._known.add(event.key)
        self._events.append(event)

    def removed(self, key: bytes) -> None:
        """Of any group."""
        if key in self._known:
            self._known.remove(key)
            self._events.append(Removed(key))

    def take(self) -> list[CacheEvent]:
        events, self._events = self._events, []
        return events
