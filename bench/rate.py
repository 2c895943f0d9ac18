"""Request rate at equal latency in the engine itself, by the way it reserves: python -m bench.rate MODEL, one JSON line a mode.

The trace of bench/replay.py with ShareGPT's mean lengths, scaled to a small model, at random times (Poisson), and the highest rate
at which the mean normalized latency (seconds from arrival to the last token, over tokens of output) stays below a bound, as in
section 6.2 of the PagedAttention paper (Kwon et al. 2023). The model, its programs and the pool are the same for all modes; only
`cache.reserve` changes.
"""

import argparse
import json
import math
import os
from collections.abc import Sequence
from typing import Any, get_args

import jax

from bench.replay import LONGEST, SLOTS, poisson, sharegpt_like
from bench.simulate import normalized, requests_of, run, traced_jobs
from checkpoints.open import open_checkpoint
from pagedjax import LLM
from pagedjax.config import EngineConfig, Reserve, with_options
from pagedjax.engine import Engine
from pagedjax.memory import block_bytes
from pagedjax.traces import Traced


def at_rate(engine: Engine, trace: Sequence[Traced], rate: float, scale: float) -> dict[str, Any]:
    """What the engine does at a rate; seconds."""
    jobs = traced_jobs(poisson(trace, rate), 0, engine.model.vocab_size, scale, at_once=False)
    before = engine.scheduler.stats.preemptions
    samples, lives, seconds = run(engine, requests_of(jobs, f"{rate:.4f}-"))
    weighed = sum(sample.rows * sample.seconds for sample in samples)
    return {
        "rate": rate,
        "normalized": normalized(lives),
        "running": weighed / sum(sample.seconds for sample in samples),
        "tokens_per_second": sum(job[1] for _, job in jobs) / seconds,
        "preemptions": engine.scheduler.stats.preemptions - before,
    }


def rate_at(engine: Engine, trace: Sequence[Traced], latency: float, scale: float, low: float, high: float) -> dict[str, Any]:
    """The highest rate, within 10 %, at which the mean normalized latency is at most so many seconds a token."""
    found: dict[str, Any] = {"rate": None}
    while high / low > 1.1:
        rate = math.sqrt(low * high)
        said = at_rate(engine, trace, rate, scale)
        low, high, found = (rate, high, said) if said["normalized"] <= latency else (low, rate, found)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench.rate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--modes", nargs="+", default=list(get_args(Reserve))[::-1], choices=get_args(Reserve))
    parser.add_argument("--requests", type=int, default=80)
    parser.add_argument("--scale", type=float, default=0.25, help="of the lengths, and of the pool")
    parser.add_argument("--latency", type=float, default=0.2, help="seconds a token")
    parser.add_argument("--rates", type=float, nargs=2, default=(0.5, 8.0), metavar=("LOW", "HIGH"), help="requests a second")
    args = parser.parse_args(argv)
    trace = sharegpt_like(args.requests)
    options: dict[str, Any] = {"dtype": args.dtype, "block_size": 16, "max_num_seqs": 32, "cache.prefix_caching": False}
    options["max_model_len"] = int(LONGEST * args.scale)
    each = block_bytes(with_options(EngineConfig(), options), open_checkpoint(args.model).config, jax.default_backend())
    options["cache.kv_memory"] = each * (1 + int(SLOTS * args.scale) // options["block_size"])
    for mode in args.modes:
        with LLM(args.model, **options, **{"cache.reserve": mode}) as llm:
            engine = llm.engine
        # The engine's own thread has ended: from here on this one owns the engine.
        line = {"model": os.path.basename(os.path.normpath(args.model)), "cores": os.cpu_count(), "requests": len(trace)}
        line |= {"scale": args.scale, "latency": args.latency, "mode": mode, "blocks": engine.scheduler.pool.capacity}
        print(json.dumps(line | rate_at(engine, trace, args.latency, args.scale, *args.rates)), flush=True)


if __name__ == "__main__":
    main()
