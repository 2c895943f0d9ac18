"""How well the simulator foretells the engine: python -m bench.simulate MODEL [--save step_time.json], one JSON line.

Step times are fitted on the workloads of bench/workloads.py. Then requests that were not seen, with the lengths of the Azure
conversation trace, run through the engine and through the simulator: all at once, where the steps must be the same and only their
times can differ, and at the times of the trace. --save keeps the step time for `pagedjax simulate --step-time`.
"""

import argparse
import json
import os
import random
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.traces import AZURE
from bench.workloads import WORKLOADS, Job
from pagedjax import LLM
from pagedjax.engine import Engine
from pagedjax.host.plan import Plan
from pagedjax.host.request import Request, SamplingParams
from pagedjax.host.step_time import StepTime, Work, fit, to_json
from pagedjax.simulate import Arrival, Life, Report, make_scheduler, simulate, spread, work_of
from pagedjax.traces import Traced, read_trace, scaled


class Sample(NamedTuple):
    """A step of the engine: what it costs by, and the seconds from when the device could begin until its tokens were there."""

    work: Work
    rows: int
    tokens: int
    seconds: float


@contextmanager
def watched(engine: Engine) -> Iterator[list[Sample]]:
    """The steps that the engine takes meanwhile."""
    samples: list[Sample] = []
    planned: deque[float] = deque()
    scheduler, schedule, commit = engine.scheduler, engine.scheduler.schedule, engine.scheduler.commit
    done = 0.0

    def schedule_watched() -> Plan | None:
        plan = schedule()
        if plan is not None:
            planned.append(time.perf_counter())
        return plan

    def commit_watched(plan: Plan, results: Any, seconds: float | None = None) -> Any:
        nonlocal done
        now = time.perf_counter()
        samples.append(
            Sample(
                work_of(plan, engine.buckets, scheduler.block_size),
                len(plan.rows),
                plan.num_tokens,
                now - max(done, planned.popleft()),
            )
        )
        done = now
        return commit(plan, results, seconds)

    scheduler.schedule, scheduler.commit = schedule_watched, commit_watched
    try:
        yield samples
    finally:
        del scheduler.schedule, scheduler.commit


def run(engine: Engine, arrivals: Sequence[Arrival]) -> tuple[list[Sample], list[Life], float]:
    """The engine's steps, what became of each request, and the seconds until all were done. Requests come when they are due."""
    lives = {arrival.request.id: Life(arrival.request.id, 0, arrival.request.service, arrival.at) for arrival in arrivals}
    waiting = list(reversed(arrivals))
    start = time.perf_counter()
    with watched(engine) as samples:
        while waiting or engine.has_work():
            while waiting and waiting[-1].at <= time.perf_counter() - start:
                engine.add(waiting.pop().request)
            if not engine.has_work():
                time.sleep(max(0.0, waiting[-1].at - (time.perf_counter() - start)))
                continue
            events = engine.step()
            now = time.perf_counter() - start
            for event in events:
                life = lives[event.request_id]
                life.first, life.last, life.usage = (now if life.first is None else life.first), now, event.usage
    return samples, list(lives.values()), time.perf_counter() - start


def foretell(engine: Engine, step_time: StepTime, arrivals: Iterable[Arrival]) -> Report:
    scheduler = make_scheduler(engine.config, engine.scheduler.pool.num_blocks)
    ahead = engine.config.schedule.async_steps
    return simulate(arrivals, scheduler, step_time, buckets=engine.buckets, async_steps=ahead)


def requests_of(jobs: Iterable[tuple[float, Job]], name: str) -> list[Arrival]:
    return [
        Arrival(at, Request(f"{name}{i}", tuple(prompt), SamplingParams(max_tokens=new, temperature=0)))
        for i, (at, (prompt, new)) in enumerate(jobs)
    ]


def traced_jobs(trace: Iterable[Traced], seed: int, vocab: int, scale: float, at_once: bool) -> list[tuple[float, Job]]:
    """Requests with the lengths of a trace, times `scale`, and random tokens."""
    rng = random.Random(seed)
    return [
        (0.0 if at_once else r.at, ([rng.randrange(10, vocab) for _ in range(scaled(r.prompt, scale))], scaled(r.output, scale)))
        for r in trace
    ]


def compare(engine: Engine, step_time: StepTime, arrivals: list[Arrival]) -> dict[str, Any]:
    """Figures of the same requests in the engine and in the simulator; times in seconds."""
    samples, lives, seconds = run(engine, arrivals)
    report = foretell(engine, step_time, arrivals)
    return {
        "requests": len(arrivals),
        "steps": {"engine": len(samples), "simulator": len(report.steps)},
        "same_steps": [s[1:3] for s in samples] == [(s.rows, s.tokens) for s in report.steps],
        "seconds": {"engine": seconds, "simulator": report.seconds, "ratio": report.seconds / seconds},
        "first_token": {"engine": waits(lives), "simulator": waits(report.lives)},
        "normalized": {"engine": normalized(lives), "simulator": normalized(report.lives)},
    }


def waits(lives: Iterable[Life]) -> dict[str, float] | None:
    return spread([life.first - life.arrival for life in lives if life.first is not None])


def normalized(lives: Iterable[Life]) -> float:
    """Mean of the whole time over the tokens of output, seconds."""
    return float(np.mean([(v.last - v.arrival) / v.usage.generated for v in lives if v.last is not None and v.usage is not None]))


def fitted(engine: Engine, runs: int) -> tuple[StepTime, list[Sample]]:
    """The step time of an engine from `runs` runs of each workload, after one that is not counted."""
    samples: list[Sample] = []
    for repeat in range(runs + 1):
        for name, make in WORKLOADS.items():
            jobs = [(0.0, job) for job in make(repeat, engine.model.vocab_size)]
            found, _, _ = run(engine, requests_of(jobs, f"{name}{repeat}-"))
            samples += found if repeat else []
    return fit((sample.work, sample.seconds) for sample in samples), samples


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-memory", type=int, default=1 << 30, help="bytes")
    parser.add_argument("--runs", type=int, default=2, help="of each workload, for the fit")
    parser.add_argument("--requests", type=int, default=32, help="of the trace")
    parser.add_argument("--scale", type=float, default=0.2, help="of the trace's lengths")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the step time as JSON")
    args = parser.parse_args()
    options = {"dtype": args.dtype, "max_model_len": args.max_model_len, "cache.kv_memory": args.kv_memory}
    with LLM(args.model, **options) as llm:
        engine = llm.engine
    # The engine's own thread has ended: from here on this one owns the engine.
    step_time, samples = fitted(engine, args.runs)
    if args.save:
        args.save.write_text(to_json(step_time) + "\n", encoding="utf-8")
    fits = [
        r for r in read_trace(AZURE["conv"]) if scaled(r.prompt, args.scale) + scaled(r.output, args.scale) < args.max_model_len
    ]
    trace = fits[: args.requests]
    errors = [abs(step_time.seconds(s.work) / s.seconds - 1) for s in samples]
    line: dict[str, Any] = {
        "model": os.path.basename(os.path.normpath(args.model)),
        "cores": os.cpu_count(),
        "step_time": json.loads(to_json(step_time)),
        "fit": {"steps": len(samples), "error_of_a_step": spread(errors)},
    }
    for name, at_once in (("at_once", True), ("as_traced", False)):
        jobs = traced_jobs(trace, len(line), engine.model.vocab_size, args.scale, at_once)
        line[name] = compare(engine, step_time, requests_of(jobs, name))
    print(json.dumps(line))


if __name__ == "__main__":
    main()
