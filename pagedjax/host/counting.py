"""What a plan adds to the counters of a scheduler."""

from pagedjax.host.plan import Plan
from pagedjax.host.sequence import Sequence, Stats
from pagedjax.host.tables import BlockTables


def count(stats: Stats, plan: Plan, running: list[Sequence], tables: BlockTables) -> None:
    """The plan was made, and these run now. No sequence that holds block by block has a block's worth of slots too many."""
    pool, size = tables.pool, tables.size
    free, steps = pool.num_free, plan.steps
    stats.steps += steps
    stats.copies += len(plan.copies)
    tokens = sum(max(row.count, row.steps) for row in plan.rows)
    stats.scheduled_tokens += tokens
    stats.step_tokens.observe(tokens)
    stats.slots_held = (pool.capacity - free) * size
    stats.slot_steps.external += free * size * steps
    stats.waste = stats.lookahead = worst = 0
    slots = tables.slots
    for s in running:
        held, tokens = slots(s)
        s.steps_held[held] = s.steps_held.get(held, 0) + steps
        s.token_steps += tokens * steps
        waste = held - tokens
        stats.waste += waste
        stats.lookahead += s.num_scheduled - s.num_committed
        if waste > worst and not s.reserved:
            worst = waste
    stats.worst_waste = max(stats.worst_waste, worst // len(tables.windows))
    assert stats.worst_waste < size, f"a sequence holds {stats.worst_waste} slots more than its tokens; blocks have {size}"
    stats.peak_blocks = max(stats.peak_blocks, pool.capacity - free)
