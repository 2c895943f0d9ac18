"""Recorded traffic through the real scheduler, pool and prefix cache, in virtual time; one JSON line for each result.

    python -m bench.replay cache      # hit rate of the Mooncake traces: without a bound, and against the size of the pool
    python -m bench.replay reserve    # what the pool holds and how many run, for each way to reserve, with a queue that never ends
    python -m bench.replay rate       # normalized latency against the rate of requests, for each way to reserve
    python -m bench.replay swap       # with that queue, what preempted sequences cost: computed again, or swapped to host memory
    python -m bench.replay deadline   # of requests with deadlines, how many are done in time, by policy and rate

`cache`: a token stands for 256, a block of two for the trace's blocks of 512. All others: the lengths of the Azure conversation
trace, scaled to the means of ShareGPT, in 15,700 slots, as in figures 2, 12 and 13 of the PagedAttention paper.
"""

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, replace
from typing import Any, NamedTuple, get_args

import numpy as np

from bench.traces import AZURE, MOONCAKE, SHAREGPT_MEANS, ideal_hit_rate, with_means
from pagedjax.config import Policy, Preemption
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.entrance import ServiceRules
from pagedjax.host.policy import POLICIES, PolicyOptions
from pagedjax.host.request import Request, Service
from pagedjax.host.reserve import BuddyPool, Reserve
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.step_time import H200_8B, StepTime, from_data_sheet
from pagedjax.simulate import Arrival, Clock, Report, Slots, simulate, spread, summary
from pagedjax.traces import HASH_BLOCK, OWN_TOKENS, Traced, arrivals, hashed_prompt, params_of, read_trace

MODES: tuple[Reserve, ...] = ("max", "pow2", "oracle", "paged")
PAPER = {"max": 0.204, "pow2": 0.268, "oracle": 0.382, "paged": 0.963}  # share of tokens, Kwon et al. 2023, figure 2
PAPER_BATCH = {"max": 7.00, "pow2": 9.81, "oracle": 13.62, "paged": 30.42}  # figure 13a: OPT-13B, ShareGPT, 2 requests a second
SLOTS, LONGEST, LONGEST_PROMPT = 15_700, 2048, 1024  # table 1: OPT-13B on an A100 with 40 GB; its context; the filter of prompts
# OPT-13B in float16 (40 layers, 40 heads of width 128) on an A100, at 80 % of its bandwidth and of that of PCIe 4.0 with 16 lanes,
# and 60 % of its operations.
A100_13B = from_data_sheet(
    weight_bytes=2 * 13e9,
    kv_bytes=2 * 2 * 40 * 40 * 128,
    token_flops=2 * 13e9,
    pair_flops=4 * 40 * 40 * 128,
    bandwidth=0.8 * 1.555e12,
    flops=0.6 * 312e12,
    host_bandwidth=0.8 * 31.5e9,
)

# --- the prefix cache ---------------------------------------------------------------------------------------------------------

COARSE_BLOCK = 2  # tokens that stand for the 512 of a block
COARSE = HASH_BLOCK // COARSE_BLOCK  # tokens that one stands for
LEVELS = 3  # of priority, which the traces do not have: the requests take turns
SPEED = 0.25  # of arrivals: what the traces' cluster served is more than twice what one device can


def coarse(step_time: StepTime) -> StepTime:
    """Of steps whose tokens each stand for COARSE: as many passes in one, each with the whole token budget."""
    per_pass, per_token, per_row, per_context, per_pair, per_moved = astuple(step_time)
    square = COARSE**2
    return StepTime(
        COARSE * per_pass, COARSE * per_token, COARSE * per_row, square * per_context, square * per_pair, COARSE * per_moved
    )


def coarse_arrivals(trace: Iterable[Traced], *, speed: float, outputs: bool) -> Iterator[Arrival]:
    """Prompts in whole blocks, as the trace counts them, with one more token: the last is always computed. Without `outputs`
    one token of each, else as many as stand for it."""
    for number, r in enumerate(trace):
        prompt = (*hashed_prompt(r.hashes, COARSE_BLOCK * len(r.hashes), COARSE_BLOCK), OWN_TOKENS + number)
        output = max(1, round(r.output / COARSE)) if outputs else 1
        yield Arrival(r.at / speed, Request(str(number), prompt, params_of(output), service=Service(priority=number % LEVELS)))


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


def hit_curve(
    name: str, trace: Sequence[Traced], sizes: Iterable[int], policies: Iterable[str], *, speed: float
) -> Iterator[dict[str, Any]]:
    """Without a bound, and then of each policy and size of the pool."""
    yield {"trace": name, "ideal": ideal_hit_rate(trace), "unbounded": hit_rate(trace, None, one_by_one=True)["hit_rate"]}
    for policy, blocks in itertools.product(policies, sizes):
        said = hit_rate(trace, blocks, speed=speed, service=ServiceRules(policy, PolicyOptions(level_tokens=1024 // COARSE)))
        yield {"trace": name, "policy": policy, "blocks": blocks, "speed": speed, **said}


# --- ways to reserve ------------------------------------------------------------------------------------------------------------


class Setting(NamedTuple):
    """A trace, and the pool that it is replayed in."""

    name: str
    trace: tuple[Traced, ...]
    slots: int = SLOTS
    longest: int = LONGEST  # tokens of prompt and output
    budget: int = 2560  # tokens of a step
    block: int = 1  # slots of a block where sequences reserve


def thinned(trace: Sequence[Traced], limit: int | None) -> tuple[Traced, ...]:
    """At most `limit` requests, from all parts of the trace."""
    return tuple(trace if limit is None else trace[:: -(-len(trace) // limit)])


def sharegpt_like(limit: int | None = None) -> tuple[Traced, ...]:
    """The Azure conversation trace with lengths scaled to ShareGPT's means, without what is too long for the model."""
    trace = read_trace(AZURE["conv"])
    for _ in range(8):  # taking some out changes the means: a few rounds until they stand
        trace = tuple(
            r for r in with_means(trace, *SHAREGPT_MEANS) if r.prompt <= LONGEST_PROMPT and r.prompt + r.output <= LONGEST
        )
    return thinned(trace, limit)


def setting_of(name: str, limit: int | None) -> Setting:
    """`scaled`: as the paper's. The traces as they are need larger pools: of table 1, OPT-175B on eight A100 with 80 GB for those
    of Azure; for those of Mooncake 8B parameters on an H200. The longest sequence is the power of two that holds all of them."""
    if name == "scaled":
        return Setting(name, sharegpt_like(limit))
    whole = read_trace((AZURE | MOONCAKE)[name])
    longest = 1 << (max(r.prompt + r.output for r in whole) - 1).bit_length()
    return Setting(name, thinned(whole, limit), 60_100 if name in AZURE else 800_000, longest, budget=8192, block=16)


def reserving(mode: Reserve, setting: Setting, block: int = 16, **options: Any) -> Scheduler:
    """A scheduler that reserves like this, with as many lanes as can be of use. block: its slots where sequences do not reserve.
    `options` are the Scheduler's."""
    size = block if mode == "paged" else setting.block
    return Scheduler(
        (BlockPool if mode == "paged" else BuddyPool)(1 + setting.slots // size),
        block_size=size,
        max_model_len=setting.longest,
        num_lanes=256,
        token_budget=setting.budget,
        max_queued=len(setting.trace),
        decode_steps=1,
        prefix_caching=False,
        reserve=mode,
        clock=Clock(),
        **options,
    )


def saturated(mode: Reserve, setting: Setting, block: int = 16) -> dict[str, Any]:
    """Means over the steps while requests wait: the shares of the pool, and how many run."""
    at_once = (r._replace(at=0.0, hashes=()) for r in setting.trace)
    report = simulate(arrivals(at_once), reserving(mode, setting, block), StepTime(per_pass=1))
    steps = [step for step in report.steps if step.waiting]
    shares = np.mean([step.slots for step in steps], axis=0) / report.slots
    return {
        "trace": setting.name,
        "mode": mode,
        **dict(zip(Slots._fields, shares.tolist(), strict=True)),
        "token_share_of_held": float(shares[0] / shares[:3].sum()),
        "running": float(np.mean([step.running for step in steps])),
        "worst_waste": report.stats.worst_waste if mode == "paged" else None,
        "preemptions": report.stats.preemptions,
        "recomputed": report.stats.recomputed_tokens / report.stats.scheduled_tokens,
        "steps": len(report.steps),
        "paper": [PAPER[mode], PAPER_BATCH[mode]] if setting.name == "scaled" else None,
    }


def poisson(trace: Iterable[Traced], rate: float, seed: int = 0) -> Iterator[Traced]:
    """The requests of a trace at random times, `rate` a second."""
    rng, at = random.Random(seed), 0.0
    for r in trace:
        yield r._replace(at=at)
        at += rng.expovariate(rate)


def at_rate(mode: Reserve, setting: Setting, rate: float) -> dict[str, Any]:
    """Latency and batch at a rate of Poisson arrivals, on an A100 with 13B parameters."""
    report: Report = simulate(arrivals(poisson(setting.trace, rate)), reserving(mode, setting), A100_13B)
    said = summary(report)
    return {
        "mode": mode,
        "rate": rate,
        "normalized": said["normalized"]["mean"],
        "first_token": said["first_token"]["mean"],
        "running": said["steps"]["running"],
        "preemptions": said["preemptions"],
    }


def rate_at(mode: Reserve, setting: Setting, latency: float, low: float = 0.05, high: float = 12.8) -> dict[str, Any]:
    """The highest rate, within 2 %, at which the mean normalized latency is no more than so many seconds a token."""
    found = at_rate(mode, setting, low)
    while high / low > 1.02:
        rate = math.sqrt(low * high)
        said = at_rate(mode, setting, rate)
        low, high, found = (rate, high, said) if said["normalized"] <= latency else (low, rate, found)
    return {"latency": latency, **found}


# --- preemption and deadlines, on an A100 with 13B parameters ------------------------------------------------------------------


def preempting(preemption: Preemption, setting: Setting, bus: float, block: int = 16) -> dict[str, Any]:
    """All requests at once, with as much host memory as the pool has, over a bus of `bus` times the speed of PCIe 4.0."""
    step_time = replace(A100_13B, per_moved=A100_13B.per_moved / bus)
    places, seconds = setting.slots // block, block * step_time.per_moved
    scheduler = reserving("paged", setting, block, host_blocks=places, swap_seconds=seconds, preemption=preemption)
    report = simulate(arrivals(r._replace(at=0.0) for r in setting.trace), scheduler, step_time)
    said = summary(report)
    return {
        "preemption": preemption,
        "bus": bus,
        "seconds": report.seconds,
        "preemptions": report.stats.preemptions,
        "swaps": report.stats.swaps,
        "recomputed": report.stats.recomputed_tokens / report.stats.scheduled_tokens,
        "longest_gap": said["gap"]["max"],
    }


PER_TOKEN = (0.1, 0.3, 1.0)  # seconds a token of output until the deadline, after one second: the requests take turns


def due(arrival: Arrival, number: int) -> float:
    """Seconds from arrival."""
    return 1 + PER_TOKEN[number % len(PER_TOKEN)] * (arrival.request.params.max_tokens or 0)


def with_deadlines(setting: Setting, rate: float, policy: Policy, *, told: bool = True) -> dict[str, Any]:
    """Requests at random times, each with a deadline for its last token. Not `told`: the scheduler does not know the deadlines."""
    made = list(arrivals(poisson(setting.trace, rate)))
    limits = [due(arrival, number) for number, arrival in enumerate(made)]
    if told:
        made = [
            arrival._replace(request=replace(arrival.request, service=Service(deadline=limit)))
            for arrival, limit in zip(made, limits, strict=True)
        ]
    report = simulate(made, reserving("paged", setting, service=ServiceRules(policy)), A100_13B)
    whole = [life.finish == "length" and (life.last or 0.0) - life.arrival <= limits[int(life.id)] for life in report.lives]
    return {
        "policy": policy,
        "rate": rate,
        "told": told,
        "in_time": sum(whole) / len(whole),
        "dropped": sum(life.entered is None for life in report.lives) / len(whole),
        "tokens_in_vain": sum(
            life.usage.generated for life, good in zip(report.lives, whole, strict=True) if life.usage is not None and not good
        )
        / max(1, sum(life.usage.generated for life in report.lives if life.usage is not None)),
        "seconds": report.seconds,
    }


# --- the command ------------------------------------------------------------------------------------------------------------------


def results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if args.what == "cache":
        for name, path in MOONCAKE.items():
            yield from hit_curve(name, read_trace(path)[: args.limit], args.blocks, args.policies, speed=args.speed)
        return
    setting = setting_of(args.trace, args.limit)
    prompts, outputs = spread([r.prompt for r in setting.trace]), spread([r.output for r in setting.trace])
    sizes = {"slots": setting.slots, "longest": setting.longest}
    yield {"trace": setting.name, "requests": len(setting.trace), "prompts": prompts, "outputs": outputs, **sizes}
    if args.what == "swap":
        yield from (preempting(how, setting, bus) for bus in args.buses for how in get_args(Preemption))
        return
    if args.what == "deadline":
        for rate in args.rates:
            yield with_deadlines(setting, rate, "first_come", told=False)
            yield from (with_deadlines(setting, rate, policy) for policy in args.policies)
        return
    for mode in args.modes:
        if args.what == "reserve":
            yield saturated(mode, setting)
        elif args.latency:
            yield from (rate_at(mode, setting, latency) for latency in args.latency)
        else:
            yield from (at_rate(mode, setting, rate) for rate in args.rates)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["cache", "reserve", "rate", "swap", "deadline"])
    parser.add_argument("--limit", type=int, help="requests of the trace (default: all)")
    parser.add_argument("--trace", choices=["scaled", *AZURE, *MOONCAKE], default="scaled", help="to reserve for")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=["first_come"])
    parser.add_argument("--speed", type=float, default=SPEED, help="of the arrivals at the prefix cache")
    parser.add_argument("--blocks", nargs="*", type=int, default=[1000, 3000, 10_000, 30_000, 100_000], help="of 512 tokens")
    parser.add_argument("--rates", nargs="+", type=float, default=[0.5, 1, 1.5, 2, 2.5, 3], help="requests a second")
    parser.add_argument("--buses", nargs="+", type=float, default=[0.1, 1.0], help="to host memory, times PCIe 4.0")
    parser.add_argument("--latency", nargs="+", type=float, help="seconds a token: find the rate at which it is reached")
    args = parser.parse_args(argv)
    start = time.perf_counter()
    for result in results(args):
        print(json.dumps(result | {"elapsed": round(time.perf_counter() - start, 1)}), flush=True)


if __name__ == "__main__":
    main()
