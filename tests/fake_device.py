"""The scheduler without a device: a model whose next token is a function of what stands before it.

`drive` runs requests through a Scheduler and this device to the end, and checks the pool after every step.
"""

from collections import deque
from collections.abc import Callable

from pagedjax.host.block_pool import BlockPool
from pagedjax.host.plan import Plan, RowResult
from pagedjax.host.request import Request, SamplingParams, TokenEvent
from pagedjax.host.scheduler import Scheduler


def next_token(tokens: list[int]) -> int:
    return (31 * len(tokens) + sum(tokens)) % 97


def make_scheduler(num_blocks: int = 64, **options: int) -> Scheduler:
    defaults = {"block_size": 4, "max_model_len": 64, "num_lanes": 4, "token_budget": 16, "max_queued": 1000, "decode_steps": 1}
    return Scheduler(BlockPool(num_blocks), **{**defaults, **options})


def make_request(name: str, prompt: list[int], max_tokens: int, **params: object) -> Request:
    stop_ids = tuple(params.pop("stop_ids", ()))  # pyright: ignore[reportArgumentType]
    return Request(name, tuple(prompt), SamplingParams(max_tokens=max_tokens, **params), stop_ids=stop_ids)  # pyright: ignore


class Device:
    """Runs plans in order on a cache of slots, as a real device would: rows read only what was written to their blocks."""

    def __init__(self, scheduler: Scheduler):
        self.size = scheduler.block_size
        self.cache: dict[int, int] = {}
        self.lanes: dict[int, dict] = {}

    def run(self, plan: Plan) -> list[RowResult]:
        for e in plan.entries:
            self.lanes[e.lane] = {"request": e.request, "last": e.tokens[-1], "max_len": e.max_len, "stopped": False}
        tables = [row.table[0].copy() for row in plan.rows]
        for row, table in zip(plan.rows, tables, strict=True):  # rows of one step may read each other
            for i, token in enumerate(self.tokens(row)):
                self.write(table, row.start + i, token)
        return [self.run_row(row, table) for row, table in zip(plan.rows, tables, strict=True)]

    def tokens(self, row) -> tuple[int, ...]:
        return row.tokens if row.tokens is not None else (self.lanes[row.lane]["last"],)

    def run_row(self, row, table) -> RowResult:
        lane, out = self.lanes[row.lane], []
        length = row.start + len(self.tokens(row))
        for step in range(row.steps):
            if lane["stopped"]:
                break
            if step:
                self.write(table, length, lane["last"])
                length += 1
            context = [self.cache[table[p // self.size] * self.size + p % self.size] for p in range(length)]
            lane["last"] = next_token(context)
            out.append(lane["last"])
            stops = (
                lane["last"] in lane["request"].stop_ids
                and length >= len(lane["request"].prompt) + lane["request"].params.min_tokens
            )
            lane["stopped"] = stops or length + 1 >= lane["max_len"]
        return RowResult(tuple(out))

    def write(self, table, position: int, token: int) -> None:
        block = table[position // self.size]
        assert block != 0, "a real token was sent to the scrap block"
        self.cache[block * self.size + position % self.size] = token


def expected(request: Request, max_model_len: int) -> list[int]:
    tokens = list(request.prompt)
    limit = min(len(tokens) + request.params.max_tokens, max_model_len)
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
            assert [row.count == 1 for row in plan.rows] == sorted((row.count == 1 for row in plan.rows), reverse=True)
            flight.append((plan, device.run(plan)))
        while flight and len(flight) > (delay if plan is not None else 0):
            for event in scheduler.commit(*flight.popleft()):
                events.setdefault((event.request_id, event.index), []).append(event)
        scheduler.pool.check(s.blocks for s in scheduler.sequences())
        if scheduler.prefix_cache is not None:
            scheduler.prefix_cache.check()
        step += 1
        assert step < 5000, "no progress"
    assert scheduler.pool.num_free == scheduler.pool.capacity
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [t for e in events for t in e.tokens]
