"""`pagedjax simulate`: recorded traffic through the scheduler and the block pool, without a device."""

import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from rich.table import Table

from pagedjax import terminal
from pagedjax.buckets import make_buckets
from pagedjax.config import BucketConfig, CacheConfig, EngineConfig, QueueConfig, ScheduleConfig, resolve_schedule
from pagedjax.errors import UserError, check
from pagedjax.flags import engine_config
from pagedjax.host.step_time import H200_8B, StepTime, from_json, to_json
from pagedjax.simulate import Report, make_scheduler, simulate, summary
from pagedjax.traces import Traced, arrivals, read_trace, scaled

TIMES = {
    "queued": "until it runs",
    "first_token": "until its first token",
    "gap": "between tokens",
    "per_token": "a token after the first",
    "whole": "until its last token",
    "normalized": "whole time a token",
}


def run(command: Any) -> None:
    """`command` is cli.Simulate. The table, or the JSON object, goes to stdout."""
    config = config_of(command)
    step_time = read_step_time(command.step_time) if command.step_time else H200_8B
    trace = tuple(islice(read_trace(command.trace), command.limit if command.limit and command.limit > 0 else None))
    longest = max(scaled(r.prompt, command.scale) + scaled(r.output, command.scale) for r in trace)
    config = replace(config, schedule=resolve_schedule(config.schedule, longest, on_cpu=False))
    start = time.perf_counter()
    report = replay(command, config, step_time, trace)
    terminal.note(f"{report.seconds:.1f} s of traffic in {time.perf_counter() - start:.1f} s; a step takes {to_json(step_time)}")
    if command.json:
        print(json.dumps(summary(report)), flush=True)
    else:
        show(report)


def config_of(command: Any) -> EngineConfig:
    """The engine's configuration as far as a simulation has one. UserError where a flag breaks a rule."""
    check(command.num_blocks >= 1, f"num_blocks must be at least 1; got {command.num_blocks}")
    check(command.block_size >= 1, f"block_size must be at least 1; got {command.block_size}")
    check(command.host_blocks >= 0, f"host_blocks must be 0 or more; got {command.host_blocks}")
    return EngineConfig(
        cache=CacheConfig(block_size=command.block_size, prefix_caching=command.prefix_caching, reserve=command.reserve),
        schedule=engine_config(command.schedule, ScheduleConfig, "schedule."),
        queue=engine_config(command.queue, QueueConfig, "queue."),
        buckets=engine_config(command.buckets, BucketConfig, "buckets."),
    )


def read_step_time(path: str) -> StepTime:
    try:
        return from_json(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"a step time must be a readable file; got {path}: {reason}") from error


def replay(command: Any, config: EngineConfig, step_time: StepTime, trace: tuple[Traced, ...]) -> Report:
    return simulate(
        arrivals(trace, speed=command.speed, limit=command.limit, scale=command.scale),
        make_scheduler(config, command.num_blocks + 1, host_blocks=command.host_blocks, per_moved=step_time.per_moved),
        step_time,
        buckets=make_buckets(config, on_cpu=False, one_row=False),
        async_steps=config.schedule.async_steps,
    )


def show(report: Report) -> None:
    """Two tables: times of requests, and counts."""
    said = summary(report)
    times = Table("seconds", "mean", "p50", "p90", "p99", "max")
    for name, title in TIMES.items():
        if said[name] is not None:
            times.add_row(title, *(f"{value:.4g}" for value in said[name].values()))
    for column in times.columns[1:]:
        column.justify = "right"
    counts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    rates, steps, requests = said["rates"], said["steps"], said["requests"]
    counts.add_row("requests", f"{requests['finished']} finished, {requests['refused']} refused")
    for kind in sorted({refusal.kind for refusal in report.refusals}):
        first = next(refusal.reason for refusal in report.refusals if refusal.kind == kind)
        counts.add_row("", f"{kind}, as the first was told: {first}")
    counts.add_row(
        "a second",
        f"{rates['requests']:.2f} requests, {rates['prompt_tokens']:.0f} tokens in, {rates['output_tokens']:.0f} out",
    )
    counts.add_row("steps", f"{steps['count']} dispatches, {steps['passes']} passes, {steps['tokens']} tokens")
    counts.add_row("at a time", f"{steps['running']:.1f} run, {steps['waiting']:.1f} wait; the device is busy {steps['busy']:.1%}")
    counts.add_row("pool", ", ".join(f"{share:.1%} {name}" for name, share in steps["pool"].items()))
    counts.add_row("", f"{steps['token_share_of_held']:.2%} of what is held are tokens")
    counts.add_row("prompt tokens cached", f"{said['cached']['share']:.1%}")
    counts.add_row(
        "preemptions", f"{said['preemptions']}, {said['swaps']} of them swapped, {said['recomputed_tokens']} tokens computed again"
    )
    terminal.show(times, counts)
