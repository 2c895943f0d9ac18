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
    for s in running:
        held, tokens = slots(s, tables)
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


def slots(sequence: Sequence, tables: BlockTables) -> tuple[int, int]:
    """(held, with tokens in them), over all groups."""
    size = tables.size
    if not tables.windowed:
        groups = len(tables.windows)
        return groups * len(sequence.blocks[0]) * size, groups * sequence.num_scheduled
    held, tokens = 0, 0
    for blocks, window in zip(sequence.blocks, tables.windows, strict=True):
        gone = 0 if window is None else blocks.count(0) * size
        held += len(blocks) * size - gone
        tokens += sequence.num_scheduled - gone
    return held, tokens
