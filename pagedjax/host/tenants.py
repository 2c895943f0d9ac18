"""Fairness among tenants: virtual token counters (VTC, Sheng et al., OSDI 2024), ceilings and caps.

A tenant's counter is the service it received, in weighted tokens, over its weight. The tenant with work waiting whose counter is
the smallest is served next. Nobody saves up credit: one that comes back is lifted to the smallest counter of those that wait. For
two tenants of weight 1 that both have work waiting all the time, the services they receive in that time never differ by more than
`fairness_bound`, whatever they send. A tenant is passed over only for its own ceiling or caps: while one may start, one does. What
it could not take for these it does not catch up on.
"""

from collections.abc import Collection, Container, Hashable, Mapping
from dataclasses import dataclass

from pagedjax.errors import check
from pagedjax.host.pools import Held

Flow = tuple[str, str]  # pool, tenant: work of the two pools is counted apart
FORGET_AT = 1024  # counters and token buckets that are kept before those that say nothing are dropped


@dataclass(frozen=True)
class TenantLimits:
    """None: no limit."""

    weight: float = 1.0  # share of the service, beside the other tenants' weights
    tokens_per_minute: int | None = None  # computed for prompts, or generated; a minute's worth may come at once
    max_rows: int | None = None  # running sequences
    max_blocks: int | None = None  # held by running sequences

    def __post_init__(self):
        check(0 < self.weight < float("inf"), f"a tenant's weight must be positive, and finite; got {self.weight}")
        for name in ("tokens_per_minute", "max_rows", "max_blocks"):
            value = getattr(self, name)
            check(value is None or value >= 1, f"a tenant's {name} must be at least 1; got {value}")


@dataclass(frozen=True)
class TokenCosts:
    """Service that a token counts for."""

    input: float = 1.0
    cached: float = 0.1  # of a prompt, found in the prefix cache
    output: float = 2.0

    def __post_init__(self):
        check(
            0 <= self.cached <= self.input <= self.output,
            f"token costs must rise from cached to input to output; got {self.cached}, {self.input} and {self.output}",
        )
        check(0 < self.output < float("inf"), f"the cost of an output token must be positive, and finite; got {self.output}")


def fairness_bound(costs: TokenCosts, longest_prompt: int, most_tokens: int) -> float:
    """The most by which the services of two tenants of weight 1 may differ over a time in which both always have work waiting.

    most_tokens: of prompt and output, of sequences that run at one time, over their lives: the slots of the pool where a sequence
    enters only if all it may become fits, else lanes times the longest sequence. Theorem 4.4 of the paper.
    """
    return 2 * max(costs.input * longest_prompt, costs.output * most_tokens)


@dataclass(slots=True)
class _Account:
    """Of a live sequence: how much of its prompt was charged, or cached when it was admitted, in all its lives."""

    flow: Flow
    prompt: int
    done: int


class Tenants:
    """Counters and token buckets of all tenants. Seconds are of the scheduler's clock; keys are those of live sequences."""

    def __init__(
        self,
        limits: Mapping[str, TenantLimits] | None = None,
        *,
        default: TenantLimits = TenantLimits(),
        costs: TokenCosts = TokenCosts(),
    ):
        """default: limits of each tenant that is not named in `limits`."""
        self.default, self.costs = default, costs
        self._limits = dict(limits or {})
        self._counters: dict[Flow, float] = {}
        self._last: dict[str, Flow] = {}  # of each pool, who was served last
        self._levels: dict[str, tuple[float, float]] = {}  # tokens left, and when; a missing one is full
        self._accounts: dict[Hashable, _Account] = {}
        self._forget_at = FORGET_AT

    def limits(self, tenant: str) -> TenantLimits:
        return self._limits.get(tenant, self.default)

    def counter(self, pool: str, tenant: str) -> float:
        return self._counters.get((pool, tenant), 0.0)

    def arrived(self, pool: str, tenant: str, waiting: Collection[str], now: float) -> None:
        """The tenant had nothing waiting in the pool and now has; `waiting`: the other tenants that have.

        Without others it is lifted to the counter of the one that was served last.
        """
        others = [self.counter(pool, other) for other in waiting if other != tenant]
        last = self._last.get(pool)
        floor = min(others) if others else self._counters.get(last, 0.0) if last else 0.0
        if len(self._counters) + len(self._levels) >= self._forget_at:
            self._forget(pool, {*waiting, tenant}, floor, now)
        self.lift(pool, tenant, floor)

    def lift(self, pool: str, tenant: str, floor: float) -> None:
        """The tenant's counter is `floor` at least."""
        self._counters[pool, tenant] = max(self.counter(pool, tenant), floor)

    def admitted(self, key: Hashable, pool: str, tenant: str, *, prompt: int, cached: int, now: float) -> None:
        """A sequence starts. What is cached of its prompt counts as service, the rest against the ceiling at once; neither
        does again after a preemption."""
        self._last[pool] = pool, tenant
        if key not in self._accounts:
            self._accounts[key] = _Account((pool, tenant), prompt, cached)
            self._charge((pool, tenant), cached * self.costs.cached, prompt - cached, now)

    def computed(self, key: Hashable, end: int, now: float) -> None:
        """The prompt is computed up to position `end`. It is charged chunk by chunk: a tenant that comes back is lifted to what the
        others have got, not to what they will have when their prompts are done."""
        account = self._accounts.get(key)
        end = min(end, account.prompt) if account is not None else 0
        if account is not None and end > account.done:
            self._charge(account.flow, (end - account.done) * self.costs.input, 0, now)
            account.done = end

    def found(self, key: Hashable, end: int, now: float) -> None:
        """The prompt is there up to position `end`, as others have computed it meanwhile: as if it had been cached."""
        account = self._accounts.get(key)
        end = min(end, account.prompt) if account is not None else 0
        if account is not None and end > account.done:
            self._charge(account.flow, (end - account.done) * self.costs.cached, account.done - end, now)
            account.done = end

    def generated(self, key: Hashable, tokens: int, now: float) -> None:
        """The sequence got so many new tokens. Nothing is charged to one that was never admitted here: it started before anybody
        named a tenant."""
        account = self._accounts.get(key)
        if account is not None:
            self._charge(account.flow, tokens * self.costs.output, tokens, now)

    def left(self, key: Hashable, now: float) -> None:
        """The sequence ended; what was not computed of its prompt counts against the ceiling no more."""
        account = self._accounts.pop(key, None)
        if account is not None:
            self._charge(account.flow, 0.0, account.done - account.prompt, now)

    def may_start(self, tenant: str, now: float, held: Held, need: Held) -> str | None:
        """Why the tenant, whose running sequences hold so much, may not start one that needs `need` more; None if it may."""
        seconds = self.seconds_over(tenant, now)
        if seconds > 0:
            rate = self.limits(tenant).tokens_per_minute
            return f"tenant {tenant!r} has used its {rate} tokens per minute; it may start in {seconds:.1f} s"
        return self.capped(tenant, held, need)

    def capped(self, tenant: str, held: Held, need: Held) -> str | None:
        """Why its caps do not let it."""
        limits = self.limits(tenant)
        if limits.max_rows is not None and held.rows + need.rows > limits.max_rows:
            return f"tenant {tenant!r} may run {limits.max_rows} rows; it runs {held.rows} and needs {need.rows} more"
        if limits.max_blocks is not None and held.blocks + need.blocks > limits.max_blocks:
            return f"tenant {tenant!r} may hold {limits.max_blocks} blocks; it has {held.blocks} and needs {need.blocks} more"
        return None

    def seconds_over(self, tenant: str, now: float) -> float:
        """Until the tenant has tokens to start with. What it started may go on beyond its ceiling: that is paid back first."""
        rate = self.limits(tenant).tokens_per_minute
        return 0.0 if rate is None else max(0.0, (1 - self._level(tenant, rate, now)) * 60 / rate)

    def _level(self, tenant: str, rate: int, now: float) -> float:
        level, then = self._levels.get(tenant, (rate, now))
        return min(rate, level + (now - then) * rate / 60)

    def _charge(self, flow: Flow, cost: float, tokens: int, now: float) -> None:
        limits = self.limits(flow[1])
        self._counters[flow] = self._counters.get(flow, 0.0) + cost / limits.weight
        rate = limits.tokens_per_minute
        if rate is not None:
            self._levels[flow[1]] = min(rate, self._level(flow[1], rate, now) - tokens), now

    def _forget(self, pool: str, waiting: Container[str], floor: float, now: float) -> None:
        """Drops counters of the pool's idle tenants who would be lifted anyway, and full token buckets: names may be made up."""
        live = {account.flow for account in self._accounts.values()} | {*self._last.values()}
        for flow, counter in list(self._counters.items()):
            if flow[0] == pool and flow[1] not in waiting and flow not in live and counter <= floor:
                del self._counters[flow]
        for tenant in list(self._levels):
            rate = self.limits(tenant).tokens_per_minute
            if rate is None or self._level(tenant, rate, now) >= rate:
                del self._levels[tenant]
        self._forget_at = max(FORGET_AT, 2 * (len(self._counters) + len(self._levels)))
