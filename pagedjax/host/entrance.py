"""The way in: who may wait, who is next, who gives way. One waiting queue with its tenants, pools, bounds and measured rates."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pagedjax.errors import QueueFull, check
from pagedjax.host.admission import AdmissionLimits, Load, Rates, admit, missed, output_left
from pagedjax.host.policy import PolicyOptions, Waiting, displaceable, priority, victim
from pagedjax.host.pools import POOLS, Held, PoolShares, batch_over, may_enter
from pagedjax.host.request import Request
from pagedjax.host.sequence import Sequence
from pagedjax.host.tables import BlockTables
from pagedjax.host.tenants import TenantLimits, Tenants, TokenCosts
from pagedjax.host.waiting import WaitingQueue


@dataclass(frozen=True)
class ServiceRules:
    """How requests that compete are served."""

    policy: str = "first_come"
    options: PolicyOptions = PolicyOptions()
    shares: PoolShares = PoolShares()
    tenants: Mapping[str, TenantLimits] = field(default_factory=dict)
    other_tenants: TenantLimits = TenantLimits()  # those that are not named
    costs: TokenCosts = TokenCosts()
    max_queued_tokens: int | None = None  # of prompts, in each pool
    max_first_token: float | None = None  # seconds that are predicted for an interactive request, at most
    token_seconds: float | None = None  # the time between two tokens that prefill may not exceed; None: it takes the whole budget


class Holdings(NamedTuple):
    """What the running sequences hold, by tenant and by pool."""

    tenants: dict[str, Held]
    pools: dict[str, Held]


def holdings(running: Iterable[Sequence]) -> Holdings:
    tenants: dict[str, Held] = {}
    pools: dict[str, Held] = dict.fromkeys(POOLS, Held())
    for s in running:
        service, blocks = s.request.service, s.num_held
        for table, name in ((tenants, service.tenant), (pools, service.pool)):
            rows, held = table.get(name, Held())
            table[name] = Held(rows + 1, held + blocks)
    return Holdings(tenants, pools)


class Entrance:
    """Sequences that wait, and what decides about them."""

    def __init__(self, rules: ServiceRules, tables: BlockTables, *, num_lanes: int, token_budget: int):
        self.rules, self.tables, self.num_lanes = rules, tables, num_lanes
        self.rates = Rates(token_budget)
        self.tenants = Tenants(rules.tenants, default=rules.other_tenants, costs=rules.costs)
        self.queue: WaitingQueue[Sequence] = WaitingQueue(
            rules.policy,
            rules.options,
            tenants=self.tenants,
            shares=rules.shares,
            cached=self._cached,
            seconds=self.rates.finish,
            blocks=self._whole,
        )
        self._counts_tenants = bool(rules.tenants) or rules.other_tenants != TenantLimits()

    def _cached(self, sequence: Sequence) -> int:
        return self.tables.find(sequence, len(sequence.tokens) - 1).num_tokens

    # --- requests ---------------------------------------------------------------------------------------------------

    def admit(self, request: Request, first: Sequence, count: int, followers: int, running: list[Sequence], most: int) -> None:
        """Raises unless a request of `count` sequences like `first` may wait; at most `most` sequences wait, of which `followers`
        are not in the queue."""
        service, rules = request.service, self.rules
        limits = self.tenants.limits(service.tenant)
        need = self.tables.blocks_for(len(request.prompt)) * len(self.tables.windows)
        check(
            limits.max_blocks is None or need <= limits.max_blocks,
            f"request {request.id}: the prompt needs {need} blocks; tenant {service.tenant!r} may hold {limits.max_blocks}",
        )
        self._counts_tenants |= service.tenant != ""
        pool, seen = service.pool, self.queue.view(first)
        cheap = AdmissionLimits(most, rules.max_queued_tokens, None)
        load = Load(self.queue.count(pool) + followers, self.queue.tokens(pool), self.queue.ahead(seen), self.num_lanes)
        try:
            admit(request.id, count, seen.prompt_left, load, cheap, self.rates)
            if rules.max_first_token is None or pool == "batch":
                return
        except QueueFull:
            pass  # said again below, with an estimate that knows the running sequences
        load = load._replace(remaining=output_left(map(self.queue.view, running)))
        limit = None if pool == "batch" else rules.max_first_token
        admit(request.id, count, seen.prompt_left, load, replace(cheap, max_first_token=limit), self.rates)

    def entered(self, sequence: Sequence, cached: int, now: float) -> None:
        if self._counts_tenants:
            service, prompt = sequence.request.service, sequence.prompt_len
            cached = min(cached, prompt)
            self.tenants.admitted(sequence.key, service.pool, service.tenant, prompt=prompt, cached=cached, now=now)

    def computed(self, sequence: Sequence, now: float) -> None:
        if self._counts_tenants:
            self.tenants.computed(sequence.key, sequence.num_scheduled, now)

    def generated(self, sequence: Sequence, tokens: int, now: float) -> None:
        if self._counts_tenants:
            self.tenants.generated(sequence.key, tokens, now)

    def left(self, sequence: Sequence, now: float) -> None:
        if self._counts_tenants:
            self.tenants.left(sequence.key, now)

    # --- a step -----------------------------------------------------------------------------------------------------

    def budget(self, decoding: int, most: int) -> int:
        """Tokens of the next step: `most`, or with a target for the time between tokens as many as keep it. Prompts get
        a block's worth at least."""
        target = self.rules.token_seconds
        if target is None or not decoding or not self.rates.known:
            return most
        fixed = self.rates.seconds_of(0)
        each = self.rates.seconds_of(1) - fixed
        fits = most if each <= 0 else int((target - fixed) / each)
        return min(most, max(fits, decoding + self.tables.size))

    def turn(self, sequence: Sequence) -> tuple[float, float]:
        """Sequences of one pool compute their prompts in this order, whether they have begun or not, equals as they came: tenants
        that got less first, of a tenant what is more urgent by priority. So an enormous prompt holds up nobody but its own."""
        service = sequence.request.service
        urgency = priority(self.queue.view(sequence), self.rules.options) if self.rules.policy == "priority" else 0.0
        return self.tenants.counter(service.pool, service.tenant), urgency

    def late(self, sequence: Sequence, now: float) -> str | None:
        """Why the waiting sequence's deadline cannot be met."""
        return None if sequence.request.service.deadline is None else missed(self.queue.view(sequence), now)

    def held_by_pool(self, sequence: Sequence, need: int, held: Holdings) -> str | None:
        """Why the next sequence must wait for its pool's sake."""
        pool = sequence.request.service.pool
        other = self.queue.peek("batch" if pool == "interactive" else "interactive")
        return may_enter(
            pool,
            held.pools[pool],
            need,
            lanes=self.num_lanes,
            capacity=self.tables.pool.capacity,
            other=None if other is None else self._whole(other),
            shares=self.rules.shares,
        )

    def _whole(self, sequence: Sequence) -> int:
        """Blocks of its tokens, as if none were shared."""
        return self.tables.blocks_for(len(sequence.tokens)) * len(self.tables.windows)

    def may_displace(self, running: Iterable[Sequence]) -> bool:
        """Whether anybody that waits might take the place of one that runs."""
        if self.rules.policy == "priority":
            return True
        return self.queue.count("interactive") > 0 and any(s.request.service.pool == "batch" for s in running)

    def displaceable(self, first: Sequence, running: Iterable[Sequence], held: Holdings) -> Iterator[Sequence]:
        """Running sequences that make room for `first`, the next to enter; first to go first."""
        by_order = {s.order: s for s in running}
        views = map(self.queue.view, by_order.values())
        over = self._batch_over(held)
        found = displaceable(self.queue.view(first), views, self.rules.policy, self.rules.options, batch_over=over)
        return (by_order[v.order] for v in found)

    def victim(self, needing: Sequence, running: list[Sequence], planned: set[int]) -> Sequence:
        """Who gives up its blocks so that `needing`, which runs, can grow; maybe itself."""
        by_order = {s.order: s for s in running}
        views: list[Waiting] = [self.queue.view(s) for s in running]
        over = any(v.pool == "batch" for v in views) and self._batch_over(holdings(running))
        mine = next(v for v in views if v.order == needing.order)
        return by_order[victim(mine, views, self.rules.policy, self.rules.options, planned=planned, batch_over=over).order]

    def _batch_over(self, held: Holdings) -> bool:
        return batch_over(held.pools["batch"], lanes=self.num_lanes, capacity=self.tables.pool.capacity, shares=self.rules.shares)
