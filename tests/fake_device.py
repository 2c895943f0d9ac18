"""The scheduler without a device: a model whose next token is a function of what stands before it.

`drive` runs requests through a Scheduler and this device to the end, and checks the pool after every step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pagedjax.host.block_pool import BlockPool
from pagedjax.host.plan import Plan, RowResult
from pagedjax.host.request import Logprobs, Request, SamplingParams, TokenEvent
from pagedjax.host.reserve import BuddyPool
from pagedjax.host.scheduler import Scheduler
from pagedjax.limits import NUM_LOGPROBS


def next_token(tokens: list[int]) -> int:
    return (31 * len(tokens) + sum(tokens)) % 97


def candidates(tokens: Sequence[int]) -> list[tuple[int, float]]:
    """The best tokens after these and their logprobs, of a distribution that is random in all of them."""
    logits = 2 * np.random.default_rng([*tokens]).normal(size=97)
    logprobs = logits - np.log(np.exp(logits).sum())
    return [(int(t), float(logprobs[t])) for t in np.argsort(-logprobs)[:NUM_LOGPROBS]]


def make_scheduler(num_blocks: int = 64, **options: Any) -> Scheduler:
    defaults = {"block_size": 4, "max_model_len": 64, "num_lanes": 4, "token_budget": 16, "max_queued": 1000, "decode_steps": 1}
    pool = BlockPool if options.get("reserve", "paged") == "paged" else BuddyPool
    return Scheduler(pool(num_blocks), **{**defaults, **options})


def make_request(name: str, prompt: list[int], max_tokens: int, **params: object) -> Request:
    stop_ids = tuple(params.pop("stop_ids", ()))  # pyright: ignore[reportArgumentType]
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params), stop_ids=stop_ids)  # pyright: ignore


class Device:
    """Runs plans in order on a cache of slots, as a real device would: rows read only what was written to their blocks."""

    def __init__(self, scheduler: Scheduler):
        self.size, self.windows = scheduler.block_size, scheduler.tables.windows
        self.cache: dict[int, int] = {}
        self.host: dict[int, list[int | None]] = {}
        self.lanes: dict[int, dict] = {}

    def run(self, plan: Plan) -> list[RowResult]:
        for block, place in plan.swap_out:
            self.host[place] = [self.cache.get(slot) for slot in self.slots(block)]
        for block, place in plan.swap_in:
            self.put(block, self.host[place])
        for source, target in plan.copies:
            self.put(target, [self.cache.get(slot) for slot in self.slots(source)])
        for e in plan.entries:
            self.lanes[e.lane] = {"request": e.request, "tokens": list(e.tokens), "max_len": e.max_len, "stopped": False}
        tables = [row.table.copy() for row in plan.rows]
        for row, table in zip(plan.rows, tables, strict=True):  # rows of one step may read each other
            for i, token in enumerate(self.tokens(row)):
                self.write(table, row.start + i, token)
        return [self.run_row(row, table) for row, table in zip(plan.rows, tables, strict=True)]

    def slots(self, block: int) -> range:
        return range(block * self.size, (block + 1) * self.size)

    def put(self, block: int, values: list[int | None]) -> None:
        for slot, value in zip(self.slots(block), values, strict=True):
            self.cache.pop(slot, None)
            if value is not None:
                self.cache[slot] = value

    def tokens(self, row) -> tuple[int, ...]:
        lane = self.lanes[row.lane]
        known = lane["tokens"]
        if row.tokens is not None:
            known[row.start : max(len(known), row.start + row.count)] = [*row.tokens, *known[row.start + row.count :]]
            return row.tokens
        if lane["stopped"]:
            return ()  # the host does not know yet
        assert len(known) == row.start + 1, f"{row.request_id}: the lane has {len(known)} tokens, the row starts at {row.start}"
        return (known[-1],)

    def run_row(self, row, table) -> RowResult:
        lane, out = self.lanes[row.lane], []
        length = row.start + row.count
        for step in range(row.steps):
            if lane["stopped"]:
                break
            if step:
                self.write(table, length, lane["tokens"][length])
                length += 1
            context = self.read(table, length)
            if lane["request"].params.beam_width:  # lanes do not follow the forks
                assert len(context) == length, "beams need a group without a window here"
                return RowResult((0,), (Logprobs(0, 0.0, 1, tuple(candidates(context))),))
            assert context == lane["tokens"][:length][-len(context) :], f"{row.request_id} reads what it did not write"
            token = next_token(lane["tokens"][:length])
            lane["tokens"][length:] = [token]
            out.append(token)
            stops = token in lane["request"].stop_ids and length >= len(lane["request"].prompt) + lane["request"].params.min_tokens
            lane["stopped"] = stops or length + 1 >= lane["max_len"]
        return RowResult(tuple(out))

    def read(self, table, length: int) -> list[int]:
        """All that the newest token sees, in the group that sees the most; each group must see the same as far as it does."""
        seen: list[list[int]] = []
        for window, blocks in zip(self.windows, table, strict=True):
            places = range(0 if window is None else max(0, length - window), length)
            seen.append([self.cache[blocks[p // self.size] * self.size + p % self.size] for p in places])
        longest = max(seen, key=len)
        assert all(part == longest[len(longest) - len(part) :] for part in seen), "layer groups read different tokens"
        return longest

    def write(self, table, position: int, token: int) -> None:
        for blocks in table:
            block = blocks[position // self.size]
            assert block != 0, "a real token was sent to the scrap block"
            self.cache[block * self.size + position % self.size] = token


def expected(request: Request, max_model_len: int) -> list[int]:
    tokens = list(request.prompt)
    limit = min(len(tokens) + (request.params.max_tokens or max_model_len), max_model_len)
    while len(tokens) < limit:
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_ids and len(tokens) - len(request.prompt) > request.params.min_tokens:
            break
    return tokens[len(request.prompt) :]


def drive(
    scheduler: Scheduler,
    arrivals: dict[int, list[Request]],
    delay: int,
    each_step: Callable[[int, Plan | None], None] = lambda *_: None,
) -> dict[tuple[str, int], list[TokenEvent]]:
    """Runs to the end, committing `delay` steps late; checks the pool after every step."""
    device, events, flight, step = Device(scheduler), {}, deque(), 0
    while scheduler.has_work() or flight or any(at >= step for at in arrivals):
        for request in arrivals.get(step, []):
            scheduler.add(request)
        plan = scheduler.schedule()
        each_step(step, plan)
        if plan is not None:
            assert plan.num_tokens <= scheduler.token_budget
            assert len(plan.copies) <= len(plan.rows) * len(scheduler.tables.windows)  # for so many a bucket has room
            assert {copy.target for copy in plan.copies} <= {block for s in scheduler.running for block in s.held}
            assert [row.count == 1 for row in plan.rows] == sorted((row.count == 1 for row in plan.rows), reverse=True)
            flight.append((plan, device.run(plan)))
        while flight and len(flight) > (delay if plan is not None else 0):
            for event in scheduler.commit(*flight.popleft()):
                events.setdefault((event.request_id, event.index), []).append(event)
        for event in scheduler.take_ended():
            events.setdefault((event.request_id, event.index), []).append(event)
        scheduler.check()
        step += 1
        assert step < 5000, "no progress"
    assert scheduler.pool.num_free == scheduler.pool.capacity
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [t for e in events for t in e.tokens]
