"""The shapes that are compiled. The only place where a size is rounded up."""

from collections.abc import Iterable
from dataclasses import dataclass

from pagedjax.config import EngineConfig
from pagedjax.errors import check


@dataclass(frozen=True, order=True)
class Bucket:
    """T tokens in S rows. A bucket with as many tokens as rows is a decode bucket: each row has one token."""

    tokens: int  # T
    rows: int  # S

    @property
    def is_decode(self) -> bool:
        return self.tokens == self.rows

    def __str__(self) -> str:
        return f"{self.tokens}x{self.rows}"


def make_buckets(config: EngineConfig, *, on_cpu: bool, one_row: bool) -> tuple[Bucket, ...]:
    """All buckets of an engine, smallest first; `config` has no zeros left. `one_row`: a single row is worth a bucket of its
    own (float32 on CPU, where a matrix times one row runs at the speed of memory, and two rows at half of it); elsewhere the
    smallest has two rows, since a dot over one row is slow in bfloat16 on CPU and no faster anywhere else."""
    rows, budget = config.schedule.max_num_seqs, config.schedule.max_num_batched_tokens
    sizes = config.buckets.decode_rows or tuple(_ladder(1 if one_row else 2, rows, 4 if on_cpu else 2))
    check(sizes[-1] >= rows, f"the largest of decode_rows must be at least max_num_seqs {rows}; got {sizes[-1]}")
    tokens = config.buckets.prefill_tokens or tuple(_ladder(min(128, budget), budget, 4 if on_cpu else 2))
    check(tokens[-1] >= budget, f"the largest of prefill_tokens must be at least max_num_batched_tokens {budget}; got {tokens[-1]}")
    check(tokens[-1] > rows, f"the largest of prefill_tokens must be above max_num_seqs {rows}; got {tokens[-1]}")
    prefill = (Bucket(t, min(rows, max(1, t // 2))) for t in tokens)
    return tuple(sorted({*(Bucket(s, s) for s in sizes), *prefill}))


def pick(buckets: Iterable[Bucket], tokens: int, rows: int) -> Bucket:
    """The smallest bucket that holds the plan. A plan with as many tokens as rows may take a decode bucket."""
    for bucket in sorted(buckets):
        if bucket.tokens >= tokens and bucket.rows >= rows and (tokens == rows or not bucket.is_decode):
            return bucket
    raise RuntimeError(f"no compiled bucket holds {tokens} tokens in {rows} rows; there are {', '.join(map(str, sorted(buckets)))}")


def _ladder(low: int, high: int, factor: int) -> Iterable[int]:
    """low, low * factor, … and high at the end."""
    while low < high:
        yield low
        low *= factor
    yield high
