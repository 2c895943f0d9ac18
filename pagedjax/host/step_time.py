"""How long a step takes, as a linear function of its work: what the simulator goes by in place of a device."""

import itertools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from pagedjax.errors import UserError, check


class Work(NamedTuple):
    """What one dispatch costs by, summed over its passes: a dispatch of several decode steps has as many passes, all others one."""

    passes: int
    tokens: int  # of the bucket, padding included
    rows: int  # of the bucket
    context: int  # cached tokens that are read: a chunk of a prompt reads those before and in it once
    pairs: int  # of a query and a key it sees; of decode rows the same as context
    moved: int = 0  # cached tokens that went to host memory or came back, in whole blocks


@dataclass(frozen=True)
class StepTime:
    """Seconds for each unit of Work; none is negative, and the sum of their products is the time of a dispatch.

    A pass reads all weights, a token is multiplied with them, context is read from the pool, pairs are computed, and what is moved
    goes over the host's bus. The parts are added, as if none went on while another does.
    """

    per_pass: float = 0.0
    per_token: float = 0.0
    per_row: float = 0.0
    per_context: float = 0.0
    per_pair: float = 0.0
    per_moved: float = 0.0

    def __post_init__(self):
        for name, value in asdict(self).items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            check(number and 0 <= value < math.inf, f"a step time's {name} must be seconds, 0 or more; got {value!r}")
        check(any(asdict(self).values()), "a step time must have a part above 0 seconds; got 0 for all")

    def seconds(self, work: Work) -> float:
        return (
            self.per_pass * work.passes
            + self.per_token * work.tokens
            + self.per_row * work.rows
            + self.per_context * work.context
            + self.per_pair * work.pairs
            + self.per_moved * work.moved
        )


def from_data_sheet(
    *,
    weight_bytes: float,
    kv_bytes: float,
    token_flops: float,
    pair_flops: float,
    bandwidth: float,
    flops: float,
    host_bandwidth: float,
) -> StepTime:
    """The step time of a device that reaches `bandwidth` bytes and `flops` operations a second, and `host_bandwidth` bytes from
    host memory or to it: weights are read once a pass and `kv_bytes` for each token of context; a token takes `token_flops`, a
    pair of a query and a key `pair_flops`."""
    return StepTime(
        per_pass=weight_bytes / bandwidth,
        per_token=token_flops / flops,
        per_context=kv_bytes / bandwidth,
        per_pair=pair_flops / flops,
        per_moved=kv_bytes / host_bandwidth,
    )


# A model of 8.03 billion parameters like Llama 3.1 8B (32 layers, 32 heads and 8 kv heads of width 128) in bfloat16 on an H200, at
# 80 % of its bandwidth and of that of PCIe 5.0 with 16 lanes, and 60 % of its dense bfloat16 operations.
H200_8B = from_data_sheet(
    weight_bytes=2 * 8.03e9,
    kv_bytes=2 * 2 * 32 * 8 * 128,
    token_flops=2 * 8.03e9,
    pair_flops=4 * 32 * 32 * 128,
    bandwidth=0.8 * 4.8e12,
    flops=0.6 * 989e12,
    host_bandwidth=0.8 * 63e9,
)


def fit(samples: Iterable[tuple[Work, float]]) -> StepTime:
    """The step time with the least squared error in seconds over measured (work, seconds). UserError for too few samples."""
    pairs = list(samples)
    names = list(StepTime.__dataclass_fields__)
    check(len(pairs) >= len(names), f"a step time is fitted to at least {len(names)} steps; got {len(pairs)}")
    works = np.asarray([work for work, _ in pairs], np.float64)
    seconds = np.asarray([time for _, time in pairs], np.float64)
    check(bool(np.all(seconds > 0)), f"the seconds of a step must be positive; got {seconds.min()}")
    return StepTime(*nonnegative_least_squares(works, seconds).tolist())


def nonnegative_least_squares(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """x >= 0, f64[n], with the least |a x - b|, for a f64[m, n] with few columns.

    The best x is the plain least squares solution over those columns where it is not 0, so trying every set of columns finds it.
    """
    columns = a.shape[1]
    size = np.maximum(np.abs(a).max(axis=0), np.finfo(np.float64).tiny)  # columns of one size: they differ by many powers of ten
    best, least = np.zeros(columns), float(b @ b)
    for chosen in itertools.chain.from_iterable(itertools.combinations(range(columns), n) for n in range(1, columns + 1)):
        part = a[:, chosen] / size[list(chosen)]
        x = np.linalg.lstsq(part, b, rcond=None)[0]
        error = float(np.sum((part @ x - b) ** 2))
        if x.min() >= 0 and error < least:
            least, best = error, np.zeros(columns)
            best[list(chosen)] = x / size[list(chosen)]
    return best


def to_json(step_time: StepTime) -> str:
    return json.dumps(asdict(step_time))


def from_json(text: str) -> StepTime:
    """What to_json wrote. UserError for anything else."""
    try:
        value: Any = json.loads(text)
    except ValueError as error:
        raise UserError(f"a step time must be JSON; {error}") from error
    known = list(StepTime.__dataclass_fields__)
    check(
        isinstance(value, dict) and set(value) <= set(known),
        f"a step time must be an object with {', '.join(known)}; got {value!r}",
    )
    return StepTime(**value)
