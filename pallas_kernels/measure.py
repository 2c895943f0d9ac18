"""How long something takes on the device at hand."""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def above_zero(text: str) -> float:
    """The seconds that a command's option says, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be seconds, more than 0; got {text}")
    return value


def seconds_of(call: Callable[[], Any], *, wait: Callable[[Any], Any] = jax.block_until_ready, budget: float = 0.5) -> float:
    """The best mean over as many calls, at least one, as a sixth of a second has: of as many such means as the budget, in seconds,
    has, at least three shorter ones; two calls before do not count. Calls are started one after the other and waited for together,
    as an engine does: but on CPU, where calls that do not need each other would run at once, each is waited for."""
    runs = max(3, round(6 * budget))
    alone = jax.default_backend() == "cpu"

    def mean(times: int) -> float:
        begin, out = time.perf_counter(), None
        for _ in range(times):
            out = call()
            if alone:
                wait(out)
        wait(out)
        return (time.perf_counter() - begin) / times

    mean(1)
    times = max(1, min(1000, int(budget / runs / max(mean(1), 1e-7))))
    return min(mean(times) for _ in range(runs))


def with_donation(f: Callable[..., Any], args: list[Any], donate: Sequence[int]) -> Callable[[], Any]:
    """A call of f, compiled, that may be made again: the first of its results take the place, in args, of what it was given."""

    def call() -> Any:
        out = f(*args)
        for number, new in zip(donate, jax.tree.leaves(out), strict=False):
            args[number] = new
        return out

    return call
