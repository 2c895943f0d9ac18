"""10,000 random operations on the block pool and the prefix cache, against dictionaries."""

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule, run_state_machine_as_test

from pagedjax.errors import UserError
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.prefix_cache import PrefixCache

SIZE = 2
CAPACITY = 16
SALTS = ("", "tenant")
EXAMPLES, STEPS = 150, 100

numbers = st.integers(0, 10**6)


class PoolMachine(RuleBasedStateMachine):
    """Sequences of few different tokens come, find their prefix, grow, fork, copy what they write to, and go. The oracle knows
    which tokens stand in which block; it is told which block is reclaimed, and looks whether that may be."""

    sequences = Bundle("sequences")
    seen: Counter[str] = Counter()  # operations, and what happened in them

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(CAPACITY + 1, retained=0.5)
        self.cache = PrefixCache(self.pool, SIZE)
        self.forget, self.pool.on_reuse = self.pool.on_reuse, self.reuse
        self.names = 0
        self.live: dict[int, tuple[str, list[int], list[int]]] = {}  # salt, tokens, blocks
        self.named: dict[int, tuple[str, tuple[int, ...]]] = {}  # by block: salt and all tokens up to its end
        self.pins: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.now = 0.0

    def reuse(self, block: int) -> None:
        assert block in self.named and not self.refs()[block], "a block in use or without a name was given out again"
        del self.named[block]
        self.forget(block)

    def refs(self) -> Counter[int]:
        return Counter(block for _, _, blocks in self.live.values() for block in blocks)

    def take(self, count: int) -> list[int]:
        before, named, pinned = self.refs(), dict(self.named), self.pinned_texts()
        blocks = self.pool.allocate(count)
        for block in named.keys() - self.named.keys():
            self.seen["pinned reclaimed" if named[block] in pinned else "reclaimed"] += 1
        assert len(set(blocks)) == count and not any(before[block] or block in self.named for block in blocks)
        return blocks

    def start(self, salt: str, tokens: list[int], blocks: list[int]) -> int:
        self.names += 1
        self.live[self.names] = salt, tokens, blocks
        return self.names

    def publish(self, name: int) -> None:
        salt, tokens, blocks = self.live[name]
        for i, (key, content) in enumerate(self.cache.keys(salt, tokens)):
            text = salt, tuple(tokens[: (i + 1) * SIZE])
            if text not in self.named.values() and blocks[i] not in self.named:
                self.named[blocks[i]] = text
            self.cache.publish(key, content, blocks[i])

    @rule(target=sequences, salt=st.sampled_from(SALTS), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def enter(self, salt: str, tokens: list[int]) -> int:
        """Finds exactly the longest prefix that is named; a pool that is too full for the rest turns it away."""
        found = self.cache.find(salt, tokens)
        texts = {text: block for block, text in self.named.items()}
        wanted = []
        while (text := (salt, tuple(tokens[: (len(wanted) + 1) * SIZE]))) in texts and len(text[1]) == (len(wanted) + 1) * SIZE:
            wanted.append(texts[text])
        assert found == wanted
        self.seen["found"] += bool(found)
        refs = self.refs()
        assert self.pool.num_idle(found) == sum(not refs[block] for block in found)
        need = -(-len(tokens) // SIZE) - len(found)
        if need + self.pool.num_idle(found) > self.pool.num_free:
            self.seen["pool full"] += 1
            return self.start(salt, [], [])
        self.pool.share(found)
        name = self.start(salt, tokens, list(found))
        self.live[name][2].extend(self.take(need))
        self.publish(name)
        return name

    @rule(name=sequences, token=st.integers(0, 1))
    def append(self, name: int, token: int) -> None:
        """Into a new block, into its own last one, or into a copy of one that others hold or may find."""
        salt, tokens, blocks = self.live[name]
        if not self.pool.num_free:
            return
        if len(tokens) % SIZE == 0:
            blocks += self.take(1)
        elif self.refs()[blocks[-1]] > 1:
            (copy,) = self.take(1)
            self.pool.release([blocks[-1]])
            blocks[-1] = copy
            self.seen["copied"] += 1
        tokens.append(token)
        self.publish(name)

    @rule(target=sequences, name=sequences)
    def fork(self, name: int) -> int:
        salt, tokens, blocks = self.live[name]
        self.pool.share(blocks)
        return self.start(salt, list(tokens), list(blocks))

    @rule(name=consumes(sequences), retention=st.integers(0, 10), seconds=st.integers(1, 20))
    def leave(self, name: int, retention: int, seconds: int) -> None:
        _, _, blocks = self.live[name]
        if retention:
            self.pool.retain(blocks, retention, seconds)
        del self.live[name]
        self.pool.release(reversed(blocks))

    @rule(share=st.integers(1, 4))
    def need(self, share: int) -> None:
        """Somebody takes so many quarters of what is free, and goes."""
        self.pool.release(self.take(self.pool.num_free * share // 4))

    @rule(salt=st.sampled_from(SALTS), tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=12))
    def pin(self, salt: str, tokens: list[int]) -> None:
        whole = tuple(tokens[: len(tokens) // SIZE * SIZE])
        if len(self.pinned_texts() | self.texts(salt, whole)) > CAPACITY // 2:
            with pytest.raises(UserError, match="pinned prefixes may have 8 blocks together"):
                self.cache.pin(salt, tokens)
            self.seen["too many pins"] += 1
        else:
            assert self.cache.pin(salt, tokens) == len(whole) // SIZE
            self.pins[salt, whole] += 1

    @precondition(lambda self: self.named)
    @rule(number=numbers)
    def pin_what_is_there(self, number: int) -> None:
        salt, tokens = sorted(self.named.values())[number % len(self.named)]
        self.pin(salt, list(tokens))

    @precondition(lambda self: self.pins)
    @rule(number=numbers)
    def unpin(self, number: int) -> None:
        pinned = sorted(self.pins)[number % len(self.pins)]
        self.cache.unpin(*pinned)
        self.pins -= Counter([pinned])

    @rule()
    def flush(self) -> None:
        refs = self.refs()
        idle = sum(not refs[block] for block in self.named)
        assert self.cache.flush() == idle
        assert all(refs[block] for block in self.named)

    @rule(seconds=st.integers(0, 30))
    def wait(self, seconds: int) -> None:
        self.now += seconds
        self.pool.advance(self.now)

    def texts(self, salt: str, tokens: tuple[int, ...]) -> set[tuple[str, tuple[int, ...]]]:
        return {(salt, tokens[:end]) for end in range(SIZE, len(tokens) + 1, SIZE)}

    def pinned_texts(self) -> set[tuple[str, tuple[int, ...]]]:
        return set().union(*(self.texts(*pinned) for pinned in self.pins))

    @invariant()
    def nothing_is_lost_or_held_twice(self) -> None:
        self.seen["operation"] += 1
        refs = self.refs()
        assert self.pool.num_free == CAPACITY - len(refs)
        assert len(self.cache) == len(self.named)
        assert self.pool.kept == self.named.keys()
        assert self.pool.pinned == {block for block, text in self.named.items() if text in self.pinned_texts()}
        self.pool.check(blocks for _, _, blocks in self.live.values())
        self.cache.check()

    def teardown(self) -> None:
        """All can be had at once when all have left, pins or not."""
        for _, _, blocks in self.live.values():
            self.pool.release(blocks)
        self.live.clear()
        assert sorted(self.pool.allocate(CAPACITY)) == list(range(1, CAPACITY + 1))
        assert not self.named and len(self.cache) == 0


def run(machine: type[PoolMachine], examples: int, phases: Iterable[Phase] = tuple(Phase)) -> None:
    checks = list(HealthCheck)
    options = settings(
        max_examples=examples, stateful_step_count=STEPS, deadline=None, database=None, suppress_health_check=checks, phases=phases
    )
    run_state_machine_as_test(machine, settings=options)


def test_ten_thousand_operations() -> None:
    seen = PoolMachine.seen
    seen.clear()
    run(PoolMachine, EXAMPLES)
    assert seen["operation"] >= 10_000
    assert all(seen[what] for what in ("found", "copied", "reclaimed", "too many pins", "pool full")), seen


class Leaks(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        release = self.pool.release
        self.pool.release = lambda blocks: release(list(blocks)[:4])


class FreesTwice(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        allocate = self.pool.allocate
        self.pool.allocate = lambda count: [self.pool._free.append(b) or b if count > 3 else b for b in allocate(count)]


class Remembers(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        self.forget = lambda block: None


class LosesPins(PoolMachine):
    def __init__(self) -> None:
        super().__init__()
        publish = self.cache.publish
        self.cache.publish = lambda *args: (publish(*args), self.pool.unpin(args[-1]))[0]


@pytest.mark.parametrize("broken", [Leaks, FreesTwice, Remembers, LosesPins])
def test_what_is_broken_is_found(broken: type[PoolMachine]) -> None:
    """The control."""
    with pytest.raises(AssertionError):
        run(broken, EXAMPLES, [Phase.generate])
