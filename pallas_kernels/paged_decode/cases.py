"""Cases for the tests of paged_decode."""

from typing import NamedTuple

from pallas_kernels.common.spec import Scales


class Case(NamedTuple):
    name: str
    lens: tuple[int, ...]
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


CASES = (
    Case("edges", (0, 1, 15, 16, 17, 100)),
    Case("edges bf16", (0, 1, 15, 16, 17, 100), dtype="bfloat16"),
    Case("block 64", (1, 63, 64, 65, 200), block_size=64, group=3, kv_heads=3),
    Case("block 64 bf16", (1, 63, 64, 65, 200), block_size=64, group=3, kv_heads=3, dtype="bfloat16"),
    Case("one row", (37,)),
    Case("one row bf16", (37,), dtype="bfloat16", group=1),
    Case("one empty row", (0,)),
    Case("long bf16", (1000, 3), block_size=16, kv_heads=1, group=4, dtype="bfloat16"),
    Case("many rows", tuple(range(0, 66, 2)), kv_heads=1, group=1, width=8),
    Case("width 80", (5, 40), width=80, group=7, kv_heads=1),
    Case("width 128", (5, 40), width=128, group=4),
    Case("width 8", (5, 40), width=8, group=1, kv_heads=3),
    Case("stored wider bf16", (5, 0, 40), width=80, stored_width=128, dtype="bfloat16"),
    Case("window under a block", (0, 3, 7, 16, 50, 53), window=7),
    Case("window of a block", (0, 3, 16, 17, 50, 64), window=16),
    Case("window over blocks", (0, 3, 16, 17, 50, 90), window=40, dtype="bfloat16"),
    Case("window over lengths", (0, 3, 16, 17, 50), window=1000),
    Case("window of one", (0, 1, 16, 17), window=1),
    Case("soft cap", (0, 3, 50), soft_cap=2.0),
    Case("sinks", (0, 3, 50), sinks=True, group=3),
    Case("f16", (0, 3, 50, 33), dtype="float16", group=5),
    Case("int8 by tensor", (0, 3, 50, 33), dtype="int8", scales="tensor", width=128),
    Case("int8 by token", (0, 1, 15, 16, 17, 100), dtype="int8", scales="token", group=3, block_size=32),
    Case("e4m3 by tensor", (0, 3, 50, 33), dtype="float8_e4m3fn", scales="tensor", block_size=32),
    Case("e4m3 by token", (0, 1, 31, 32, 33, 100), dtype="float8_e4m3fn", scales="token", block_size=32, width=128),
    Case("e4m3 as it is", (3, 50), dtype="float8_e4m3fn", block_size=32),
    Case("int8 and everything", (0, 3, 50), dtype="int8", scales="token", sinks=True, soft_cap=3.0, window=20, group=3),
    Case("everything", (0, 3, 50, 33), sinks=True, group=3, soft_cap=3.0, window=20, dtype="bfloat16", width=64, stored_width=128),
)
