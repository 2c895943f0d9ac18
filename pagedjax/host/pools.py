"""Interactive and batch work beside each other: what each may hold, so that a flood of one does not move the other.

Batch work owns a share of the lanes, of the blocks and of every step's tokens, interactive work the rest. While both wait, each
enters only within its own; what one does not want the other may have, and what batch work has beyond its own it gives back when
interactive work needs it (policy.displaceable). So batch work always gets on, at its share at least, and interactive work finds
its lanes, its blocks and its part of the step as if there were no batch work beyond that share.
"""

from dataclasses import dataclass
from typing import NamedTuple

from pagedjax.errors import check

POOLS = ("interactive", "batch")


@dataclass(frozen=True)
class PoolShares:
    """Of lanes, blocks and tokens."""

    batch: float = 0.25  # owned by batch work
    cap: float = 1.0  # the most that batch work may hold when nothing else wants it

    def __post_init__(self):
        check(0 < self.batch < 1, f"the batch share must be between 0 and 1; got {self.batch}")
        check(self.batch <= self.cap <= 1, f"the batch cap must be between the batch share and 1; got {self.cap}")

    def own(self, pool: str, total: int) -> int:
        """What the pool owns of `total`: batch work one at least, where there are two."""
        batch = min(total - 1, max(1, int(self.batch * total)))
        return batch if pool == "batch" else total - batch


class Held(NamedTuple):
    """By the running sequences of a pool or a tenant."""

    rows: int = 0
    blocks: int = 0


def tokens_for(budget: int, interactive: int, batch: int, shares: PoolShares) -> tuple[int, int]:
    """Divides a step's tokens among interactive and batch prefills that want so many: all that is wanted is given while there is
    some, and to batch work its own at least."""
    least = min(batch, shares.own("batch", budget)) if budget else 0
    first = min(interactive, budget - least)
    return first, min(batch, budget - first)


def may_enter(
    pool: str, held: Held, need: int, rows: int = 1, *, lanes: int, capacity: int, other: int | None, shares: PoolShares
) -> str | None:
    """Why the pool's next sequence, which needs so many blocks and lanes, must wait for its pool's sake; None where it need not.

    `held`: by the pool's sequences; `other`: blocks that the other pool's next sequence needs, None where none waits. A sequence
    that needs more than its pool owns enters alone. An interactive one that large is kept free what it needs; one of batch
    work waits until interactive work leaves so much.
    """
    most = {"interactive": (lanes, capacity), "batch": (max(1, int(shares.cap * lanes)), max(1, int(shares.cap * capacity)))}[pool]
    if other is not None:
        blocks = shares.own(pool, capacity)
        if pool == "batch":
            blocks = min(blocks, capacity - other)
        most = (min(most[0], shares.own(pool, lanes)), min(most[1], blocks))
    if held.rows + rows > most[0] and (rows < 2 or held.rows or pool == "batch" and other is not None and rows >= lanes):
        return f"{pool} work may hold {most[0]} of {lanes} lanes now"
    alone = held.blocks == 0 and (pool == "interactive" or other is None or need <= capacity - other)
    if held.blocks + need > most[1] < capacity and not alone:
        return f"{pool} work may hold {most[1]} of {capacity} blocks now; it holds {held.blocks} and needs {need} more"
    return None


def batch_over(held: Held, *, lanes: int, capacity: int, shares: PoolShares) -> bool:
    """Whether batch work, which holds so much, has more than its own."""
    return held.rows > shares.own("batch", lanes) or held.blocks > shares.own("batch", capacity)
