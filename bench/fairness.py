"""What requests that compete wait for, through the real scheduler in virtual time: a step takes 1, whatever it holds. Each scenario
is shown with what it proves and without; one JSON line each.

    python -m bench.fairness              # all of them
    python -m bench.fairness tenants      # one

`backlog`: the services of two tenants that always have work waiting. `tenants`: how long a light tenant waits beside a heavy one.
`overload`: who of those that are taken has the first token in time, at several times the capacity. `pools`: interactive work in a
flood of batch work. `priority`: whether anybody waits for what is less urgent, with lanes, blocks or tokens as what is short.
"""

import argparse
import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from pagedjax.host.block_pool import BlockPool
from pagedjax.host.entrance import ServiceRules
from pagedjax.host.plan import Plan
from pagedjax.host.policy import PolicyOptions, priority
from pagedjax.host.request import Request, Service
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.sequence import Sequence as Running
from pagedjax.host.step_time import StepTime
from pagedjax.host.tenants import TenantLimits, TokenCosts, fairness_bound
from pagedjax.simulate import Arrival, Clock, Report, simulate
from pagedjax.traces import OWN_TOKENS, params_of

A_STEP = StepTime(per_pass=1)
BUDGET, BLOCK = 512, 16  # tokens of a step, slots of a block


class Kind(NamedTuple):
    """Requests that are alike."""

    prompt: int
    output: int
    service: Service = Service()


def make_scheduler(rules: ServiceRules, *, lanes: int, slots: int, longest: int) -> Scheduler:
    """Without a prefix cache: all prompts are different."""
    return Scheduler(
        BlockPool(1 + slots // BLOCK),
        block_size=BLOCK,
        max_model_len=longest,
        num_lanes=lanes,
        token_budget=BUDGET,
        max_queued=1_000_000,
        decode_steps=1,
        prefix_caching=False,
        service=rules,
        clock=Clock(),
    )


def every(kind: Kind, count: int, gap: float, name: str) -> list[Arrival]:
    """So many requests, one every `gap` steps; all at once where it is 0."""
    prompt, params = (OWN_TOKENS,) * kind.prompt, params_of(kind.output)
    return [Arrival(gap * i, Request(f"{name}{i}", prompt, params, service=kind.service)) for i in range(count)]


def in_order(*groups: Iterable[Arrival]) -> list[Arrival]:
    return sorted((arrival for group in groups for arrival in group), key=lambda a: a.at)


def without_service(arrivals: Iterable[Arrival]) -> list[Arrival]:
    """All of one tenant, pool and priority."""
    return [a._replace(request=replace(a.request, service=Service())) for a in arrivals]


def waits(report: Report, name: str) -> list[float]:
    """Steps to the first token of the requests whose ids begin like this."""
    return [v.first - v.arrival for v in report.lives if v.id.startswith(name) and v.first is not None]


def p99(values: Sequence[float]) -> float:
    return float(np.percentile(values, 99))


# --- tenants ------------------------------------------------------------------------------------------------------------------

HEAVY, LIGHT = Service(tenant="heavy"), Service(tenant="light")


@dataclass
class Services:
    """Weighted tokens that two tenants got, by what the plans say, and how their difference moved while both had work waiting."""

    scheduler: Scheduler
    costs: TokenCosts
    highest: dict[str, int] = field(default_factory=dict)  # prompt tokens of each request that were counted
    got: dict[str, float] = field(default_factory=lambda: {"heavy": 0.0, "light": 0.0})
    differences: list[float] = field(default_factory=list)

    def see(self, plan: Plan, at: float) -> None:
        for row in plan.rows:
            tenant, prompt = ("heavy" if row.request_id.startswith("heavy") else "light"), len(self._request(row.request_id).prompt)
            before = self.highest.get(row.request_id, 0)
            after = min(prompt, max(before, row.start + row.count))
            self.highest[row.request_id] = after
            self.got[tenant] += (after - before) * self.costs.input + row.steps * self.costs.output
        if {s.request.service.tenant or s.request.id[:5] for s in self.scheduler.entrance.queue} == {"heavy", "light"}:
            self.differences.append(self.got["heavy"] - self.got["light"])

    def _request(self, name: str) -> Request:
        sequence = self.scheduler.find(name, 0)
        assert sequence is not None
        return sequence.request


def backlog(fair: bool) -> dict[str, Any]:
    """The largest change of the difference of two tenants' services over any time in which both had work waiting all along, beside
    the bound of VTC."""
    lanes, heavy, light = 8, Kind(2048, 32, HEAVY), Kind(64, 16, LIGHT)
    made = in_order(every(heavy, 80, 0, "heavy"), every(light, 1000, 0, "light"))
    longest, costs = heavy.prompt + heavy.output, TokenCosts()
    scheduler = make_scheduler(ServiceRules(), lanes=lanes, slots=lanes * longest, longest=longest + 1)
    services = Services(scheduler, costs)
    report = simulate(made if fair else without_service(made), scheduler, A_STEP, each_step=services.see)
    return {
        "scenario": "backlog",
        "tenants": fair,
        "gap": max(services.differences) - min(services.differences),
        "bound": fairness_bound(costs, heavy.prompt, lanes * longest),
        "steps_both_wait": len(services.differences),
        "steps": report.seconds,
    }


def light_beside_heavy() -> dict[str, Any]:
    """The steps that a light tenant waits alone, beside one with enormous prompts, and beside it without tenants."""
    lanes, slots = 32, 1 << 17
    heavy = every(Kind(8192, 32, HEAVY), 60, 0, "heavy")
    light = every(Kind(64, 16, LIGHT), 110, 8, "light")
    caps = TenantLimits(max_rows=lanes * 3 // 4, max_blocks=slots // BLOCK * 3 // 4)

    def run(arrivals: list[Arrival], rules: ServiceRules) -> Report:
        return simulate(arrivals, make_scheduler(rules, lanes=lanes, slots=slots, longest=8225), A_STEP)

    both = in_order(heavy, light)
    alone, fair = run(light, ServiceRules()), run(both, ServiceRules(other_tenants=caps))
    unfair = run(without_service(both), ServiceRules())
    said = {name: waits(report, "light") for name, report in (("alone", alone), ("tenants", fair), ("first_come", unfair))}
    return {
        "scenario": "tenants",
        "p99": {name: p99(steps) for name, steps in said.items()},
        "bound": 2 * p99(said["alone"]) + 3,
        "throughput": unfair.seconds / fair.seconds,
        "waits": said,
    }


# --- more than can be done ------------------------------------------------------------------------------------------------------


class Crowd(NamedTuple):
    """A stream of different requests, and what there is for them."""

    count: int = 3000
    lanes: int = 32
    slots: int = 1 << 15
    longest: int = 512 + 64
    seed: int = 0

    def arrivals(self, rate: float) -> list[Arrival]:
        """At random times, `rate` a step; all at once where it is inf."""
        rng, at, made = random.Random(self.seed), 0.0, []
        for i in range(self.count):
            prompt, output = rng.randint(32, 512), rng.randint(8, 64)
            made.append(Arrival(at, Request(str(i), (OWN_TOKENS,) * prompt, params_of(output))))
            at += rng.expovariate(1.0) / rate
        return made

    def run(self, rate: float, rules: ServiceRules) -> Report:
        scheduler = make_scheduler(rules, lanes=self.lanes, slots=self.slots, longest=self.longest + 1)
        return simulate(self.arrivals(rate), scheduler, A_STEP)

    def capacity(self) -> float:
        """Requests a step when the queue never ends."""
        return self.count / self.run(float("inf"), ServiceRules()).seconds


def overload(crowd: Crowd, capacity: float, load: float, limit: float, admission: bool) -> dict[str, Any]:
    """At `load` times the capacity, with a first token due within `limit` steps."""
    report = crowd.run(load * capacity, ServiceRules(max_first_token=limit if admission else None))
    steps = waits(report, "")
    return {
        "scenario": "overload",
        "load": load,
        "admission": admission,
        "limit": limit,
        "taken": len(report.lives) / crowd.count,
        "attained": sum(wait <= limit for wait in steps) / len(report.lives),
        "longest_queue": max(step.waiting for step in report.steps),
        "first_token_p99": p99(steps),
        "requests_a_step": len(steps) / report.seconds,
    }


# --- pools ----------------------------------------------------------------------------------------------------------------------


def flood(gap: int = 6) -> dict[str, Any]:
    """The steps that interactive requests wait, one every `gap` steps: alone, in a flood of batch work, and in one that is not
    called batch work."""
    lanes, slots = 16, 1 << 16
    chat = every(Kind(128, 32), 200, gap, "chat")
    batch = every(Kind(4096, 64, Service(pool="batch")), 200, 0, "batch")

    def run(arrivals: list[Arrival]) -> Report:
        return simulate(arrivals, make_scheduler(ServiceRules(), lanes=lanes, slots=slots, longest=4161), A_STEP)

    both = in_order(batch, chat)
    reports = {"idle": run(chat), "pools": run(both), "one_pool": run(without_service(both))}
    said = {name: waits(report, "chat") for name, report in reports.items()}
    end = chat[-1].at
    done = [v for v in reports["pools"].lives if v.id.startswith("batch") and v.last is not None and v.last <= end]
    return {
        "scenario": "pools",
        "p99": {name: p99(steps) for name, steps in said.items()},
        "bound": 2 * p99(said["idle"]) + 3,
        "batch_done_meanwhile": len(done),
        "batch_tokens_a_step": sum(4096 + 64 for _ in done) / end,
        "batch_done": sum(v.finish == "length" for v in reports["pools"].lives if v.id.startswith("batch")),
        "waits": said,
    }


# --- priority -------------------------------------------------------------------------------------------------------------------

SHORT: dict[str, dict[str, int]] = {  # what there is too little of, and the lanes, slots and prompts that make it so
    "lanes": {"lanes": 4, "slots": 1 << 15, "prompt": 64},
    "blocks": {"lanes": 32, "slots": 1 << 12, "prompt": 480},
    "tokens": {"lanes": 32, "slots": 1 << 17, "prompt": 8192},
}


@dataclass
class Inversions:
    """For how many steps on end somebody waited, or had to leave its prompt, while a row went to what is less urgent."""

    scheduler: Scheduler
    options: PolicyOptions
    now: dict[str, int] = field(default_factory=dict)
    longest: int = 0

    def see(self, plan: Plan, at: float) -> None:
        rows = {row.request_id: row for row in plan.rows}
        running = self.scheduler.running
        ranks = {s.request.id: priority(self.scheduler.entrance.queue.view(s), self.options) for s in self._all()}
        worst = max((ranks[name] for name in rows), default=float("-inf"))
        worst_prompt = max((ranks[name] for name, row in rows.items() if row.count > 1), default=float("-inf"))
        idle = {s.request.id for s in running if s.length - s.num_scheduled > 1} - set(rows)
        behind = {s.request.id for s in self.scheduler.entrance.queue if ranks[s.request.id] + self.options.hysteresis <= worst}
        behind |= {name for name in idle if ranks[name] + self.options.hysteresis <= worst_prompt}
        self.now = {name: self.now.get(name, 0) + 1 for name in behind}
        self.longest = max([self.longest, *self.now.values()])

    def _all(self) -> Iterator[Running]:
        return self.scheduler.sequences()


def urgent(short: str, policy: str = "priority", aging: float = 1000.0) -> dict[str, Any]:
    """A few urgent requests among many that are not."""
    case = SHORT[short]
    options = PolicyOptions(aging=aging)
    rules = ServiceRules(policy, options)
    many = every(Kind(case["prompt"], 64, Service(priority=5)), 60, 0, "many")
    few = every(Kind(64, 8, Service(priority=0)), 12, 20, "few")

    def run(arrivals: list[Arrival], look: Callable[[Scheduler], Callable[[Plan, float], None]] | None = None) -> Report:
        scheduler = make_scheduler(rules, lanes=case["lanes"], slots=case["slots"], longest=case["prompt"] + 65)
        return simulate(arrivals, scheduler, A_STEP, each_step=look(scheduler) if look else lambda plan, at: None)

    seen: list[Inversions] = []

    def look(scheduler: Scheduler) -> Callable[[Plan, float], None]:
        seen.append(Inversions(scheduler, options))
        return seen[0].see

    both, alone = run(in_order(many, few), look), run(few)
    return {
        "scenario": "priority",
        "short_of": short,
        "policy": policy,
        "alone_p99": p99(waits(alone, "few")),
        "p99": p99(waits(both, "few")),
        "longest_inversion": seen[0].longest,
        "preemptions": both.stats.preemptions,
        "steps": both.seconds,
    }


def starving(aging: float, levels: int = 5) -> dict[str, Any]:
    """One request that is `levels` less urgent than a stream of others, twice what can be done; and of those that entered before
    it, how long after it the last one came."""
    scheduler = make_scheduler(ServiceRules("priority", PolicyOptions(aging=aging)), lanes=4, slots=1 << 15, longest=129)
    stream = every(Kind(64, 32, Service(priority=0)), 400, 4, "stream")
    (one,) = every(Kind(64, 8, Service(priority=levels)), 1, 0, "one")
    report = simulate(in_order(stream, [one._replace(at=100.0)]), scheduler, A_STEP)
    (life,) = (v for v in report.lives if v.id == "one0")
    passed = [v.arrival - life.arrival for v in report.lives if (v.entered or 0.0) < (life.entered or 0.0)]
    waited = {"waited": waits(report, "one")[0], "passed_until": max(passed), "steps": report.seconds}
    return {"scenario": "aging", "aging": aging, "levels": levels, **waited}


# --- the command ----------------------------------------------------------------------------------------------------------------

LOADS = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0, 3.0)
LIMIT = 60.0  # steps to the first token


def results(what: str) -> Iterator[dict[str, Any]]:
    if what == "backlog":
        yield from (backlog(fair) for fair in (True, False))
    elif what == "tenants":
        yield light_beside_heavy()
    elif what == "overload":
        crowd = Crowd()
        capacity = crowd.capacity()
        yield {"scenario": "overload", "capacity": capacity}
        yield from (overload(crowd, capacity, load, LIMIT, admission) for load in LOADS for admission in (True, False))
    elif what == "pools":
        yield flood()
    else:
        yield from (urgent(short, policy) for short in SHORT for policy in ("priority", "first_come"))
        yield from (starving(aging) for aging in (20.0, 1e9))


SCENARIOS = ("backlog", "tenants", "overload", "pools", "priority")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="bench.fairness", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="*", help=f"of {', '.join(SCENARIOS)} (default: all)")
    args = parser.parse_args(argv)
    for what in args.what or SCENARIOS:
        if what not in SCENARIOS:
            parser.error(f"a scenario must be one of {', '.join(SCENARIOS)}; got {what}")
        for result in results(what):
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
