"""Who goes first, and who gives way: pure functions over what is known of a sequence.

A policy gives a number, the smallest goes first, ties by order of arrival. Waiting is worth something in all of them, and always at
the same rate, so the present time stands in no key: it would be the same amount for everybody. A key is therefore constant while a
sequence waits, a heap can hold it, and whoever is d levels behind is passed only by what comes within d * aging seconds after it.
"""

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from pagedjax.errors import check
from pagedjax.host.request import Request


class QueuedSequence(Protocol):
    """What is read of a sequence. `order` is its own among all sequences; neither it nor `arrival` changes by preemption."""

    request: Request
    max_len: int
    tokens: list[int]
    num_scheduled: int
    arrival: float  # seconds, of the scheduler's clock
    order: int

    @property
    def prompt_len(self) -> int: ...


class Waiting(NamedTuple):
    """A sequence as the policies see it, one that runs too."""

    order: int
    arrival: float
    tenant: str = ""
    pool: str = "interactive"
    priority: int = 0  # the smaller, the more urgent
    prompt_left: int = 0  # tokens to compute before the next one is sampled
    cached: int = 0  # tokens found in the prefix cache; of one that runs, those it has in the cache
    output_left: int = 1  # tokens that are expected to follow
    deadline: float | None = None  # on the clock of arrival
    seconds: float = 0.0  # from its start to its last token, as predicted


def view(
    sequence: QueuedSequence, *, cached: int = 0, seconds: Callable[[int, int], float | None] = lambda prompt, output: None
) -> Waiting:
    """The sequence as it stands. `seconds` predicts from the tokens of prompt and output that are left. A request that does not
    say how long its answer is may end with the next token: no more than that is predicted of it."""
    service, generated = sequence.request.service, len(sequence.tokens) - sequence.prompt_len
    longest = sequence.max_len - sequence.prompt_len
    wanted = service.expected_tokens or sequence.request.params.max_tokens
    cached = max(sequence.num_scheduled, cached)
    prompt_left = max(0, len(sequence.tokens) - cached)
    output_left = max(1, min(wanted or longest, longest) - generated)
    return Waiting(
        order=sequence.order,
        arrival=sequence.arrival,
        tenant=service.tenant,
        pool=service.pool,
        priority=service.priority,
        prompt_left=prompt_left,
        cached=cached,
        output_left=output_left,
        deadline=None if service.deadline is None else sequence.arrival + service.deadline,
        seconds=seconds(prompt_left, output_left if wanted else 1) or 0.0,
    )


@dataclass(frozen=True)
class PolicyOptions:
    """How the policies weigh. One level is one step of priority, or level_tokens of cached prefix or of work."""

    aging: float = 30.0  # seconds of waiting that are worth one level; inf: waiting is worth nothing
    level_tokens: int = 1024
    output_weight: float = 4.0  # work of a token that is generated, in tokens of a prompt
    patience: float = 600.0  # seconds from arrival to the deadline of what has none
    hysteresis: float = 0.5  # levels that a waiting sequence must be ahead of a running one to take its place

    def __post_init__(self):
        check(self.aging > 0, f"aging must be positive seconds; got {self.aging}")
        check(self.level_tokens > 0, f"level_tokens must be positive; got {self.level_tokens}")
        check(self.output_weight >= 0, f"output_weight must not be negative; got {self.output_weight}")
        check(self.patience > 0, f"patience must be positive seconds; got {self.patience}")
        check(self.hysteresis >= 0, f"hysteresis must not be negative; got {self.hysteresis}")


def first_come(waiting: Waiting, options: PolicyOptions) -> float:
    return waiting.arrival


def urgency(priority: int, arrival: float, options: PolicyOptions) -> float:
    """What `priority` goes by; the smaller, the more urgent."""
    return priority + arrival / options.aging


def priority(waiting: Waiting, options: PolicyOptions) -> float:
    return urgency(waiting.priority, waiting.arrival, options)


def longest_prefix(waiting: Waiting, options: PolicyOptions) -> float:
    """Most cached tokens first (RadixAttention, Zheng et al. 2024), with aging."""
    return waiting.arrival / options.aging - waiting.cached / options.level_tokens


def shortest_work(waiting: Waiting, options: PolicyOptions) -> float:
    work = waiting.prompt_left + options.output_weight * waiting.output_left
    return waiting.arrival / options.aging + work / options.level_tokens


def deadline(waiting: Waiting, options: PolicyOptions) -> float:
    """Least slack first: the latest moment at which it may start and still be in time."""
    due = waiting.arrival + options.patience if waiting.deadline is None else waiting.deadline
    return due - waiting.seconds


Policy = Callable[[Waiting, PolicyOptions], float]
POLICIES: dict[str, Policy] = {
    policy.__name__: policy for policy in (first_come, priority, longest_prefix, shortest_work, deadline)
}
CHANGING = ("longest_prefix", "shortest_work", "deadline")  # their keys follow the cache and the measured rates


def rank(waiting: Waiting, policy: str, options: PolicyOptions) -> tuple[float, int]:
    """Sorts sequences of one pool and tenant, first to be served first."""
    return POLICIES[policy](waiting, options), waiting.order


def victim(
    needing: Waiting,
    running: Iterable[Waiting],
    policy: str,
    options: PolicyOptions,
    *,
    planned: Container[int] = (),
    batch_over: bool = False,
) -> Waiting:
    """Who gives up its blocks so that `needing`, which runs, can grow: the last by the policy, which may be `needing` itself.

    Batch work goes before interactive work does where it holds more than its own (batch_over) or where no other interactive
    sequence runs, and interactive work never goes for batch work. The first of its pool is never asked by its own pool, so
    somebody always gets on. `planned`: orders of sequences that the present plan holds, who cannot go.
    """
    others = [r for r in running if r.order != needing.order]
    pool = needing.pool
    if pool == "interactive" and (batch_over or all(r.pool == "batch" for r in others)):
        pool = "batch"
    free = [r for r in others if r.pool == pool and r.order not in planned]
    if pool == needing.pool or not free:
        free.append(needing)
    return max(free, key=lambda r: rank(r, policy, options))


def displaceable(
    first: Waiting, running: Collection[Waiting], policy: str, options: PolicyOptions, *, batch_over: bool = False
) -> list[Waiting]:
    """Running sequences that may be preempted so that `first`, the next to enter, finds a lane and blocks; first to go first.

    Batch work that is above its own (batch_over) makes room for interactive work. By priority, sequences of the same pool and
    tenant do that are `hysteresis` levels behind or more, age counted: no inversion beyond that, whatever is full. What is
    displaced waits with the key it had, so it never takes the place of the one it made room for. Between tenants no priority
    counts: a tenant that calls everything urgent would get everything.
    """
    batch = [r for r in running if r.pool == "batch"] if first.pool == "interactive" and batch_over else []
    behind = priority(first, options) + options.hysteresis
    peers = (r for r in running if (r.pool, r.tenant) == (first.pool, first.tenant))
    own = [r for r in peers if priority(r, options) >= behind] if policy == "priority" else []
    return [r for part in (batch, own) for r in sorted(part, key=lambda r: rank(r, policy, options), reverse=True)]
