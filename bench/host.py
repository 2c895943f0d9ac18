"""What the host does for one step, without a device: milliseconds to schedule, pack and commit, one JSON line.

    python -m bench.host --rows 256

All rows decode, one step ahead of what is committed, as the engine runs them; prompts are of one length and share no prefix.
"""

import argparse
import json
import os
import random
import statistics
import time
from collections import deque

from pagedjax.buckets import Bucket
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.plan import Plan, RowResult
from pagedjax.host.request import Request, SamplingParams
from pagedjax.host.scheduler import Scheduler
from pagedjax.pack import pack
from pagedjax.wire import step_fields


def measure(rows: int, steps: int, prompt: int, block_size: int) -> dict[str, list[float]]:
    """Milliseconds of each decode step, by part."""
    max_model_len = prompt + 2 * steps  # the first rows are ahead of the last ones, whose prefill they wait for
    width = -(-max_model_len // block_size)
    scheduler = Scheduler(
        BlockPool(1 + rows * width),
        block_size=block_size,
        max_model_len=max_model_len,
        num_lanes=rows,
        token_budget=max(8192, 2 * rows),
        max_queued=rows,
        decode_steps=1,
    )
    rng = random.Random(0)
    for i in range(rows):
        ids = tuple(rng.randrange(32000) for _ in range(prompt))
        scheduler.add(Request(str(i), ids, SamplingParams(max_tokens=2 * steps)))
    bucket = Bucket(rows, rows)
    fields = step_fields(bucket, 1, width)
    flight: deque[Plan] = deque()
    parts: dict[str, list[float]] = {"schedule": [], "pack": [], "commit": []}
    while len(parts["commit"]) < steps:
        t0 = time.perf_counter()
        plan = scheduler.schedule()
        t1 = time.perf_counter()
        assert plan is not None
        decode = plan.num_tokens == rows
        if decode:
            pack(plan, bucket, fields, rows)
        t2 = time.perf_counter()
        flight.append(plan)
        if len(flight) > 1:
            done = flight.popleft()
            results = [RowResult((5,) * row.steps) for row in done.rows]
            t3 = time.perf_counter()
            scheduler.commit(done, results)
            if decode and done.num_tokens == rows:
                for name, seconds in (("schedule", t1 - t0), ("pack", t2 - t1), ("commit", time.perf_counter() - t3)):
                    parts[name].append(seconds * 1e3)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.host", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--block-size", type=int, default=64)
    args = parser.parse_args()
    parts = measure(args.rows, args.steps, args.prompt, args.block_size)
    whole = [sum(step) for step in zip(*parts.values(), strict=True)]
    line = {name: round(statistics.median(values), 3) for name, values in parts.items()}
    line |= {"step": round(statistics.median(whole), 3), "step_p99": round(sorted(whole)[int(0.99 * len(whole))], 3)}
    print(json.dumps({"rows": args.rows, "cores": os.cpu_count(), "ms": line}))


if __name__ == "__main__":
    main()
