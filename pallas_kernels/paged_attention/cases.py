"""Cases for the tests of paged_attention."""

from typing import NamedTuple

from pallas_kernels.common.spec import Scales


class Case(NamedTuple):
    name: str
    rows: tuple[tuple[int, int], ...]  # (context length, query tokens among them) a row; decode rows first; (0, 0): padding
    tokens: int  # T
    num_decode: int = 0
    kv_heads: int = 2
    group: int = 2
    width: int = 64
    block_size: int = 16
    stored_width: int | None = None
    dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    scales: Scales = "none"


MIXED = ((20, 1), (1, 1), (33, 1), (40, 40), (70, 5), (16, 16), (0, 0))

CASES = (
    Case("prefill", ((5, 5), (17, 17)), 32),
    Case("long prefill bf16", ((300, 300),), 300, kv_heads=1, group=3, dtype="bfloat16"),
    Case("chunk on cached context", ((600, 130), (20, 1)), 160, block_size=64, kv_heads=1),
    Case("mixed", MIXED, 72, num_decode=3),
    Case("mixed, no padding", MIXED[:-1], 64, num_decode=3, kv_heads=3, group=1, width=8),
    Case("decode only", ((20, 1), (1, 1), (33, 1), (0, 0)), 16, num_decode=3),
    Case("more rows than tokens", ((20, 1), (9, 3), (0, 0), (0, 0), (0, 0), (0, 0)), 4, num_decode=1),
    Case("one token", ((20, 1), (0, 0)), 1, num_decode=1),
    Case("empty", ((0, 0), (0, 0)), 8),
    Case("width 80", ((40, 10), (18, 18)), 32, width=80, group=7, kv_heads=1),
    Case("width 128", ((40, 10), (18, 18)), 32, width=128, group=4),
    Case("stored wider bf16", MIXED, 72, num_decode=3, width=64, stored_width=128, dtype="bfloat16"),
    Case("window under a block", MIXED, 72, num_decode=3, window=7),
    Case("window of a block", MIXED, 72, num_decode=3, window=16, group=3),
    Case("window, long row", ((700, 200),), 200, kv_heads=1, window=100, block_size=16),
    Case("window over lengths", MIXED, 72, num_decode=3, window=500, dtype="bfloat16"),
    Case("soft cap", MIXED, 72, num_decode=3, soft_cap=2.0),
    Case("sinks", MIXED, 72, num_decode=3, sinks=True, group=3),
    Case("f16", MIXED, 72, num_decode=3, dtype="float16"),
    Case("int8 by tensor", MIXED, 72, num_decode=3, dtype="int8", scales="tensor"),
    Case("int8 by token", MIXED, 72, num_decode=3, dtype="int8", scales="token", group=3, block_size=32),
    Case("e4m3 by token", MIXED, 72, num_decode=3, dtype="float8_e4m3fn", scales="token", width=128, block_size=32),
    Case("int8 and everything", MIXED, 72, num_decode=3, dtype="int8", scales="token", sinks=True, soft_cap=3.0, window=20),
    Case("everything", MIXED, 72, num_decode=3, sinks=True, group=3, soft_cap=3.0, window=20, dtype="bfloat16", stored_width=128),
)
