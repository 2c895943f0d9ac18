"""Interactive and batch work: shares, and a small simulation of a flood of batch work, with a control."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued import Queued, queued

from pagedjax.errors import UserError
from pagedjax.host.policy import PolicyOptions, displaceable
from pagedjax.host.pools import POOLS, Held, PoolShares, batch_over, may_enter, tokens_for
from pagedjax.host.waiting import WaitingQueue

SHARES = PoolShares(batch=0.25)
LANES, BUDGET = 8, 64


@given(st.integers(0, 500), st.integers(0, 500), st.integers(0, 500), st.floats(0.01, 0.99))
def test_tokens_are_divided_without_waste_and_each_gets_its_own(budget: int, interactive: int, batch: int, share: float) -> None:
    shares = PoolShares(batch=share)
    first, second = tokens_for(budget, interactive, batch, shares)
    assert 0 <= first <= interactive and 0 <= second <= batch
    assert first + second == min(budget, interactive + batch)
    if budget:
        assert first >= min(interactive, shares.own("interactive", budget))
        assert second >= min(batch, shares.own("batch", budget))


@given(st.integers(1, 500), st.floats(0.01, 0.99))
def test_what_the_pools_own_is_all_there_is(total: int, share: float) -> None:
    own = [PoolShares(batch=share).own(pool, total) for pool in POOLS]
    assert sum(own) == total and own[0] >= 1
    assert own[1] >= 1 or total == 1


def enters(pool: str, held: Held, need: int, other: int | None, shares: PoolShares = SHARES) -> str | None:
    return may_enter(pool, held, need, lanes=8, capacity=100, other=other, shares=shares)


def test_while_both_wait_each_enters_within_its_own() -> None:
    assert enters("batch", Held(7, 90), 10, None) is None
    assert enters("batch", Held(1, 20), 5, 1) is None
    assert enters("batch", Held(2, 20), 5, 1) == "batch work may hold 2 of 8 lanes now"
    assert enters("batch", Held(1, 20), 6, 1) == "batch work may hold 25 of 100 blocks now; it holds 20 and needs 6 more"
    assert enters("interactive", Held(5, 70), 5, 1) is None
    assert enters("interactive", Held(6, 70), 5, None) is None
    assert enters("interactive", Held(6, 70), 5, 1) == "interactive work may hold 6 of 8 lanes now"
    assert (
        enters("interactive", Held(5, 70), 6, 1) == "interactive work may hold 75 of 100 blocks now; it holds 70 and needs 6 more"
    )


def test_batch_work_stays_below_its_cap() -> None:
    capped = PoolShares(batch=0.25, cap=0.5)
    assert enters("batch", Held(3, 40), 10, None, capped) is None
    assert enters("batch", Held(4, 40), 10, None, capped) == "batch work may hold 4 of 8 lanes now"
    assert (
        enters("batch", Held(3, 40), 11, None, capped) == "batch work may hold 50 of 100 blocks now; it holds 40 and needs 11 more"
    )


def test_a_sequence_larger_than_what_its_pool_owns_enters_alone() -> None:
    assert enters("interactive", Held(0, 0), 95, 10) is None
    assert enters("interactive", Held(1, 1), 94, 10) is not None
    assert enters("batch", Held(1, 4), 2, 95) is not None  # room is kept for the large one
    assert enters("batch", Held(1, 3), 2, 95) is None
    assert enters("batch", Held(0, 0), 60, 40) is None
    assert enters("batch", Held(0, 0), 60, 41) is not None


def test_batch_work_over_its_own() -> None:
    own = {"lanes": 8, "capacity": 100, "shares": SHARES}
    assert not batch_over(Held(2, 25), **own)
    assert batch_over(Held(3, 5), **own) and batch_over(Held(1, 26), **own)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "the batch share must be between 0 and 1; got 0"),
        ({"batch": 1}, "the batch share must be between 0 and 1; got 1"),
        ({"batch": 0.5, "cap": 0.4}, "the batch cap must be between the batch share and 1; got 0.4"),
    ],
)
def test_shares_are_checked(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PoolShares(**options)


# --- a flood ------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """Steps from arrival to the first token of each interactive sequence, and batch tokens computed."""

    waits: list[int]
    batch_tokens: int

    def p99(self) -> int:
        return sorted(self.waits)[int(0.99 * len(self.waits))]


def run(*, flood: bool, pools: bool = True, chat_every: int = 6, steps: int = 1500) -> Run:
    """A chat of 40 + 10 tokens now and then, beside a backlog of 200 + 30; without pools all is interactive, first come. A row that
    was preempted begins anew."""
    rng = random.Random(0)
    queue: WaitingQueue[Queued] = WaitingQueue(shares=SHARES)
    running: list[Queued] = []
    result, order = Run([], 0), 0

    def kind(sequence: Queued) -> str:
        return sequence.request.service.pool

    def chunk(sequence: Queued, tokens: int) -> int:
        count = min(tokens, len(sequence.tokens) - sequence.num_scheduled)
        sequence.num_scheduled += count
        result.batch_tokens += count * (sequence.prompt_len == 200)
        return count

    def enter(pool: str, now: int, budget: int) -> int:
        while budget and (head := queue.head(pool, now, {})):
            held = {p: Held(sum(kind(s) == p for s in running)) for p in POOLS}
            other = 0 if queue.count("batch" if pool == "interactive" else "interactive") else None
            if may_enter(pool, held[pool], 0, lanes=LANES, capacity=1, other=other, shares=SHARES):
                return budget
            if len(running) == LANES:
                over = batch_over(held["batch"], lanes=LANES, capacity=1, shares=SHARES)
                gone = displaceable(
                    queue.view(head), [queue.view(s) for s in running], "first_come", PolicyOptions(), batch_over=over
                )
                if not gone:
                    return budget
                loser = next(s for s in running if s.order == gone[0].order)
                running.remove(loser)
                loser.num_scheduled = 0
                queue.push(loser, now)
            queue.remove(head)
            running.append(head)
            budget -= chunk(head, budget)
        return budget

    for now in range(steps):
        if rng.random() < 1 / chat_every:
            order += 1
            queue.push(queued(order, arrival=now, prompt=40, max_tokens=10), now)
        while flood and (queue.count("batch") if pools else len(queue)) < 20:
            order += 1
            queue.push(queued(order, arrival=now, prompt=200, max_tokens=30, pool="batch" if pools else "interactive"), now)
        decoding = [s for s in running if s.num_scheduled == len(s.tokens)]
        wants = [sum(len(s.tokens) - s.num_scheduled for s in running if kind(s) == pool) + queue.tokens(pool) for pool in POOLS]
        budget = BUDGET - len(decoding)
        spare = budget - sum(tokens_for(budget, *wants, SHARES))
        for pool, tokens in zip(POOLS, tokens_for(budget, *wants, SHARES), strict=True):
            spare += tokens
            for sequence in [s for s in running if kind(s) == pool]:
                spare -= chunk(sequence, spare)
            spare = enter(pool, now, spare)
        for sequence in [s for s in running if s.num_scheduled == len(s.tokens)]:
            sequence.tokens.append(1)
            sequence.num_scheduled += sequence in decoding
            if len(sequence.tokens) == sequence.prompt_len + 1 and sequence.prompt_len == 40:
                result.waits.append(now - int(sequence.arrival) + 1)
            if len(sequence.tokens) >= sequence.max_len:
                running.remove(sequence)
    return result


def test_a_flood_of_batch_work_does_not_move_the_interactive_tail_and_gets_on() -> None:
    alone, flooded, mixed = run(flood=False), run(flood=True), run(flood=True, pools=False)
    assert len(flooded.waits) > 200
    assert flooded.p99() <= 2 * alone.p99() + 3
    assert mixed.p99() > 5 * (2 * alone.p99() + 3)  # the control: without pools they wait behind it
    assert flooded.batch_tokens > 0.5 * mixed.batch_tokens


def test_under_a_flood_of_both_each_gets_its_share() -> None:
    """More chats than can be served, for ever, beside batch work that always waits."""
    alone, flooded = run(flood=False, chat_every=1), run(flood=True, chat_every=1)
    assert flooded.batch_tokens > 0.7 * SHARES.batch * 1500 * BUDGET
    assert len(flooded.waits) > 0.7 * len(alone.waits)
