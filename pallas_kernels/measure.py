"""How long a compiled function takes on the device at hand."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax


def seconds_a_call(
    f: Callable[..., Any], args: Sequence[Any], *, donate: Sequence[int] = (), budget: float = 0.5, runs: int = 3
) -> float:
    """The best of `runs` means over as many calls as fit into budget / runs seconds, at least one.

    f is compiled already; calls are started one after the other and waited for together, as an engine does. donate: the arguments
    that f takes for its results, the first of which take their places.
    """
    args = list(args)

    def call(times: int) -> float:
        begin, out = time.perf_counter(), None
        for _ in range(times):
            out = f(*args)
            if donate:
                for number, new in zip(donate, jax.tree.leaves(out), strict=False):
                    args[number] = new
        jax.block_until_ready(out)
        return (time.perf_counter() - begin) / times

    call(1)
    one = call(1)
    times = max(1, min(1000, int(budget / runs / max(one, 1e-7))))
    return min(call(times) for _ in range(runs))
