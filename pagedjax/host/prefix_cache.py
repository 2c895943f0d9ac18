"""Which block holds which tokens, so that a prompt is not computed where it is already in the pool.

Only whole blocks are shared. A block's key is a hash chained over the blocks before it, so that equal keys mean equal prefixes
(as in vLLM's automatic prefix caching); what the hash says is compared with the tokens themselves before a block is used.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from pagedjax.errors import check
from pagedjax.host.block_pool import BlockPool


@dataclass(frozen=True)
class Content:
    """What stands in a block, and behind which one."""

    parent: bytes  # key of the block before it; of the first block: of the salt
    tokens: bytes  # i32[P]


def key_of(parent: bytes, tokens: bytes) -> bytes:
    return blake2b(parent + tokens, digest_size=16).digest()


class PrefixCache:
    """Names the blocks of the pool. A named block that nobody refers to stays readable until the pool gives it out again.

    The device runs steps in order: a block may be read by the plan that writes it and by all later ones, before any is committed.
    """

    def __init__(self, pool: BlockPool, block_size: int):
        self._pool, self._size = pool, block_size
        self._blocks: dict[bytes, int] = {}
        self._contents: dict[int, tuple[bytes, Content]] = {}  # by block: its key and content
        self.on_forget: Callable[[int, bytes, Content], None] = lambda *_: None  # called before a named block is given out again
        self._pins: Counter[bytes] = Counter()  # by key, of blocks that are there and of those that may come
        self._prefixes: Counter[bytes] = Counter()  # pins by the key of their last block
        pool.on_reuse = self._forget

    def __len__(self) -> int:
        return len(self._blocks)

    def keys(self, salt: str, tokens: Sequence[int], known: Sequence[bytes] = ()) -> Iterator[tuple[bytes, Content]]:
        """(key, content) of the whole blocks of tokens that come after those whose keys are known."""
        parent = known[-1] if known else key_of(b"", salt.encode())
        for start in range(len(known) * self._size, len(tokens) - self._size + 1, self._size):
            content = Content(parent, np.asarray(tokens[start : start + self._size], np.int32).tobytes())
            parent = key_of(parent, content.tokens)
            yield parent, content

    def get(self, key: bytes, content: Content) -> int:
        """The block that holds this content, behind the blocks that its key stands for; 0 where there is none."""
        block = self._blocks.get(key, 0)
        return block if block and self._contents[block][1] == content else 0

    def find(self, salt: str, tokens: Sequence[int]) -> list[int]:
        """The blocks that hold the longest known prefix of tokens, in whole blocks."""
        return list(itertools.takewhile(bool, (self.get(key, content) for key, content in self.keys(salt, tokens))))

    def publish(self, key: bytes, content: Content, block: int) -> bool:
        """`block` holds, or will when the steps in flight are done, this content. The first block of a key keeps it; whether this
        one does."""
        if key in self._blocks or block in self._contents:
            return False
        self._blocks[key] = block
        self._contents[block] = key, content
        self._pool.keep(block)
        if key in self._pins:
            self._pool.pin(block)
        return True

    def pin(self, salt: str, tokens: Sequence[int]) -> int:
        """Holds on to the whole blocks of tokens, those that are cached and those that will be, until `unpin`; how many these are.

        A pinned block is given out when sequences need it and nothing else is left, and is pinned again when it has been computed
        again. Pins are counted. UserError where there is no whole block, or more than the pool may hold on to."""
        keys = [key for key, _ in self.keys(salt, tokens)]
        check(len(keys) > 0, f"a pinned prefix must fill a block of {self._size} tokens; got {len(tokens)}")
        most, total = self._pool.retained_blocks, len(self._pins.keys() | set(keys))
        check(total <= most, f"pinned prefixes may have {most} blocks together; got {total}, of which {len(self._pins)} are pinned")
        self._prefixes[keys[-1]] += 1
        for key in keys:
            self._pins[key] += 1
            if key in self._blocks:
                self._pool.pin(self._blocks[key])
        return len(keys)

    def unpin(self, salt: str, tokens: Sequence[int]) -> int:
        """Takes back one `pin` of the same tokens; how many blocks these are. UserError where there is none."""
        keys = [key for key, _ in self.keys(salt, tokens)]
        pinned = bool(keys) and self._prefixes[keys[-1]] > 0
        check(pinned, f"unpin must name the tokens of a pin; got {len(tokens)} tokens that are not pinned")
        self._prefixes -= Counter([keys[-1]])
        for key in keys:
            self._pins[key] -= 1
            if not self._pins[key]:
                del self._pins[key]
                if key in self._blocks:
                    self._pool.unpin(self._blocks[key])
        return len(keys)

    def flush(self) -> int:
        """Forgets all blocks without references; how many. Pins stay, and hold what is computed again."""
        return self._pool.flush()

    def _forget(self, block: int) -> None:
        key, content = self._contents.pop(block)
        del self._blocks[key]
        self.on_forget(block, key, content)

    def check(self) -> None:
        """Raises AssertionError where the tables and the pool differ or a chain does not add up."""
        assert {key: block for block, (key, _) in self._contents.items()} == self._blocks, "the prefix cache's tables differ"
        assert self._contents.keys() == self._pool.kept, "the pool keeps other blocks than those that have a name"
        pinned = {block for block, (key, _) in self._contents.items() if key in self._pins}
        assert pinned == self._pool.pinned and len(self._pins) <= self._pool.retained_blocks, "the pool's pins are not the cache's"
        for key, content in self._contents.values():
            assert key == key_of(content.parent, content.tokens), "a block's key is not that of its content"
