"""Prompts that begin alike and are computed at the same time: the one that is furthest leads, the others wait for it, and take over
what it has computed."""

from collections.abc import Iterable
from typing import NamedTuple

from pagedjax.host.found import Found
from pagedjax.host.sequence import Sequence
from pagedjax.host.tables import BlockTables


class Lead(NamedTuple):
    """Who computes what a sequence needs next, and up to which position the two have the same tokens, in whole blocks."""

    leader: Sequence
    until: int


def lead_of(sequence: Sequence, start: int, running: Iterable[Sequence], tables: BlockTables) -> Lead | None:
    """Who of the running ones is in the middle of the block that a sequence which has its first `start` tokens needs next. One that
    runs leads itself, where no other has more of that block."""
    size, at = tables.size, start // tables.size
    own = tables.hashes(sequence, 0, (len(sequence.tokens) - 1) // size)
    least = start + 1 if sequence.lane >= 0 else start
    for s in running:
        if s.num_scheduled // size != at or s.num_scheduled < least or s.length - s.num_scheduled < 2 or at >= len(own):
            continue
        theirs = tables.hashes(s, 0, len(s.tokens) // size)
        if len(theirs) > at and theirs[at][0] == own[at][0]:
            end = at + 1
            while end < min(len(own), len(theirs)) and theirs[end][0] == own[end][0]:
                end += 1
            return Lead(s, end * size)
    return None


def computed_by_others(sequence: Sequence, tables: BlockTables) -> Found | None:
    """More of the sequence's tokens than it has computed, where others have; None where they have not."""
    at, known = sequence.num_scheduled // tables.size, (len(sequence.tokens) - 1) // tables.size
    if tables.cache is None or at >= known or not tables.cache.get(*tables.hashes(sequence, 0, known)[at]):
        return None
    found = tables.find(sequence, known * tables.size, in_pool=True)
    return found if found.num_tokens > sequence.num_scheduled else None
