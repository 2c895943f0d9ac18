"""Random scenes in which all that the scheduler can do happens at once: every request ends as it should, and nothing is left."""

import json
import random
from collections import defaultdict, deque
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from fake_device import Device, expected, make_request, make_scheduler, tokens_of

from pagedjax.errors import UserError
from pagedjax.host.entrance import Entrance, ServiceRules
from pagedjax.host.plan import Plan
from pagedjax.host.policy import POLICIES, PolicyOptions
from pagedjax.host.pools import PoolShares
from pagedjax.host.request import Request, Service, TokenEvent
from pagedjax.host.scheduler import Scheduler
from pagedjax.host.tenants import TenantLimits

SEEDS = [*range(80), 1047, 5538, 5792]  # in the last ones a search was stuck, half of its beams in and half of them out


@dataclass
class Scene:
    """A scheduler, who comes when, and who is cut off when."""

    scheduler: Scheduler
    now: list[float]
    tenants: dict[str, TenantLimits]
    arrivals: dict[int, list[Request]]
    cancelled: dict[int, str]
    finished: dict[int, tuple[str, int]]
    while_in_flight: bool  # cuts fall between the plan and its results
    delay: int
    taken: dict[str, Request] = field(default_factory=dict)
    cut: set[Any] = field(default_factory=set)
    events: dict[tuple[str, int], list[TokenEvent]] = field(default_factory=lambda: defaultdict(list))

    def put(self, events: list[TokenEvent]) -> None:
        for event in events:
            self.events[event.request_id, event.index].append(event)

    def meddle(self, step: int, rng: random.Random) -> None:
        scheduler, name, key = self.scheduler, self.cancelled.get(step), self.finished.get(step)
        if name in self.taken:
            self.put(scheduler.cancel(name))
            self.cut.add(name)
        if key is not None and key[0] in self.taken and not self.taken[key[0]].params.beam_width:
            sequence = scheduler.find(*key)
            if sequence is not None and len(sequence.tokens) > sequence.prompt_len:
                scheduler.finish(*key, rng.randint(0, len(sequence.tokens) - sequence.prompt_len))
                self.cut.add(key)


def rules_of(rng: random.Random) -> ServiceRules:
    tenants = {}
    if rng.random() < 0.5:
        tenants = {
            "a": TenantLimits(weight=2.0, max_rows=rng.choice([1, 2])),
            "b": TenantLimits(max_blocks=rng.choice([20, 40, 100])),
            "c": TenantLimits(tokens_per_minute=rng.choice([200, 2000])),
        }
    return ServiceRules(
        rng.choice(list(POLICIES)),
        PolicyOptions(aging=rng.choice([0.5, 5, 100])),
        PoolShares(batch=rng.choice([0.1, 0.3, 0.6])),
        tenants=tenants,
        token_seconds=rng.choice([None, 0.01]),
        max_first_token=rng.choice([None, None, 3.0]),
    )


def request_of(i: int, rng: random.Random, lanes: int, beams: bool) -> Request:
    shared = rng.choice([0, 0, rng.randint(1, 40)])
    prompt, more = [*range(shared), *[rng.randint(0, 3) for _ in range(rng.randint(1, 12))]], {}
    if rng.random() < 0.2 and beams:
        width = rng.randint(1, min(4, lanes))
        more = {"beam_width": width, "n": rng.randint(1, width)}
    elif rng.random() < 0.3:
        more = {"n": rng.randint(2, 4)}
    if not more and rng.random() < 0.15:
        more = {"prompt_logprobs": 0}
    max_tokens = rng.randint(1, 30)
    stop_ids = tuple(rng.randint(0, 96) for _ in range(rng.randint(0, 6)))
    made = make_request(f"r{i}", prompt, max_tokens, stop_ids=stop_ids, **more)
    service = Service(
        tenant=rng.choice(["", "a", "b", "c"]),
        priority=rng.randint(-2, 2),
        pool=rng.choice(["interactive", "batch"]),
        deadline=rng.choice([None, None, None, rng.uniform(0.1, 6)]),
        retention=rng.choice([0, 0, 5]),
        expected_tokens=rng.choice([None, 5]),
    )
    return replace(made, service=service, salt=rng.choice(["", "", "x"]))


def scene_of(rng: random.Random) -> Scene:
    windows = rng.choice([(None,), (None,), (9,), (None, 9, 16), (3, 8)])
    size, lanes, now = rng.choice([2, 4, 8]), rng.choice([2, 4, 6]), [0.0]
    rules = rules_of(rng)
    scheduler = make_scheduler(
        1 + rng.randint(64 // size, 3 * 64 // size) * len(windows),
        block_size=size,
        num_lanes=lanes,
        token_budget=rng.randint(lanes + 1, 24),
        decode_steps=rng.choice([1, 3, 8]),
        prefix_caching=rng.random() < 0.7,
        windows=windows,
        host_blocks=rng.choice([0, 3, 100]),
        preemption=rng.choice(["recompute", "swap", "auto"]),
        service=rules,
        clock=lambda: now[0],
        swap_seconds=rng.choice([None, 0.001, 1.0]),
        debug=rng.random() < 0.3,
    )
    arrivals: dict[int, list[Request]] = {}
    for i in range(rng.randint(3, 14)):
        made = request_of(i, rng, lanes, beams=None in windows)  # the model of fake_device.py needs all of a beam's tokens
        arrivals.setdefault(rng.randint(0, 25), []).append(made)
    cancelled = {rng.randint(0, 40): f"r{rng.randint(0, 13)}" for _ in range(rng.randint(0, 4))}
    finished = {rng.randint(0, 40): (f"r{rng.randint(0, 13)}", rng.randint(0, 2)) for _ in range(rng.randint(0, 4))}
    return Scene(scheduler, now, dict(rules.tenants), arrivals, cancelled, finished, rng.random() < 0.5, rng.randint(0, 1))


def check_plan(plan: Plan, scene: Scene) -> None:
    """Rows are of sequences that run, each in a lane of its own; copies are for blocks that somebody holds; caps are kept."""
    scheduler = scene.scheduler
    assert plan.num_tokens <= scheduler.token_budget
    assert len({row.lane for row in plan.rows}) == len(plan.rows)
    assert {row[:3] for row in plan.rows} <= {(*s.key, s.epoch) for s in scheduler.running}
    held = {block for s in scheduler.running for block in s.held}
    assert {copy.target for copy in plan.copies} <= held
    assert len(plan.copies) <= len(plan.rows) * len(scheduler.tables.windows)
    for name, limits in scene.tenants.items():
        own = [s for s in scheduler.running if s.request.service.tenant == name]
        assert limits.max_blocks is None or sum(s.num_held for s in own) <= limits.max_blocks
        assert limits.max_rows is None or len(own) <= limits.max_rows


def play(scene: Scene, rng: random.Random) -> None:
    scheduler, device, flight, step = scene.scheduler, Device(scene.scheduler), deque(), 0
    while scheduler.has_work() or flight or any(at >= step for at in scene.arrivals):
        for request in scene.arrivals.get(step, []):
            try:
                scheduler.add(request)
                scene.taken[request.id] = request
            except UserError:
                continue
        if not scene.while_in_flight:
            scene.meddle(step, rng)
        plan = scheduler.schedule()
        scene.put(scheduler.take_ended())
        if plan is not None:
            check_plan(plan, scene)
            flight.append((plan, device.run(plan)))
        if scene.while_in_flight:
            scene.meddle(step, rng)
        while flight and len(flight) > (scene.delay if plan is not None else 0):
            done, results = flight.popleft()
            scene.put(scheduler.commit(done, results, 0.05 + 0.001 * done.num_tokens))
        scheduler.check()
        scene.now[0] += 0.1 if plan is not None or flight else max(0.1, scheduler.seconds_idle())
        step += 1
        assert step < 4000, "no progress"


def check_end(scene: Scene) -> None:
    scheduler = scene.scheduler
    assert scheduler.pool.num_free == scheduler.pool.capacity
    assert scheduler.tables.places.num_free == scheduler.tables.places.capacity
    assert len(scheduler._runs.lanes) == scheduler.entrance.num_lanes
    left = (scheduler._due, scheduler._late, scheduler._beams, scheduler._followers, scheduler._ids)
    assert not any(left) and not scheduler.entrance.tenants._accounts
    for request in scene.taken.values():
        assert json.loads(scheduler.trace.line(request.id))["decisions"][0]["what"] == "queued"
        for index in range(request.params.n):
            own = scene.events[request.id, index]
            if (request.id, index) in scene.cut:
                continue
            assert [e.finish is not None for e in own] == [False] * (len(own) - 1) + [True]
            tokens, whole = tokens_of(own), expected(request, 64)
            early = own[-1].finish in ("cancelled", "deadline")
            assert request.params.beam_width or tokens == (whole[: len(tokens)] if early else whole)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_scene_ends_well(seed: int) -> None:
    rng = random.Random(seed)
    scene = scene_of(rng)
    play(scene, rng)
    check_end(scene)


def test_half_a_search_that_waits_behind_others_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(Entrance, "outside", lambda self, pool: None)
    monkeypatch.setattr(Entrance, "companions", lambda self, sequence: [])
    rng = random.Random(1047)
    with pytest.raises(AssertionError, match="no progress"):
        play(scene_of(rng), rng)
