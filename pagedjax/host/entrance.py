"""The way in: who may wait, who is next, who gives way. One waiting queue with its tenants, pools, bounds and measured rates."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pagedjax.errors import QueueFull, check
from pagedjax.host.admission import AdmissionLimits, Left, Load, Rates, admit, missed
from pagedjax.host.beams import BeamSearch
from pagedjax.host.policy import PolicyOptions, Waiting, displaceable, rank, urgency, victim
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
    """What the running sequences hold, by tenant as if none were shared, and by pool each block once."""

    tenants: dict[str, Held]
    pools: dict[str, Held]


def holdings(running: Iterable[Sequence]) -> Holdings:
    flows: dict[tuple[str, str], list[int]] = {}  # by tenant and pool: lanes, blocks, and blocks that were added to those in use
    searches: set[str] = set()  # which hold the lanes of all their beams while any runs
    for s in running:
        request, lanes = s.request, 1
        if beams := request.params.beam_width:
            lanes = 0 if request.id in searches else beams
            searches.add(request.id)
        own, blocks = flows.setdefault((request.service.tenant, request.service.pool), [0, 0, 0]), s.num_held
        own[0] += lanes
        own[1] += blocks
        own[2] += max(0, blocks - s.borrowed)
    tenants: dict[str, Held] = {}
    pools: dict[str, Held] = dict.fromkeys(POOLS, Held())
    for (tenant, pool), (lanes, blocks, added) in flows.items():
        for table, name, more in ((tenants, tenant, blocks), (pools, pool, added)):
            rows, held = table.get(name, Held())
            table[name] = Held(rows + lanes, held + more)
    return Holdings(tenants, pools)


class Entrance:
    """Sequences that wait, and what decides about them."""

    def __init__(
        self, rules: ServiceRules, tables: BlockTables, beams: Mapping[str, BeamSearch], *, num_lanes: int, token_budget: int
    ):
        """beams: of the scheduler, which keeps them."""
        self.rules, self.tables, self._beams, self.num_lanes = rules, tables, beams, num_lanes
        self.rates = Rates(token_budget)
        self.tenants = Tenants(rules.tenants, default=rules.other_tenants, costs=rules.costs)
        self.queue: WaitingQueue[Sequence] = WaitingQueue(
            rules.policy,
            rules.options,
            tenants=self.tenants,
            shares=rules.shares,
            cached=self._cached,
            seconds=self.rates.finish,
            needs=lambda sequence: Held(self.lanes(sequence), self._whole(sequence)),
        )
        self.caps_blocks = any(limits.max_blocks is not None for limits in (*rules.tenants.values(), rules.other_tenants))
        self._counts_tenants = bool(rules.tenants) or rules.other_tenants != TenantLimits()

    def _cached(self, sequence: Sequence) -> int:
        return self.tables.find(sequence, len(sequence.tokens) - 1).num_tokens

    # --- requests ---------------------------------------------------------------------------------------------------

    def longest(self, request: Request) -> int:
        """Tokens of prompt and output that a sequence of the request may have: without max_tokens as many as the pool and the
        tenant's cap allow, but one of output at least. UserError for a request that can never fit, with the numbers."""
        params, prompt, name, tables = request.params, len(request.prompt), f"request {request.id}", self.tables
        tenant, beams, size, most = request.service.tenant, params.beam_width, tables.size, tables.max_model_len
        check(prompt > 0, f"{name}: the prompt must hold at least one token; got 0")
        check(prompt < most, f"{name}: the prompt must be shorter than max_model_len {most}; got {prompt} tokens")
        check(
            not beams or tables.reserve == "paged",
            f"{name}: beams share blocks, which needs reserve to be paged; it is {tables.reserve}",
        )
        limits, largest, wanted = self.tenants.limits(tenant), tables.pool.largest, params.max_tokens
        cap = largest if limits.max_blocks is None else min(largest, limits.max_blocks)
        room = cap // (len(tables.windows) * (beams or 1)) * size + (tables.reserve == "paged")  # the last token is never written
        max_len = min(most, max(prompt + 1, room) if wanted is None else prompt + wanted)
        need = tables.need(prompt, max_len) * (beams or 1)
        what = f"{name}: prompt and output{f' of {beams} beams' if beams else ''} need {need} blocks of {size} tokens"
        one = "" if tables.reserve == "paged" else " in one piece"
        check(need <= largest, f"{what}{one}; the pool has {largest}")
        check(need <= cap, f"{what}; tenant {tenant!r} may hold {cap}")
        check(beams <= self.num_lanes, f"{name}: {beams} beams need as many lanes; there are {self.num_lanes}")
        check(
            limits.max_rows is None or beams <= limits.max_rows,
            f"{name}: {beams} beams need as many rows; tenant {tenant!r} may run {limits.max_rows}",
        )
        return max_len

    def admit(
        self, request: Request, first: Sequence, count: int, followers: int, running: list[Sequence], most: int, now: float
    ) -> None:
        """Raises unless a request of `count` sequences like `first` may wait; at most `most` sequences wait, of which `followers`
        are not in the queue."""
        service, rules = request.service, self.rules
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
        barred = self.tenants.seconds_over(service.tenant, now)
        load = self._found(load, first, seen, running)._replace(barred=barred)
        limit = None if pool == "batch" else rules.max_first_token
        admit(request.id, count, seen.prompt_left, load, replace(cheap, max_first_token=limit), self.rates)

    def _found(self, load: Load, first: Sequence, seen: Waiting, running: list[Sequence]) -> Load:
        """The load with what the running sequences have and will still take; those that would leave for `first` are gone."""
        groups = len(self.tables.windows)
        each = groups / self.tables.size  # blocks for a token
        gone = {s.order for s in self.displaceable(first, running, self.held(running))}
        left: list[Left] = []
        free = float(self.tables.pool.num_free)
        for s in running:
            output = self.queue.view(s).output_left
            if s.order in gone:
                free += s.num_added
            else:
                more = groups + output * each / 2  # on average over the rest of its life, with what is kept free for it
                left.append(Left(output, s.num_added + more))
                free -= more
        need, ahead = seen.prompt_left + seen.output_left / 2, load.ahead.tokens + load.ahead.output / 2
        need_ahead = ahead * each + groups * load.ahead.sequences
        return load._replace(running=tuple(left), free=free, need=need * each + groups, need_ahead=need_ahead)

    def entered(self, sequence: Sequence, cached: int, now: float) -> None:
        if self._counts_tenants:
            service, prompt = sequence.request.service, sequence.prompt_len
            cached = min(cached, prompt)
            self.tenants.admitted(sequence.key, service.pool, service.tenant, prompt=prompt, cached=cached, now=now)

    def computed(self, sequence: Sequence, now: float) -> None:
        if self._counts_tenants:
            self.tenants.computed(sequence.key, sequence.num_scheduled, now)

    def found(self, sequence: Sequence, now: float) -> None:
        if self._counts_tenants:
            self.tenants.found(sequence.key, sequence.num_scheduled, now)

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
        urgent = self._urgency(sequence) if self.rules.policy == "priority" else 0.0
        return self.tenants.counter(service.pool, service.tenant), urgent

    def _urgency(self, sequence: Sequence) -> float:
        return urgency(sequence.request.service.priority, sequence.arrival, self.rules.options)

    def late(self, sequence: Sequence, now: float) -> str | None:
        """Why the waiting sequence's deadline cannot be met."""
        return None if sequence.request.service.deadline is None else missed(self.queue.view(sequence), now)

    def firsts(self, pool: str, now: float, held: Holdings) -> list[Sequence]:
        """For whom others may have to leave: the pool's next sequence, and by priority who would stand there but for its tenant's
        caps."""
        head = self.queue.head(pool, now, held.tenants)
        if self.rules.policy != "priority":
            return [] if head is None else [head]
        passed = [s for s, _ in self.queue.passed_over(pool)]
        turns = [self.tenants.counter(pool, s.request.service.tenant) for s in (head, *passed) if s is not None]
        return [s for s, turn in zip(filter(None, (head, *passed)), turns, strict=True) if head is None or turn <= turns[0]]

    def may_start(self, sequence: Sequence, need: int, held: Holdings, now: float, gone: Iterable[Sequence]) -> bool:
        """Whether its tenant and its pool let the waiting sequence start once these are gone and the others hold so much."""
        over = self.tenants.seconds_over(sequence.request.service.tenant, now) > 0
        return not over and self.capped(sequence, held) is None and self.held_by_pool(sequence, need, held, gone) is None

    def held_by_pool(self, sequence: Sequence, need: int, held: Holdings, gone: Iterable[Sequence] = ()) -> str | None:
        """Why the next sequence must wait for its pool's sake; `gone` wait then, too. A beam whose search has lanes need not."""
        if not self.lanes(sequence):
            return None
        pool = sequence.request.service.pool
        other = self.queue.peek("batch" if pool == "interactive" else "interactive")
        other = other or next((s for s in gone if s.request.service.pool != pool), None)
        return may_enter(
            pool,
            held.pools[pool],
            need,
            self.lanes(sequence),
            lanes=self.num_lanes,
            capacity=self.tables.pool.capacity,
            other=None if other is None else self._whole(other),
            shares=self.rules.shares,
        )

    def _whole(self, sequence: Sequence) -> int:
        """Blocks that it, and who starts with it, hold at most until their known tokens are computed, as if none were shared."""
        return sum(self.tables.most(len(s.tokens)) for s in (sequence, *self.companions(sequence)))

    def companions(self, sequence: Sequence) -> list[Sequence]:
        """Who must start with a waiting sequence: beams take a row together, so that one without the others is of no use."""
        search = self._beams.get(sequence.request.id)
        return [] if search is None or search.lanes else [beam for beam in search.live if beam is not sequence]

    def owed(self, running: Collection[Sequence], entering: Sequence | None = None) -> int:
        """Blocks that the running sequences are about to take, and those of their beams that are still to enter."""
        searches = {s.request.id for s in running} & self._beams.keys() if self._beams else ()
        beams = (beam for name in searches for beam in self._beams[name].outside if beam is not entering)
        return sum(map(self.tables.owed, running)) + sum(self.tables.most(len(beam.tokens)) for beam in beams)

    def outside(self, pool: str) -> Sequence | None:
        """A beam that waits while others of its search hold their lanes: it goes before all that wait in the pool."""
        searches = (search for search in self._beams.values() if search.request.service.pool == pool)
        return next((beam for search in searches for beam in search.outside), None)

    def capped(self, sequence: Sequence, held: Holdings) -> str | None:
        """Why its tenant's caps do not let the waiting sequence start."""
        tenant = sequence.request.service.tenant
        lanes = self.lanes(sequence)
        need = Held(lanes, self._whole(sequence)) if lanes else Held()  # the blocks of a beam outside are owed to it, and held
        return self.tenants.capped(tenant, held.tenants.get(tenant, Held()), need)

    def held(self, running: list[Sequence]) -> Holdings:
        """Holdings, where what a capped tenant's sequences are about to take is theirs already: who enters beside them must not
        have to leave at once."""
        found = holdings(running)
        if self.caps_blocks:
            own: dict[str, list[Sequence]] = {}
            for s in running:
                own.setdefault(s.request.service.tenant, []).append(s)
            for tenant, (rows, blocks) in found.tenants.items():
                if self.tenants.limits(tenant).max_blocks is not None:
                    found.tenants[tenant] = Held(rows, blocks + self.owed(own[tenant]))
        return found

    def cap_left(self, sequence: Sequence, running: list[Sequence]) -> int | None:
        """Blocks that the tenant of a running sequence may still take; None: as many as there are."""
        tenant = sequence.request.service.tenant
        cap = self.tenants.limits(tenant).max_blocks
        return None if cap is None else cap - sum(s.num_held for s in running if s.request.service.tenant == tenant)

    def lanes(self, sequence: Sequence) -> int:
        """That a waiting sequence takes when it enters: the first beam takes those of all."""
        search = self._beams.get(sequence.request.id)
        return 1 if search is None else 0 if search.lanes else len(search.sequences)

    def may_displace(self, running: Iterable[Sequence]) -> bool:
        """Whether anybody that waits might take the place of one that runs."""
        if self.rules.policy == "priority":
            return True
        return self.queue.count("interactive") > 0 and any(s.request.service.pool == "batch" for s in running)

    def displaceable(self, first: Sequence, running: Iterable[Sequence], held: Holdings) -> Iterator[Sequence]:
        """Running sequences that make room for `first`, the next to enter; first to go first."""
        batch, mine = held.pools["batch"], first.request.service
        over, by_priority = mine.pool == "interactive" and self._batch_over(batch), self.rules.policy == "priority"
        behind = self._urgency(first) + self.rules.options.hysteresis

        def may(s: Sequence) -> bool:  # a view of each that runs would take long
            other = s.request.service
            own = by_priority and other.pool == mine.pool and other.tenant == mine.tenant and self._urgency(s) >= behind
            return own or over and other.pool == "batch"

        by_order = {s.order: s for s in running if may(s)}
        views = [self.queue.view(s) for s in by_order.values()]
        found = displaceable(self.queue.view(first), views, self.rules.policy, self.rules.options, batch_over=over)
        for sequence in (by_order[v.order] for v in found):
            if sequence.request.service.pool != first.request.service.pool:
                if not self._batch_over(batch):
                    continue  # what batch work owns it keeps
                batch = Held(batch.rows - 1, batch.blocks - sequence.num_added)
            yield sequence

    def place(self, sequence: Sequence) -> tuple[bool, tuple[float, int]]:
        """Who runs and comes later by this makes room first."""
        return sequence.request.service.pool == "batch", rank(self.queue.view(sequence), self.rules.policy, self.rules.options)

    def victim(self, needing: Sequence, running: list[Sequence], planned: set[int]) -> Sequence:
        """Who gives up its blocks so that `needing`, which runs, can grow; maybe itself."""
        by_order = {s.order: s for s in running}
        views: list[Waiting] = [self.queue.view(s) for s in running]
        over = any(v.pool == "batch" for v in views) and self._batch_over(holdings(running).pools["batch"])
        mine = next(v for v in views if v.order == needing.order)
        return by_order[victim(mine, views, self.rules.policy, self.rules.options, planned=planned, batch_over=over).order]

    def _batch_over(self, batch: Held) -> bool:
        return batch_over(batch, lanes=self.num_lanes, capacity=self.tables.pool.capacity, shares=self.rules.shares)
