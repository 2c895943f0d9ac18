"""The load and fault test, with a report: python -m bench.faults MODEL [--minutes 10] [--json FILE]

Starts `pagedjax serve` as a process of its own, on loopback, with a pool that is too small for all lanes; measures its capacity
with clients that ask one after the other; then sends 1.5 times as much at random times (Poisson), with clients that cancel, are
late (also many at once), read slowly, abort, send the longest legal prompt, forms, batches and several samples, or hang up. A
quarter on top are requests that are malformed in every way. All is in float32. What is checked is in bench/faults/checks.py: a line
for each check, and the exit status is 1 where one fails. Linux only.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from bench.faults import checks, process
from bench.faults.checks import MIB, Verdict
from bench.faults.jobs import make_jobs, offline
from bench.faults.load import Load, closed_loop, connected, open_loop, while_it_drains
from bench.faults.process import Server
from bench.faults.records import Answer, End, Job, Poll, Rest, Usage
from checkpoints.open import open_checkpoint
from pagedjax import LLM
from pagedjax.config import EngineConfig, with_options
from pagedjax.memory import block_bytes

OVERLOAD = 1.5  # times the capacity
BLOCK = 16  # tokens
WARM_UP = 0.3  # of the time, whose memory does not count: caches and arenas fill


@dataclasses.dataclass
class Run:
    """All that is known at the end."""

    capacity: float
    sent: float  # requests a second, of those that ask for work
    load: Load
    polls: list[Poll]
    usage: list[Usage]
    begin: float  # when the open loop began
    warm: Usage
    rest: Rest
    last: Usage
    end: End
    drained: list[Any]


def settings(model: str, context: int, lanes: int) -> dict[str, Any]:
    """Of the engine, by the paths of EngineConfig. Half as many blocks as all lanes could need."""
    checkpoint = open_checkpoint(model)
    context = min(context, checkpoint.config.max_positions)
    options: dict[str, Any] = {"dtype": "float32", "cache.block_size": BLOCK, "schedule.max_model_len": context}
    options |= {"schedule.max_num_seqs": lanes, "schedule.max_num_batched_tokens": 16 * lanes, "schedule.max_queued": 6 * lanes}
    each = block_bytes(with_options(EngineConfig(), options), checkpoint.config, jax.default_backend())
    groups = checkpoint.config.layer_groups.count
    return options | {"cache.kv_memory": each * (1 + groups * -(-context // BLOCK) * max(2, lanes // 2))}


async def exercise(args: argparse.Namespace, options: dict[str, Any], jobs: dict[str, list[Job]], log: Path) -> Run:
    """Everything that happens to the server, from its start to its end."""
    more = ["--drain-seconds", "300", "--unready-seconds", "1", "--max-unread", "4096", *args.serve]
    server = await process.start(args.model, options, log, more)
    begin, seconds, usage = time.monotonic(), 60 * args.minutes, list[Usage]()
    clock = lambda: time.monotonic() - begin
    health = asyncio.create_task(process.watch_health(server, begin=begin, every=0.25, limit=args.poll_limit))
    watching = asyncio.create_task(process.watch_usage(server, usage, clock, every=min(1.0, seconds / 60)))
    try:
        async with connected(server) as clients:
            load = Load(clients, jobs, random.Random(args.seed), clock)
            await open_loop(load, 20.0, min(5.0, seconds / 4), storms=1)  # whatever is made when it is first asked for
            capacity = await closed_loop(load, 2 * options["schedule.max_num_seqs"], min(20.0, seconds / 3))
        note(f"capacity: {capacity:.1f} answers a second, {1e3 * load.usual:.0f} ms each")
        await process.at_rest(server, patience=60)
        warm = await process.settled(server, clock, None, patience=30)
        at = clock()
        async with connected(server) as load.clients:
            sent = await open_loop(load, OVERLOAD * capacity, seconds, storms=max(1, round(seconds / 20)))
        rest = await process.at_rest(server, patience=60)
        last = await process.settled(server, clock, warm, patience=30)
        async with connected(server) as load.clients:
            signalled, drained = await while_it_drains(load, server, options["schedule.max_num_seqs"])
        end = await ended(server, clock, signalled)
    finally:
        await process.stop(server)
        await asyncio.wait([health, watching])
    return Run(capacity, sent, load, health.result(), usage, at, warm, rest, last, end, drained)


async def ended(server: Server, clock: Any, signalled: float) -> End:
    code = None
    try:
        async with asyncio.timeout(330):
            code = await server.process.wait()
    except TimeoutError:
        note("the server does not end")
    lines = server.log
    return End(code, lines[-1] if lines else "", signalled, clock(), process.errors_in(lines))


def judge(run: Run, before: dict[str, Answer], after: dict[str, Answer], args: argparse.Namespace) -> list[Verdict]:
    outcomes, seconds = run.load.outcomes, 60 * args.minutes
    counted = [u for u in run.usage if run.begin + WARM_UP * seconds <= u.at <= run.begin + seconds]
    return [
        checks.load_was_kept(run.sent, OVERLOAD * run.capacity),
        checks.every_end(outcomes),
        checks.whole_streams(outcomes),
        checks.offline_answers(outcomes, before),
        checks.same_offline(before, after),
        checks.documented_errors(outcomes),
        checks.retry_hints(outcomes),
        checks.nothing_held(run.rest),
        checks.nothing_leaked(run.warm, run.last),
        checks.flat_memory(counted, per_minute=args.grow * MIB, slack=args.slack * MIB),
        checks.honest_health(run.polls, run.end, limit=args.poll_limit),
        checks.clean_end(run.end, run.drained),
    ]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(run: Run, verdicts: Sequence[Verdict], args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    for outcome in run.load.outcomes:
        kinds[outcome.kind] = kinds.get(outcome.kind, 0) + 1
    return {
        "model": os.path.basename(os.path.normpath(args.model)),
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "minutes": args.minutes,
        "options": options,
        "capacity_per_second": round(run.capacity, 2),
        "requests": kinds,
        "checks": [dataclasses.asdict(each) for each in verdicts],
    }


def show(verdicts: Sequence[Verdict]) -> None:
    for each in verdicts:
        figures = ", ".join(f"{name} {value}" for name, value in each.figures.items())
        print(f"{'ok  ' if each.ok else 'FAIL'} {each.name}: {figures}")
        for wrong in each.wrong:
            print(f"       {wrong}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench.faults", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=10.0, help="of the overload; measuring the capacity comes before")
    parser.add_argument("--json", default="", help="a file for the report, too")
    parser.add_argument("--context", type=int, default=512, help="tokens")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--poll-limit", type=float, default=5.0, help="seconds in which health must answer")
    parser.add_argument("--grow", type=float, default=1.0, help="MiB a minute that memory may grow by")
    parser.add_argument("--slack", type=float, default=8.0, help="MiB that it may grow by besides")
    parser.add_argument("--compile-cache", default=EngineConfig().compile_cache)
    parser.add_argument("serve", nargs="*", help="further flags of pagedjax serve, behind --")
    args = parser.parse_args(argv)
    options = settings(args.model, args.context, args.lanes) | {"compile_cache": args.compile_cache}
    with LLM(args.model, **options) as llm:
        vocab, context = llm.engine.model.vocab_size, llm.engine.config.schedule.max_model_len
        jobs = make_jobs(vocab, context, args.seed, text=llm.tokenizer is not None)
        before = offline(llm, jobs)
    note(f"{len(before)} offline answers of {sum(len(a.tokens) for a in before.values())} tokens")
    with tempfile.TemporaryDirectory() as folder:
        run = asyncio.run(exercise(args, options, jobs, Path(folder) / "log"))
    with LLM(args.model, **options) as llm:
        after = offline(llm, jobs)
    verdicts = judge(run, before, after, args)
    show(verdicts)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(report(run, verdicts, args, options), file, indent=1)
    return 0 if all(each.ok for each in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
