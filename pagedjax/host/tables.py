"""Which blocks each sequence holds: found in the prefix cache, given out as it grows, shared and copied on write, freed behind a
window, kept in host memory. Plain bookkeeping: what the device must do for it goes into the plan as copies and swaps.
"""

from collections.abc import Iterator

import numpy as np

from pagedjax.errors import UserError, check
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.cache_log import CacheLog, Stored
from pagedjax.host.found import Found, first_seen, usable
from pagedjax.host.moves import Moves
from pagedjax.host.plan import Copy, Swap
from pagedjax.host.prefix_cache import Content, PrefixCache
from pagedjax.host.request import Request
from pagedjax.host.reserve import BuddyPool, Reserve, reserved_slots
from pagedjax.host.sequence import Sequence


class BlockTables:
    """The blocks of all sequences. `windows` has one entry for each layer group: the tokens its layers see, or None for all.

    Host memory is a second level of the prefix cache, with places instead of blocks: a named block that the pool gives out again
    goes there first, and so does the unnamed end of a sequence that is swapped out.
    """

    def __init__(
        self,
        pool: BlockPool | BuddyPool,
        block_size: int,
        *,
        max_model_len: int,
        chunk: int,
        windows: tuple[int | None, ...] = (None,),
        prefix_caching: bool = True,
        reserve: Reserve = "paged",
        places: int = 0,
        debug: bool = False,
    ):
        """chunk: the most tokens of a sequence that one step computes."""
        check(reserve == "paged" or len(windows) == 1, f"reserve must be paged where layers see differently far; got {reserve}")
        self.pool, self.size, self.windows, self.chunk = pool, block_size, windows, chunk
        self.windowed = any(window is not None for window in windows)
        self.reserve: Reserve = reserve
        self.max_model_len = max_model_len
        self.width = -(-max_model_len // block_size)
        self.cache = PrefixCache(pool, block_size) if prefix_caching and isinstance(pool, BlockPool) else None
        self.places = BlockPool(places + 1)  # place 0 is never given out
        self.tier = PrefixCache(self.places, block_size) if self.cache is not None and places else None
        self.log: CacheLog | None = None  # of what the cache learns and forgets, for whoever asks
        if self.cache is not None:
            self.cache.on_forget = self._forget
        self._moves = Moves(fresh=[] if debug else None)  # of the plan in the making

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.size)

    def most(self, num_tokens: int) -> int:
        """Blocks that a sequence of num_tokens holds at most."""
        whole = self.blocks_for(num_tokens)
        return sum(min(whole, self._bound(window)) for window in self.windows)

    def _bound(self, window: int | None) -> int:
        """Blocks that a sequence of any length holds at most in a group of this window."""
        return self.width if window is None else self.blocks_for(window + self.chunk) + 1

    def empty(self) -> np.ndarray:
        return np.zeros((len(self.windows), self.width), np.int32)

    def sequence(self, request: Request, index: int, max_len: int, epoch: int, arrival: float = 0.0, order: int = 0) -> Sequence:
        """A new one, which holds nothing."""
        groups = range(len(self.windows))
        constraint = None if request.constraint is None else request.constraint.copy()
        return Sequence(
            request,
            index,
            max_len,
            list(request.prompt),
            self.empty(),
            blocks=[[] for _ in groups],
            hashes=[[] for _ in groups],
            epoch=epoch,
            arrival=arrival,
            order=order,
            constraint=constraint,
            mask=None if constraint is None else constraint.mask(),
        )

    def advance(self, now: float) -> None:
        """Sets the clock by which retention fades."""
        if isinstance(self.pool, BlockPool):
            self.pool.advance(now)
            self.places.advance(now)

    # --- growing ----------------------------------------------------------------------------------------------------

    def covers(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether it may compute up to its first num_tokens tokens with what it holds. Groups hold equally many blocks, those that
        have left the window counted."""
        return not sequence.forked and num_tokens <= len(sequence.blocks[0]) * self.size

    def missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that must be free before the sequence can compute up to its first num_tokens tokens."""
        if sequence.reserved:
            return 0
        need = max(0, self.blocks_for(num_tokens) - len(sequence.blocks[0])) * len(self.windows)
        return need + len(list(self._others_tails(sequence))) if sequence.forked else need

    def grows_after(self, sequence: Sequence, need: int) -> int:
        """Blocks that a sequence which needs so many to start takes next; 0 where it will take none, or can hold no more."""
        grows = self.reserve == "paged" and self.blocks_for(sequence.max_len - 1) > self.blocks_for(len(sequence.tokens))
        most = self.need(sequence.prompt_len, sequence.max_len)
        return max(0, min(len(self.windows), most - need)) if grows else 0

    def owed(self, sequence: Sequence) -> int:
        """Blocks that a running sequence will take for the tokens it has, and beyond them next."""
        if sequence.reserved:
            return 0
        held, groups = len(sequence.blocks[0]), len(self.windows)
        known = max(held, self.blocks_for(sequence.length))
        need = (known - held + (self.blocks_for(sequence.max_len - 1) > known)) * groups
        if self.windowed and need > groups:  # it gives blocks back on the way
            need = min(need, max(0, self.most(sequence.length) - sequence.num_held) + groups)
        return need + len(list(self._others_tails(sequence))) if sequence.forked else need

    def room(self, sequence: Sequence, free: int) -> int:
        """Tokens it can compute next with the blocks that it holds and so many more."""
        free -= self.missing(sequence, sequence.num_scheduled)
        blocks = len(sequence.blocks[0]) + free // len(self.windows)
        return blocks * self.size - sequence.num_scheduled if free >= 0 else 0

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Gives it the blocks it is `missing`; one that it is about to write to and another sequence holds, too, is copied."""
        if sequence.forked:
            at = sequence.num_scheduled // self.size
            for group in list(self._others_tails(sequence)):
                (block,) = self._allocate(1)
                self._moves.copies.append(Copy(sequence.blocks[group][at], block))
                self.pool.release([sequence.blocks[group][at]])
                sequence.blocks[group][at] = sequence.table[group, at] = block
            sequence.forked = False
        want = self.blocks_for(num_tokens)
        for group, blocks in enumerate(sequence.blocks):
            held = len(blocks)
            if want > held:
                blocks += self._allocate(want - held)
                sequence.table[group, held:want] = blocks[held:]

    def _others_tails(self, sequence: Sequence) -> Iterator[int]:
        """Groups whose block at the next position holds tokens and is not the sequence's alone."""
        at, place = divmod(sequence.num_scheduled, self.size)
        for group, blocks in enumerate(sequence.blocks):
            if place and at < len(blocks) and self.pool.is_shared(blocks[at]):
                yield group

    def trim(self, sequence: Sequence) -> None:
        """Frees the blocks that no position from num_scheduled on can see."""
        for group, window in enumerate(self.windows):
            if window is None or sequence.reserved:
                continue
            blocks = sequence.blocks[group]
            end = min(len(blocks), first_seen(sequence.num_scheduled, window, self.size))
            start = end
            while start and blocks[start - 1]:
                start -= 1
            if start < end:
                self._retain(sequence, group, start, end)
                self.pool.release(reversed(blocks[start:end]))
                blocks[start:end] = [0] * (end - start)
                sequence.table[group, start:end] = 0

    def release(self, sequence: Sequence) -> None:
        """The sequence gives back all its blocks; those of its prompt are held on to as its request asks."""
        if self._moves.copies:  # those of beams that are preempted before the row that they were made for
            self._moves.forget({block for block in sequence.held if not self.pool.is_shared(block)})
        for group, blocks in enumerate(sequence.blocks):
            self._retain(sequence, group, 0, len(blocks))
        for blocks in sequence.blocks:
            self.pool.release(block for block in reversed(blocks) if block)
            blocks.clear()
        sequence.table = self.empty()  # a step in flight may still be packed from the old one
        sequence.named, sequence.forked, sequence.borrowed = 0, False, 0

    def _retain(self, sequence: Sequence, group: int, start: int, end: int) -> None:
        """Of its blocks there, which it is about to give back, those of its prompt are held on to as its request asks."""
        service = sequence.request.service
        if service.retention and isinstance(self.pool, BlockPool):
            prompt = sequence.blocks[group][start : min(end, sequence.named, sequence.prompt_len // self.size)]
            self.pool.retain(filter(None, prompt), service.retention, service.retention_seconds)

    # --- starting ---------------------------------------------------------------------------------------------------

    def find(self, sequence: Sequence, num_tokens: int, *, in_pool: bool = False) -> Found:
        """The longest beginning of the sequence's first num_tokens tokens that is in the pool or in host memory; in_pool: only
        there."""
        if self.cache is None:
            return Found(0, [[] for _ in self.windows])
        rows = []
        for group, window in enumerate(self.windows):
            row: list[int] = []
            for key, content in self.hashes(sequence, group, num_tokens // self.size):
                block = self.cache.get(key, content)
                if not block and self.tier is not None and not in_pool:
                    block = -self.tier.get(key, content)
                if not block and window is None:
                    break
                row.append(block)
            rows.append(row)
        return usable(rows, self.windows, self.size)

    def to_start(self, sequence: Sequence, found: Found, num_tokens: int) -> int:
        """Blocks that must be free before the sequence can start from what was found and hold its first num_tokens tokens."""
        if self.reserve != "paged":
            return self.blocks_for(self._run(sequence))
        known = [block for blocks in found.blocks for block in blocks]
        more = self.blocks_for(num_tokens) - found.num_tokens // self.size
        new = len(self.windows) * more
        if self.windowed:
            held = (sum(map(bool, blocks)) for blocks in found.blocks)
            kept = [sum(map(bool, places)) for places in sequence.places] or [0] * len(self.windows)
            new = sum(max(k, min(more, self._bound(w) - h)) for w, h, k in zip(self.windows, held, kept, strict=True))
        return new + sum(block < 0 for block in known) + self.pool.num_idle(block for block in known if block > 0)

    def _run(self, sequence: Sequence) -> int:
        return reserved_slots(self.reserve, sequence.prompt_len, sequence.max_len, self.max_model_len)

    def need(self, prompt: int, max_len: int) -> int:
        """Blocks that a sequence of so many tokens of prompt and of both needs in its life: its run, where sequences reserve, else
        the most it holds at a time (its last token is never written)."""
        run = reserved_slots(self.reserve, prompt, max_len, self.max_model_len)
        return self.blocks_for(run) if run else self.most(max_len - 1)

    def start(self, sequence: Sequence, found: Found) -> None:
        """The sequence holds what was found; where sequences reserve, its run."""
        if self.reserve != "paged":
            sequence.reserved = self._run(sequence)
            sequence.blocks[0] += self._allocate(self.blocks_for(sequence.reserved))
            sequence.table[0, : len(sequence.blocks[0])] = sequence.blocks[0]
            return
        known = [block for blocks in found.blocks for block in blocks if block > 0]
        sequence.borrowed = len(known) - self.pool.num_idle(known)
        for blocks in found.blocks:  # all of them before any block is given out, which may push others out
            self.pool.share(block for block in blocks if block > 0)
            lent = [-block for block in blocks if block < 0]
            self.places.share(lent)
            self._moves.lent += lent
        for group, blocks in enumerate(found.blocks):
            own = sequence.blocks[group]
            own += [block if block >= 0 else self._bring_back(-block) for block in blocks]
            sequence.table[group, : len(own)] = own
        self.publish(sequence, found.num_tokens)

    def take_over(self, sequence: Sequence, found: Found) -> None:
        """A sequence in the middle of its prompt holds, in place of its own blocks, what was found in the pool, which is more."""
        for blocks in found.blocks:
            self.pool.share(filter(None, blocks))
        for group, (own, blocks) in enumerate(zip(sequence.blocks, found.blocks, strict=True)):
            self.pool.release(filter(None, reversed(own)))
            own[:] = blocks
            sequence.table[group, : len(own)] = own
        sequence.borrowed = sum(self.pool.is_shared(block) for block in sequence.held)
        self.publish(sequence, found.num_tokens)

    def _bring_back(self, place: int) -> int:
        (block,) = self._allocate(1)
        self._moves.swap_in.append(Swap(block, place))
        return block

    def can_fork(self, parent: Sequence, num_tokens: int) -> bool:
        """Whether the parent still holds all that a sequence of num_tokens tokens sees."""
        if parent.reserved or parent.num_scheduled < num_tokens:
            return False
        count = self.blocks_for(num_tokens)
        firsts = (first_seen(num_tokens, window, self.size) for window in self.windows)
        return all(all(blocks[first:count]) for first, blocks in zip(firsts, parent.blocks, strict=True))

    def fork(self, parent: Sequence, child: Sequence, num_tokens: int) -> None:
        """`child`, which holds nothing, holds the parent's first num_tokens tokens, too. Whoever writes to the last block first
        gets a copy of it."""
        count = self.blocks_for(num_tokens)
        for group, blocks in enumerate(parent.blocks):
            shared = blocks[:count]
            self.pool.share(block for block in shared if block)
            child.blocks[group] += shared
            child.table[group, :count] = shared
            child.hashes[group] = parent.hashes[group][: num_tokens // self.size]
        child.named = min(parent.named, num_tokens // self.size)
        child.borrowed = num_tokens // self.size * len(self.windows)  # whoever writes to the last block has one of its own then
        child.forked = parent.forked = True

    # --- naming -----------------------------------------------------------------------------------------------------

    def hashes(self, sequence: Sequence, group: int, count: int) -> list[tuple[bytes, Content]]:
        """(key, content) of the sequence's first `count` blocks; what was hashed once is kept. Groups have keys of their own."""
        known = sequence.hashes[group]
        if self.cache is not None and len(known) < count:
            salt, tokens = f"{group}:{sequence.request.salt}", sequence.tokens[: count * self.size]
            known.extend(self.cache.keys(salt, tokens, [key for key, _ in known]))
        return known if len(known) == count else known[:count]

    def publish(self, sequence: Sequence, end: int) -> None:
        """Makes the sequence's whole blocks below position `end` known to others."""
        count = min(end, len(sequence.tokens)) // self.size
        if self.cache is not None and sequence.named < count:
            for group, blocks in enumerate(sequence.blocks):
                for i, (key, content) in enumerate(self.hashes(sequence, group, count)):
                    if i >= sequence.named and blocks[i]:
                        new = self.cache.publish(key, content, blocks[i])
                        if new and self.log is not None and group == self.log.group:
                            salt = sequence.request.salt
                            self.log.stored(Stored(key, content.parent if i else None, content.tokens, salt))
            sequence.named = count

    def pin(self, salt: str, tokens: list[int]) -> int:
        """Holds on to the whole blocks of a prefix, those that are cached and those that will be, until `unpin`; how many."""
        cache, salts = self._pins("pin"), [f"{group}:{salt}" for group in range(len(self.windows))]
        for done, own in enumerate(salts):
            try:
                cache.pin(own, tokens)
            except UserError:  # all groups or none
                for pinned in salts[:done]:
                    cache.unpin(pinned, tokens)
                raise
        return len(salts) * (len(tokens) // self.size)

    def unpin(self, salt: str, tokens: list[int]) -> int:
        return sum(self._pins("unpin").unpin(f"{group}:{salt}", tokens) for group in range(len(self.windows)))

    def _pins(self, what: str) -> PrefixCache:
        if self.cache is None:
            raise UserError(f"{what} needs prefix_caching; it is off")
        return self.cache

    def flush(self) -> int:
        """Forgets all cached blocks that no sequence holds, in host memory too; how many of the pool."""
        if self.cache is None:
            return 0
        self.cache.on_forget = self._note_forgotten  # host memory forgets, too
        flushed = self.cache.flush()
        self.cache.on_forget = self._forget
        if self.tier is not None:
            self.tier.flush()
        return flushed

    # --- host memory ------------------------------------------------------------------------------------------------

    def _note_forgotten(self, block: int, key: bytes, content: Content) -> None:
        if self.log is not None:
            self.log.removed(key)

    def _forget(self, block: int, key: bytes, content: Content) -> None:
        """`block`, which is about to be given out again, is copied to a place first where there is host memory."""
        self._note_forgotten(block, key, content)
        if self.tier is not None and self.places.num_free and not self.tier.get(key, content):
            (place,) = self.places.allocate(1)
            self.tier.publish(key, content, place)
            self.places.release([place])
            self._moves.swap_out.append(Swap(block, place))

    def unnamed(self, sequence: Sequence) -> int:
        """Blocks behind the named ones, which nothing else would keep."""
        return sum(bool(block) for blocks in sequence.blocks for block in blocks[sequence.named :])

    def swap_out(self, sequence: Sequence) -> None:
        """Keeps the blocks behind the named ones in host memory and gives back all. The caller has checked `unnamed` against
        places.num_free."""
        sequence.behind = sequence.named
        for blocks in sequence.blocks:
            end = blocks[sequence.named :]
            places = [self.places.allocate(1)[0] if block else 0 for block in end]
            sequence.places.append(places)
            self._moves.swap_out += [Swap(block, place) for block, place in zip(end, places, strict=True) if block]
        self.release(sequence)

    def swap_in(self, sequence: Sequence) -> None:
        """What was kept, behind the blocks it has started from."""
        for group, places in enumerate(sequence.places):
            own = sequence.blocks[group]
            new = iter(self._allocate(sum(place > 0 for place in places)))
            own += [next(new) if place else 0 for place in places]
            sequence.table[group, : len(own)] = own
            kept = zip(own[sequence.behind :], places, strict=True)
            self._moves.swap_in += [Swap(block, place) for block, place in kept if place]
            self._moves.lent += [place for place in places if place]
        sequence.places.clear()

    def drop_places(self, sequence: Sequence) -> None:
        """What was kept is needed no more."""
        self.places.release(place for places in sequence.places for place in places if place)
        sequence.places.clear()

    def _allocate(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        if self._moves.fresh is not None:
            self._moves.fresh += blocks
        return blocks

    def take_moves(self) -> tuple[tuple[Copy, ...], tuple[Swap, ...], tuple[Swap, ...], tuple[int, ...]]:
        """(copies, swap_out, swap_in, fresh) of the plan that was made, and those of the next one begin."""
        moves, fresh = self._moves, self._moves.fresh
        self._moves = Moves(fresh=None if fresh is None else [])
        self.places.release(moves.lent)
        return tuple(moves.copies), tuple(moves.swap_out), tuple(moves.swap_in), tuple(fresh or ())

    def check(self, sequences: list[Sequence]) -> None:
        """Recounts who holds what; raises AssertionError where it does not add up."""
        self.pool.check(s.held for s in sequences)
        self.places.check([*([p for p in places if p] for s in sequences for places in s.places), self._moves.lent])
        for cache in (self.cache, self.tier):
            if cache is not None:
                cache.check()
        for s in sequences:
            for row, blocks in zip(s.table, s.blocks, strict=True):
                assert list(row[: len(blocks)]) == blocks, f"{s.key}: the table differs from the blocks"
                assert not row[len(blocks) :].any(), f"{s.key}: the table names blocks the sequence does not hold"
