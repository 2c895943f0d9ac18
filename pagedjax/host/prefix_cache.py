"""Which block holds which tokens, so that a prompt is not computed where it is already in the pool.

Only whole blocks are shared. A block's key is a hash chained over the blocks before it, so that equal keys mean equal prefixes
(as in vLLM's automatic prefix caching); what the hash says is compared with the tokens themselves before a block is used.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

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

    def publish(self, key: bytes, content: Content, block: int) -> None:
        """`block` holds, or will when the steps in flight are done, this content. The first block of a key keeps it."""
        if key not in self._blocks and block not in self._contents:
            self._blocks[key] = block
            self._contents[block] = key, content
            self._pool.keep(block)

    def _forget(self, block: int) -> None:
        key, content = self._contents.pop(block)
        del self._blocks[key]
        self.on_forget(block, key, content)

    def check(self) -> None:
        """Raises AssertionError where the two tables differ or a chain does not add up."""
        assert {key: block for block, (key, _) in self._contents.items()} == self._blocks, "the prefix cache's tables differ"
        for key, content in self._contents.values():
            assert key == key_of(content.parent, content.tokens), "a block's key is not that of its content"
