"""The sequences that wait, and which of them is next."""

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from pagedjax.errors import check
from pagedjax.host.policy import CHANGING, POLICIES, PolicyOptions, QueuedSequence, Waiting, rank, view
from pagedjax.host.pools import POOLS, Held, PoolShares
from pagedjax.host.tenants import Tenants

WINDOW = 128  # sequences of a pool that are ranked anew at a time
REFRESH = 0.25  # seconds between two such times


class Ahead(NamedTuple):
    """What will be served before a sequence that comes now, as far as can be foreseen."""

    sequences: float = 0
    tokens: float = 0  # of prompts
    output: float = 0  # expected


class _Item[S](NamedTuple):
    rank: tuple[float, int]
    view: Waiting
    sequence: S


class _Flow[S: QueuedSequence]:
    """The waiting sequences of one tenant in one pool, first by rank. A heap, whose entries may be out of date: an item that was
    removed or ranked anew is passed over when it comes up."""

    def __init__(self):
        self.items: dict[int, _Item[S]] = {}  # by order
        self.tokens = self.output = 0
        self.last = (float("-inf"), 0)  # no rank is or was above
        self._heap: list[tuple[float, int]] = []

    def put(self, item: _Item[S]) -> None:
        self.take(item.view.order)
        self.items[item.view.order] = item
        self.tokens += item.view.prompt_left
        self.output += item.view.output_left
        self.last = max(self.last, item.rank)
        heapq.heappush(self._heap, item.rank)
        if len(self._heap) > 64 + 4 * len(self.items):
            self._heap = sorted(item.rank for item in self.items.values())

    def take(self, order: int) -> None:
        item = self.items.pop(order, None)
        if item is not None:
            self.tokens -= item.view.prompt_left
            self.output -= item.view.output_left

    def head(self) -> _Item[S]:
        """Of a flow that is not empty."""
        while True:
            item = self.items.get(self._heap[0][1])
            if item is not None and item.rank == self._heap[0]:
                return item
            heapq.heappop(self._heap)


class WaitingQueue[S: QueuedSequence]:
    """Which sequence is next: of a pool, by the tenant with the smallest counter, by the policy among its own.

    Interactive and batch work stand in separate queues; each has a head, and what of a step a pool may use, the other pool's wants
    considered, is for pools.tokens_for and pools.may_enter to say: batch work owns a share of lanes, blocks and tokens that
    interactive work does not touch while batch work waits, so it gets on at that share whatever comes, and no further than that
    while interactive work waits. Within a pool the tenant with the smallest counter is next that its own ceiling and caps let
    start (Tenants); nobody else is passed over. Within a tenant the policy decides, ties by order of arrival. A preempted sequence
    is pushed again and keeps its place, as its arrival and its order are what they were.

    The head costs O(tenants) and, amortized, O(log n) of the sequences. Where keys follow the cache or the measured rates, the
    next WINDOW sequences of the pool, each in its turn, are ranked anew every REFRESH seconds.
    """

    def __init__(
        self,
        policy: str = "first_come",
        options: PolicyOptions | None = None,
        *,
        tenants: Tenants | None = None,
        shares: PoolShares | None = None,
        cached: Callable[[S], int] = lambda sequence: 0,
        seconds: Callable[[int, int], float | None] = lambda prompt, output: None,
        needs: Callable[[S], Held] = lambda sequence: Held(1, 0),
    ):
        """cached: tokens that the prefix cache holds of a sequence; seconds: see policy.view; needs: what a sequence holds once it
        has started, for its tenant's caps."""
        check(policy in POLICIES, f"policy must be one of {', '.join(POLICIES)}; got {policy!r}")
        self.policy, self.options, self.shares = policy, options or PolicyOptions(), shares or PoolShares()
        self.tenants = Tenants() if tenants is None else tenants
        self.held_back: dict[str, dict[str, str]] = {pool: {} for pool in POOLS}  # whom the last head() passed over, and why
        self._cached, self._seconds, self._needs = cached, seconds, needs
        self._flows: dict[str, dict[str, _Flow[S]]] = {pool: {} for pool in POOLS}  # none is empty
        self._refreshed: dict[str, float] = dict.fromkeys(POOLS, float("-inf"))

    # --- what waits -------------------------------------------------------------------------------------------------

    def push(self, sequence: S, now: float) -> None:
        """Queues a sequence that came, or that was preempted."""
        item = self._item(sequence)
        flows, tenant = self._flows[item.view.pool], item.view.tenant
        if tenant not in flows:
            self.tenants.arrived(item.view.pool, tenant, flows, now)
            flows[tenant] = _Flow()
        flows[tenant].put(item)

    def remove(self, sequence: S) -> None:
        """It enters, or ended."""
        service = sequence.request.service
        flow = self._flows[service.pool][service.tenant]
        flow.take(sequence.order)
        if not flow.items:
            del self._flows[service.pool][service.tenant]

    def __len__(self) -> int:
        return sum(self.count(pool) for pool in POOLS)

    def __iter__(self) -> Iterator[S]:
        """In no order that means anything."""
        return (item.sequence for flow in self._all() for item in flow.items.values())

    def __contains__(self, sequence: S) -> bool:
        service = sequence.request.service
        flow = self._flows[service.pool].get(service.tenant)
        return flow is not None and sequence.order in flow.items

    def count(self, pool: str) -> int:
        return sum(len(flow.items) for flow in self._flows[pool].values())

    def tokens(self, pool: str) -> int:
        """Tokens that the pool's waiting sequences have to compute before each of them samples."""
        return sum(flow.tokens for flow in self._flows[pool].values())

    def view(self, sequence: S) -> Waiting:
        """As it stands now, whether it waits or runs."""
        cached = 0 if sequence.num_scheduled else self._cached(sequence)
        return view(sequence, cached=cached, seconds=self._seconds)

    # --- who is next ------------------------------------------------------------------------------------------------

    def head(self, pool: str, now: float, held: Mapping[str, Held]) -> S | None:
        """The pool's next sequence, None if none waits or none may start. held: by the running sequences of each tenant."""
        self.held_back[pool] = passed = {}
        flows = self._flows[pool]
        if self.policy in CHANGING and now - self._refreshed[pool] >= REFRESH:
            self._refresh(flows)
            self._refreshed[pool] = now
        if not flows:
            return None
        left = flows
        while True:
            tenant = min(left, key=lambda t: (self.tenants.counter(pool, t), left[t].head().rank))
            sequence = left[tenant].head().sequence
            reason = self.tenants.may_start(tenant, now, held.get(tenant, Held()), self._needs(sequence))
            if reason is None:
                for other in passed:
                    self.tenants.lift(pool, other, self.tenants.counter(pool, tenant))
                return sequence
            passed[tenant] = reason
            if len(left) == 1:
                return None
            left = dict(flows) if left is flows else left
            del left[tenant]

    def peek(self, pool: str) -> S | None:
        """Who is next but for those whom their ceilings and caps held back when that was last looked at."""
        flows, passed = self._flows[pool], self.held_back[pool]
        left = flows.keys() - passed.keys() if passed else flows.keys()
        if not left:
            return None
        return flows[min(left, key=lambda t: (self.tenants.counter(pool, t), flows[t].head().rank))].head().sequence

    def passed_over(self, pool: str) -> Iterator[tuple[S, str]]:
        """The first sequence of each tenant that the last head() passed over, and why."""
        flows = self._flows[pool]
        return ((flows[t].head().sequence, reason) for t, reason in self.held_back[pool].items() if t in flows)

    def seconds_idle(self, now: float) -> float | None:
        """Until a tenant that waits may start as to its tokens per minute: how long an engine with nothing to run may sleep; None
        if nothing waits."""
        tenants = {tenant for flows in self._flows.values() for tenant in flows}
        return min((self.tenants.seconds_over(tenant, now) for tenant in tenants), default=None)

    def ahead(self, waiting: Waiting) -> Ahead:
        """What is served before a sequence that would be pushed now.

        Of its own tenant, what ranks before it. Of each other tenant, and then of the other pool, what is served meanwhile beside
        that by weight, and not more than there is: the light tenant does not wait for the whole queue of the heavy one.
        """
        flows = self._flows[waiting.pool]
        found = self._before(waiting, flows.get(waiting.tenant))
        weight = self.tenants.limits(waiting.tenant).weight
        tokens = found.tokens + waiting.prompt_left
        for tenant, flow in flows.items():
            if tenant != waiting.tenant:
                found = _beside(found, flow, tokens * self.tenants.limits(tenant).weight / weight)
        batch = self.shares.batch
        ratio = batch / (1 - batch) if waiting.pool == "interactive" else (1 - batch) / batch
        other = self._flows["batch" if waiting.pool == "interactive" else "interactive"]
        tokens = (found.tokens + waiting.prompt_left) * ratio
        all_tokens = sum(flow.tokens for flow in other.values())
        for flow in other.values():
            found = _beside(found, flow, tokens * flow.tokens / max(1, all_tokens))
        return found

    # --- parts ------------------------------------------------------------------------------------------------------

    def _all(self) -> Iterator[_Flow[S]]:
        return itertools.chain.from_iterable(flows.values() for flows in self._flows.values())

    def _item(self, sequence: S) -> _Item[S]:
        seen = self.view(sequence)
        return _Item(rank(seen, self.policy, self.options), seen, sequence)

    def _refresh(self, flows: dict[str, _Flow[S]]) -> None:
        each = max(1, WINDOW // max(1, len(flows)))
        for tenant in list(itertools.islice(flows, WINDOW)):
            flow = flows[tenant] = flows.pop(tenant)  # the last one now, and so is each item that is put
            for item in list(itertools.islice(flow.items.values(), each)):
                flow.put(self._item(item.sequence))

    def _before(self, waiting: Waiting, flow: _Flow[S] | None) -> Ahead:
        if flow is None:
            return Ahead()
        mine = rank(waiting, self.policy, self.options)
        if mine > flow.last:
            return Ahead(len(flow.items), flow.tokens, flow.output)
        views = [item.view for item in flow.items.values() if item.rank < mine]
        return Ahead(len(views), sum(v.prompt_left for v in views), sum(v.output_left for v in views))


def _beside(found: Ahead, flow: _Flow, tokens: float) -> Ahead:
    """What is found, and of the flow so much as has `tokens` tokens."""
    part = min(1.0, tokens / max(1, flow.tokens))
    return Ahead(found.sequences + part * len(flow.items), found.tokens + part * flow.tokens, found.output + part * flow.output)
