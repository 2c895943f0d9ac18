"""Recorded traffic through the real scheduler, pool and prefix cache, in virtual time; one JSON line for each result.

    python -m bench.replay cache      # hit rate of the Mooncake traces: without a bound, and against the size of the pool
    python -m bench.replay reserve    # what the pool holds and how many run, for each way to reserve, with a queue that never ends
    python -m bench.replay rate       # normalized latency against the rate of requests, for each way to reserve

`cache`: a token stands for 256, a block of two for the trace's blocks of 512. `reserve` and `rate`: the lengths of the Azure
conversation trace, scaled to the means of ShareGPT, in 15,700 slots, as in figures 2, 12 and 13 of the PagedAttention paper.
"""

import argparse
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from bench.traces import AZURE, MOONCAKE, SHAREGPT_MEANS, ideal_hit_rate, with_means
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.request import Request
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.step_time import H200_8B, StepTime, from_data_sheet
from pagedjax.simulate import Arrival, Clock, Report, Slots, simulate, spread, summary
from pagedjax.traces import HASH_BLOCK, OWN_TOKENS, Traced, arrivals, hashed_prompt, params_of, read_trace

MODES = ("max", "pow2", "oracle", "paged")
PAPER = {"max": 0.204, "pow2": 0.268, "oracle": 0.382, "paged": 0.963}  # share of tokens, Kwon et al. 2023, figure 2
PAPER_BATCH = {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}  # figure 13a: OPT-13B, ShareGPT, 2 requests a second
SLOTS, LONGEST, LONGEST_PROMPT = 15_700, 2048, 1024  # table 1: OPT-13B on an A100 with 40 GB; its context; the filter of prompts
# OPT-13B in float16 (40 layers, 40 heads of width 128) on an A100, at 80 % of its bandwidth and 60 % of its operations.
A100_13B = from_data_sheet(
    weight_bytes=2 * 13e9,
    kv_bytes=2 * 2 * 40 * 40 * 128,
    token_flops=2 * 13e9,
    pair_flops=4 * 40 * 40 * 128,
    bandwidth=0.8 * 1.555e12,
    flops=0.6 * 312e12,
)

# --- the prefix cache ---------------------------------------------------------------------------------------------------------

COARSE_BLOCK = 2  # tokens that stand for the 512 of a block
COARSE = HASH_BLOCK // COARSE_BLOCK  # tokens that one stands for
SPEED = 0.25  # of arrivals: what the traces' cluster served is more than twice what one device can


def coarse(step_time: StepTime) -> StepTime:
    """Of steps whose tokens each stand for COARSE: as many passes in one, each with the whole token budget."""
    per_pass, per_token, per_row, per_context, per_pair = astuple(step_time)
    return StepTime(COARSE * per_pass, COARSE * per_token, COARSE * per_row, COARSE**2 * per_context, COARSE**2 * per_pair)


def coarse_arrivals(trace: Iterable[Traced], *, speed: float, outputs: bool) -> Iterator[Arrival]:
    """Prompts in whole blocks, as the trace counts them, with one more token: the last is always computed. Without `outputs`
    one token of each, else as many as stand for it."""
    for number, r in enumerate(trace):
        prompt = (*hashed_prompt(r.hashes, COARSE_BLOCK * len(r.hashes), COARSE_BLOCK), OWN_TOKENS + number)
        output = max(1, round(r.output / COARSE)) if outputs else 1
        yield Arrival(r.at / speed, Request(str(number), prompt, params_of(output)))


def hit_rate(
    trace: Sequence[Traced], blocks: int | None, *, speed: float = SPEED, one_by_one: bool = False, **options: Any
) -> dict[str, Any]:
    """The share of the prompts' blocks that the cache had when a sequence first entered. `blocks`: of the pool; None: as many as
    are ever needed. One by one in the order of the trace, or at `speed` times its rate on an H200 with 8B parameters. `options` are
    the Scheduler's."""
    most = sum(len(r.hashes) + 1 + max(1, r.output // COARSE) for r in trace)
    longest = max(COARSE_BLOCK * len(r.hashes) + 1 + max(1, round(r.output / COARSE)) for r in trace)
    scheduler = Scheduler(
        BlockPool(1 + (most if blocks is None else blocks)),
        block_size=COARSE_BLOCK,
        max_model_len=longest + 1,
        num_lanes=1 if one_by_one else 256,
        token_budget=2048,
        max_queued=len(trace),
        decode_steps=1,
        clock=Clock(),
        **options,
    )
    made, time_of = coarse_arrivals(trace, speed=speed, outputs=not one_by_one), coarse(H200_8B)
    report = simulate(made, scheduler, time_of)
    total = sum(len(r.hashes) for r in trace)
    cached = sum(life.usage.cached for life in report.lives if life.usage is not None) // COARSE_BLOCK
    first = spread([life.first - life.arrival for life in report.lives if life.first is not None])
    return {
        "hit_rate": cached / total,
        "refused": len(report.refusals),
        "preemptions": report.stats.preemptions,
        "first_token": first,
    }


def hit_curve(name: str, trace: Sequence[Traced], sizes: Sequence[int], **options: Any) -> Iterator[dict[str, Any]]:
    yield {"trace": name, "ideal": ideal_hit_rate(trace), "unbounded": hit_rate(trace, None, one_by_one=True)["hit_rate"]}
    for blocks in sizes:
        yield {"trace": name, "blocks": blocks, **options, **hit_rate(trace, blocks, **options)}


# --- ways to reserve ------------------------------------------------------------------------------------------------------------


def sharegpt_like(limit: int | None = None) -> tuple[Traced, ...]:
    """The Azure conversation trace with lengths scaled to ShareGPT's means, without what is too long for the model; at most
    `limit` requests, from all parts of the trace."""
    trace = read_trace(AZURE["conv"])
    for _ in range(8):  # taking some out changes the means: a few rounds until they stand
        trace = tuple(
            r for r in with_means(trace, *SHAREGPT_MEANS) if r.prompt <= LONGEST_PROMPT and r.prompt + r.output <= LONGEST
        )
    return trace if limit is None else trace[:: -(-len(trace) // limit)]


def reserving(mode: str, block_size: int = 16) -> Scheduler:
    """A scheduler that reserves like this, with as many lanes as can be of use."""
    options: dict[str, Any] = {} if mode == "paged" else {"reserve": mode}
    return Scheduler(
        BlockPool(1 + SLOTS // block_size),
        block_size=block_size,
        max_model_len=LONGEST,
        num_lanes=256,
        token_budget=2560,
        max_queued=100_000,
        decode_steps=1,
        prefix_caching=False,
        clock=Clock(),
        **options,
    )


def saturated(mode: str, trace: Iterable[Traced], block_size: int = 16) -> dict[str, Any]:
    """Means over the steps while requests wait: the shares of the pool, and how many run."""
    at_once = (r._replace(at=0.0) for r in trace)
    report = simulate(arrivals(at_once), reserving(mode, block_size), StepTime(per_pass=1))
    steps = [step for step in report.steps if step.waiting]
    shares = np.mean([step.slots for step in steps], axis=0) / report.slots
    said = {"mode": mode, **dict(zip(Slots._fields, shares.tolist(), strict=True)), "free": 1 - float(shares.sum())}
    batch = float(np.mean([step.running for step in steps]))
    held = {"token_share_of_held": float(shares[0] / shares.sum()), "worst_waste": report.stats.worst_waste}
    return said | held | {"running": batch, "preemptions": report.stats.preemptions, "paper": [PAPER[mode], PAPER_BATCH[mode]]}


def poisson(trace: Iterable[Traced], rate: float, seed: int = 0) -> Iterator[Traced]:
    """The requests of a trace at random times, `rate` a second."""
    rng, at = random.Random(seed), 0.0
    for r in trace:
        yield r._replace(at=at)
        at += rng.expovariate(rate)


def at_rate(mode: str, trace: Iterable[Traced], rate: float) -> dict[str, Any]:
    """Latency and batch at a rate of Poisson arrivals, on an A100 with 13B parameters."""
    report: Report = simulate(arrivals(poisson(trace, rate)), reserving(mode), A100_13B)
    said = summary(report)
    return {
        "mode": mode,
        "rate": rate,
        "normalized": said["normalized"],
        "first_token": said["first_token"],
        "running": said["steps"]["running"],
        "preemptions": said["preemptions"],
    }


# --- the command ------------------------------------------------------------------------------------------------------------------


def results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.what == "cache":
        for name, path in MOONCAKE.items():
            yield from hit_curve(name, read_trace(path)[: args.limit], args.blocks)
        return
    trace = sharegpt_like(args.limit)
    prompts, outputs = spread([r.prompt for r in trace]), spread([r.output for r in trace])
    yield {"trace": "Azure conversation, scaled", "requests": len(trace), "prompts": prompts, "outputs": outputs}
    for mode in args.modes:
        if args.what == "reserve":
            yield saturated(mode, trace)
        else:
            yield from (at_rate(mode, trace, rate) for rate in args.rates)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cache", "reserve", "rate"])
    parser.add_argument("--limit", type=int, help="requests of the trace (default: all)")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--blocks", nargs="+", type=int, default=[1000, 3000, 10_000, 30_000, 100_000], help="of 512 tokens")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1, 1.5, 2, 2.5, 3], help="requests a second")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    for result in results(args):
        print(json.dumps(result | {"elapsed": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()
