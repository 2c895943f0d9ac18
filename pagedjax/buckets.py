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
    least = 1 if one_row else 2
    lanes, budget = config.schedule.max_num_seqs, config.schedule.max_num_batched_tokens
    rows = max(lanes, least)
    # On CPU a shape takes seconds to compile, and a step of half the rows a third less time.
    ladder = {*_ladder(least, rows, 4), max(least, rows // 2)} if on_cpu else _ladder(least, rows, 2)
    sizes = config.buckets.decode_rows or tuple(sorted(ladder))
    check(
        sizes[0] >= least,
        f"decode_rows must start at 2 or more (1 has a use in float32 on one CPU device only); got {sizes[0]}",
    )
    check(sizes[-1] >= lanes, f"the largest of decode_rows must be at least max_num_seqs {lanes}; got {sizes[-1]}")
    # Above the rows: a bucket with as many tokens as rows is for decoding only.
    most = max(budget, rows + 1)
    tokens = config.buckets.prefill_tokens or tuple(_ladder(min(128, most), most, 4 if on_cpu else 2))
    check(
        tokens[0] >= least,
        f"prefill_tokens must start at 2 or more (1 has a use in float32 on one CPU device only); got {tokens[0]}",
    )
    check(tokens[-1] >= budget, f"the largest of prefill_tokens must be at least max_num_batched_tokens {budget}; got {tokens[-1]}")
    check(tokens[-1] > rows, f"the largest of prefill_tokens must be above {rows}, the rows it holds; got {tokens[-1]}")
    sizes, tokens = within(config.buckets.compile_budget, sizes, tokens)
    # The largest takes every plan there can be; the others save time where prompts are few and long.
    prefill = (Bucket(t, rows if t == tokens[-1] else min(rows, max(least, t // 2))) for t in tokens)
    return tuple(sorted({*(Bucket(s, s) for s in sizes), *prefill}))


def within(budget: int, *ladders: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Ascending ladders with at most `budget` sizes together (0: no bound), and each its largest. One size after the other goes,
    always the one without which the factor that a plan may be rounded up by is the least."""
    kept = [list(sizes) for sizes in ladders]
    while budget and sum(map(len, kept)) > budget:
        gaps = [(sizes[i + 1] / (sizes[i - 1] if i else 1), i, sizes) for sizes in kept for i in range(len(sizes) - 1)]
        _, i, sizes = min(gaps, key=lambda gap: gap[0])
        del sizes[i]
    return tuple(map(tuple, kept))


def pick(buckets: Iterable[Bucket], tokens: int, rows: int, *, steps: int = 1, scores: bool = False) -> Bucket:
    """The smallest bucket that holds the plan. A plan with as many tokens as rows may take a decode bucket, unless it scores a
    prompt, and must where it has several steps: only those run more than one."""
    for bucket in sorted(buckets):
        fits = tokens == rows and not scores if bucket.is_decode else steps == 1
        if fits and bucket.tokens >= tokens and bucket.rows >= rows:
            return bucket
    raise RuntimeError(f"no compiled bucket holds {tokens} tokens in {rows} rows; there are {', '.join(map(str, sorted(buckets)))}")


def _ladder(low: int, high: int, factor: int) -> Iterable[int]:
    """low, low * factor, … and high at the end."""
    while low < high:
        yield low
        low *= factor
    yield high
