"""Cases for the tests of kv_write."""

from typing import NamedTuple

import numpy as np

from pallas_kernels.common.spec import Scales


class Case(NamedTuple):
    name: str
    rows: tuple[tuple[int, int], ...]  # (first position, tokens) a row
    padding: int = 0  # tokens with slot 0 behind them
    kv_heads: int = 2
    width: int = 8
    stored_width: int = 8
    block_size: int = 4
    dtype: str = "float32"
    most: int = 8  # blocks a row
    scales: Scales = "none"

    @property
    def blocks(self) -> int:
        return 1 + self.most * len(self.rows)

    def slots(self) -> np.ndarray:
        """i32[T]; the blocks of the rows are shuffled."""
        tables = 1 + np.random.default_rng(7).permutation(self.blocks - 1).reshape(len(self.rows), self.most)
        parts = [
            tables[s, position // self.block_size] * self.block_size + position % self.block_size
            for s, (first, n) in enumerate(self.rows)
            for position in [first + np.arange(n)]
        ]
        return np.concatenate([*parts, np.zeros(self.padding, np.int64)]).astype(np.int32)


CASES = (
    Case("decode", ((0, 1), (3, 1), (4, 1), (17, 1))),
    Case("decode bf16", ((0, 1), (3, 1), (4, 1), (17, 1)), dtype="bfloat16"),
    Case("one token", ((6, 1),)),
    Case("one padding token", ((0, 0),), padding=1),
    Case("prefill", ((0, 15),), padding=1),
    Case("across blocks", ((3, 2), (3, 6), (2, 1), (0, 9)), padding=3),
    Case("across blocks bf16", ((3, 2), (3, 6), (2, 1), (0, 9)), padding=3, dtype="bfloat16"),
    Case("most runs a row", ((3, 2), (3, 2), (3, 2), (3, 2), (3, 2))),
    Case("all padding", ((0, 0), (0, 0)), padding=6),
    Case("stored wider", ((1, 5), (9, 2)), width=5, kv_heads=3),
    Case("int8 by tensor", ((3, 2), (3, 6), (0, 9)), padding=3, dtype="int8", scales="tensor"),
    Case("int8 by token", ((3, 2), (3, 6), (0, 9)), padding=3, dtype="int8", scales="token", stored_width=16),
    Case("e4m3 by token", ((3, 2), (3, 6), (0, 9)), padding=3, dtype="float8_e4m3fn", scales="token", block_size=8),
    Case("e4m3 as it is", ((3, 2), (3, 6)), dtype="float8_e4m3fn", block_size=8),
    Case("block 16", ((10, 30), (15, 2), (16, 1)), block_size=16, kv_heads=1, padding=4),
)
