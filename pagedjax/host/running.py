"""The sequences that run: the lanes and blocks they take, the rows they get, and who has to leave for whom."""

import itertools
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pagedjax.host.beams import BeamSearch
from pagedjax.host.entrance import Entrance, Holdings
from pagedjax.host.following import Lead, computed_by_others, lead_of
from pagedjax.host.found import Found
from pagedjax.host.plan import Entry, Row
from pagedjax.host.pools import POOLS
from pagedjax.host.sequence import Key, Sequence, Stats
from pagedjax.host.tables import BlockTables
from pagedjax.host.trace import Trace

Preemption = Literal["auto", "recompute", "swap"]


class Wait(NamedTuple):
    """Why a sequence does not start yet, how many blocks it would need, and who computes meanwhile what it waits for."""

    reason: str
    need: int = 0
    lead: Lead | None = None


@dataclass
class Step:
    """A plan in the making."""

    now: float
    budget: int  # tokens that are left
    rows: list[Row] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    at: dict[int, int] = field(default_factory=dict)  # by order, of the sequences that have a row: where it is

    def holds(self, beams: dict[str, BeamSearch]) -> set[int]:
        """Orders of those who cannot be preempted: sequences with a row, and the other beams of their requests."""
        searches = (beams[row.request_id] for row in self.rows if row.request_id in beams) if beams else ()
        return {*self.at, *(s.order for search in searches for s in search.sequences)}


class Running:
    """In order of admission; one that was preempted comes back at the end."""

    def __init__(
        self,
        live: dict[Key, Sequence],
        beams: dict[str, BeamSearch],
        tables: BlockTables,
        entrance: Entrance,
        *,
        decode_steps: int,
        preemption: Preemption,
        swap_seconds: float | None,
        clock: Callable[[], float],
    ):
        """live, beams: of the scheduler, which keeps them."""
        self._live, self._beams, self.tables, self.entrance = live, beams, tables, entrance
        self.decode_steps, self.preemption, self.clock = decode_steps, preemption, clock
        self.sequences: list[Sequence] = []
        self.stats, self.trace = Stats(), Trace()
        self.epochs = itertools.count()
        self.swap_seconds = swap_seconds  # of one block, one way; None: not measured
        self.lanes = list(range(entrance.num_lanes - 1, -1, -1))  # that are free

    # --- rows -------------------------------------------------------------------------------------------------------

    def decode(self, step: Step, *, alone: bool) -> None:
        """One row for each sequence that has its prompt in the cache: decodes never wait for tokens of the budget.
        alone: nothing waits to enter, so that a dispatch may have several steps."""
        steps = self._decode_steps() if alone else 1
        for sequence in self._in_turn():
            if sequence.lane < 0 or sequence.length - sequence.num_scheduled != 1 or not self._wants_more(sequence):
                continue
            if self._beams and sequence.request.id in self._beams:
                self._decode_beams(self._beams[sequence.request.id], step)
                continue
            if sequence.constraint is not None and sequence.num_pending:
                continue
            count = min(steps, sequence.max_len - sequence.length)
            if self._grow(sequence, sequence.num_scheduled + count, step, may_yield=True):
                self._row(sequence, 1, count, step)
                step.budget -= 1

    def _in_turn(self) -> list[Sequence]:
        """The running sequences; where blocks are too few, those that need one come first, by the policy, since nobody is preempted
        for whom the plan has a row."""
        tables, running = self.tables, self.sequences
        free = tables.pool.num_free
        if free < 2 * len(running) * len(tables.windows) or self.entrance.caps_blocks:
            needing = [s for s in running if not tables.covers(s, s.num_scheduled + 1)]
            short = sum(tables.missing(s, s.num_scheduled + 1) for s in needing) > free
            if short or needing and self.entrance.caps_blocks:
                orders = {s.order for s in needing}
                return sorted(needing, key=self.entrance.place) + [s for s in running if s.order not in orders]
        return list(running)

    def _decode_beams(self, search: BeamSearch, step: Step) -> None:
        """All beams that are ready take a row, or all are preempted; a beam whose step is in flight is not ready."""
        ready = [s for s in search.live if s.lane >= 0 and not s.num_pending and s.length - s.num_scheduled == 1]
        ready = [s for s in ready if s.order not in step.at]
        for sequence in ready:
            if not self._grow(sequence, sequence.num_scheduled + 1, step, may_yield=True):
                return
        for sequence in ready:
            self._row(sequence, 1, 1, step)
            step.budget -= 1

    def _decode_steps(self) -> int:
        """Decode steps of this dispatch: one while anything prefills or lacks blocks, or needs the host between tokens."""
        if self.decode_steps == 1 or self._beams:
            return 1
        if any(s.length - s.num_scheduled > 1 or s.constraint is not None for s in self.sequences):
            return 1
        ready = [s for s in self.sequences if s.length - s.num_scheduled == 1 and self._wants_more(s)]
        longest = max((s.max_len - s.length for s in ready), default=1)
        steps = min(self.decode_steps, longest)
        need = sum(self.tables.missing(s, min(s.num_scheduled + steps, s.max_len - 1)) for s in ready)
        return steps if need <= self.tables.pool.num_free else 1

    def _wants_more(self, sequence: Sequence) -> bool:
        return sequence.length < sequence.max_len

    def _row(self, sequence: Sequence, count: int, steps: int, step: Step) -> None:
        start, request = sequence.num_scheduled, sequence.request
        on_device = start >= len(sequence.tokens)
        tokens = None if on_device else tuple(sequence.tokens[start : start + count])
        targets = None
        if request.params.prompt_logprobs is not None and start + 1 < sequence.prompt_len:
            targets = request.prompt[start + 1 : start + count + 1]
        sequence.num_scheduled += max(count, steps)
        sequence.num_pending += steps
        if sequence.highest > start:
            again = min(sequence.highest, sequence.num_scheduled) - start
            sequence.recomputed += again
            self.stats.recomputed_tokens += again
        sequence.highest = max(sequence.highest, sequence.num_scheduled)
        if start < sequence.prompt_len:
            self.entrance.computed(sequence, step.now)
            self.tables.publish(sequence, sequence.num_scheduled)
        mask = sequence.mask if steps else None
        key = request.id, sequence.index, sequence.epoch
        row = Row(*key, sequence.lane, start, count, tokens, sequence.table, steps, mask, targets)
        at = step.at.setdefault(sequence.order, len(step.rows))
        if at < len(step.rows):
            step.rows[at] = _joined(step.rows[at], row)
        else:
            step.rows.append(row)

    def advance(self, sequence: Sequence, step: Step) -> None:
        """Schedules a chunk of what the sequence has to compute. Where another one is computing the same, its turn is the other's,
        as far as the two have the same."""
        while step.budget > 0 and sequence.lane >= 0:
            lead = None
            if self._may_share(sequence) and sequence.order not in step.at:
                self._take_over(sequence, step)
                lead = lead_of(sequence, sequence.num_scheduled, self.sequences, self.tables)
            if lead is None or not self.prefill(lead.leader, step, lead.until):
                self.prefill(sequence, step)
                return

    def _take_over(self, sequence: Sequence, step: Step) -> None:
        """The sequence goes on behind what others have computed of its tokens since it started."""
        found = computed_by_others(sequence, self.tables)
        if found is None:
            return
        start, end = sequence.num_scheduled, found.num_tokens
        self.tables.take_over(sequence, found)
        sequence.num_scheduled = sequence.num_committed = end
        sequence.cached += max(0, min(end, sequence.prompt_len) - max(start, sequence.highest))
        sequence.highest = max(sequence.highest, end)
        self.stats.cached_tokens += end - start
        self.entrance.found(sequence, step.now)
        self.trace.note(*sequence.key, step.now, "found", start=start, tokens=end - start)

    def prefill(self, sequence: Sequence, step: Step, until: int | None = None) -> bool:
        """Schedules a chunk of the sequence's known tokens, none from position `until` on; whether there was room for any."""
        left = len(sequence.tokens) - sequence.num_scheduled
        count = min(left if until is None else until - sequence.num_scheduled, step.budget)
        if not self._grow(sequence, sequence.num_scheduled + count, step, may_yield=False):
            count = min(count, self.tables.room(sequence, self._free_for(sequence)))
            if count <= 0:
                return False
            self._grow(sequence, sequence.num_scheduled + count, step, may_yield=False)
        self.trace.note(*sequence.key, step.now, "chunk", start=sequence.num_scheduled, tokens=count)
        self._row(sequence, count, 1 if count == left else 0, step)
        step.budget -= count
        self.tables.publish(sequence, sequence.num_scheduled)
        return True

    def _grow(self, sequence: Sequence, num_tokens: int, step: Step, *, may_yield: bool) -> bool:
        """Gives the sequence blocks for its first num_tokens positions, preempting those that come after it by the policy (never
        one of this plan) while there are too few, in the pool or for its tenant; where may_yield the sequence itself may be the
        one that goes."""
        if self.tables.windowed and sequence.order not in step.at:  # what its row in this plan sees must stay
            self.tables.trim(sequence)
        if self.tables.covers(sequence, num_tokens):
            return True
        while (need := self.tables.missing(sequence, num_tokens)) > self._free_for(sequence):
            search = self._beams.get(sequence.request.id)
            kin = {s.order for s in search.sequences} if search else set()
            others = self.sequences
            if need <= self.tables.pool.num_free:  # its tenant has as much as it may
                others = [s for s in others if s.request.service.tenant == sequence.request.service.tenant]
            loser = self.entrance.victim(sequence, others, step.holds(self._beams) | kin)
            if loser is sequence and not may_yield:
                return False
            self._preempt(loser, sequence)
            if loser is sequence:
                return False
        self.tables.grow(sequence, num_tokens)
        return True

    def _free_for(self, sequence: Sequence) -> int:
        """Blocks that the running sequence can take."""
        free, left = self.tables.pool.num_free, self.entrance.cap_left(sequence, self.sequences)
        return free if left is None else min(free, left)

    # --- who enters, and who leaves ---------------------------------------------------------------------------------

    def start_of(
        self, sequence: Sequence, held: Holdings, step: Step | None = None, *, follows: bool = True
    ) -> Found | Sequence | Wait:
        """What the waiting sequence can start from: blocks of the cache, a sample of the same request to be forked, or why it
        has to wait. step: the plan it would be part of. follows: whether it waits for who computes the same."""
        first, prompt = self._live.get((sequence.request.id, 0)), sequence.prompt_len
        search = self._beams.get(sequence.request.id)
        forks = first is not None and first is not sequence and first.lane >= 0 and not sequence.highest and search is None
        if forks and first and self._may_share(sequence) and self.tables.can_fork(first, prompt - 1):
            if step is not None and first.order in step.at and step.rows[step.at[first.order]].start < prompt - 1:
                return Wait("the prompt to be shared is computed in this step")  # and copies are made before it
            found, need = first, len(self.tables.windows)  # for its own last token
        else:
            # The last token is computed in any case, for its logits, and all are where the logprobs of the prompt are wanted.
            known = sequence.behind * self.tables.size if sequence.places else len(sequence.tokens) - 1
            found = self.tables.find(sequence, known if self._may_share(sequence) else 0)
            need = self.tables.to_start(sequence, found, len(sequence.tokens))
            lead = lead_of(sequence, found.num_tokens, self.sequences, self.tables)
            if lead is not None and follows and self._may_share(sequence):
                return Wait(f"request {lead.leader.request.id} computes what they share", need, lead)
            if sequence.places and need > self.tables.pool.capacity:
                self.tables.drop_places(sequence)  # beside the blocks of a window that it would find again: to be computed again
        lanes = self.entrance.lanes(sequence)
        if len(self.lanes) < lanes:
            return Wait("all lanes are taken" if lanes == 1 else f"{lanes} beams need as many lanes", need)
        if sequence.num_pending:
            return Wait("its last step is in flight", need)
        shared = self.entrance.held_by_pool(sequence, need, held)
        if shared is not None:
            return Wait(shared, need)
        if not self.tables.pool.fits(need):
            return Wait(f"{need} blocks are needed; {self.tables.pool.num_free} are free", need)
        need += self.tables.grows_after(sequence, need)
        need += sum(self.tables.most(len(s.tokens)) for s in self.entrance.companions(sequence))
        # Hysteresis: its tokens, and one block of each group more where it will grow, must fit beside what the running ones will
        # still compute, and one more for each of those, so that it is not preempted again at once.
        if need + self.entrance.owed(self.sequences, sequence) > self.tables.pool.num_free:
            return Wait(f"{need} blocks are needed beside what others will take; {self.tables.pool.num_free} are free", need)
        return found

    def _may_share(self, sequence: Sequence) -> bool:
        return sequence.request.params.prompt_logprobs is None

    def enter(self, sequence: Sequence, start: Found | Sequence, step: Step) -> None:
        search = self._beams.get(sequence.request.id)
        own = [sequence]
        if search is None:
            sequence.lane = self.lanes.pop()
        else:
            own = [] if search.lanes else search.sequences
            search.lanes = search.lanes or [self.lanes.pop() for _ in search.sequences]
            sequence.lane = search.lanes[sequence.index]
        self.sequences.append(sequence)
        if isinstance(start, Sequence):
            known = sequence.prompt_len - 1
            self.tables.fork(start, sequence, known)
        else:
            known = start.num_tokens
            self.tables.start(sequence, start)
        if sequence.places and known == sequence.behind * self.tables.size:
            self.tables.swap_in(sequence)
        else:
            self.tables.drop_places(sequence)
            sequence.num_scheduled = sequence.num_committed = known
            self.stats.cached_tokens += known
            self.stats.entered_tokens += len(sequence.tokens)
        what = "resumed" if sequence.highest else "admitted"
        if sequence.highest == 0:
            sequence.cached, sequence.waited = known, step.now - sequence.arrival
            self.entrance.entered(sequence, known, step.now)
        sequence.highest = max(sequence.highest, sequence.num_scheduled)
        blocks = sequence.num_held
        self.trace.note(*sequence.key, step.now, what, lane=sequence.lane, cached=sequence.num_scheduled, blocks=blocks)
        for s in own:
            lane = s.lane if search is None else search.lanes[s.index]
            step.entries.append(Entry(lane, s.request, s.index, tuple(sequence.tokens), s.max_len, s.mask))

    def displace(self, now: float) -> None:
        """Preempts running sequences for more urgent ones that find no lane or no blocks, or that their tenant's caps hold back: as
        few as are enough, and none where all of them would not be."""
        if not self.entrance.may_displace(self.sequences):
            return
        held = self.entrance.held(self.sequences)
        for pool in POOLS:
            for first in self.entrance.firsts(pool, now, held):
                gone = self._in_its_way(first, held, now)
                for sequence in gone:
                    if sequence.lane >= 0:  # beams go together
                        self._preempt(sequence, first)
                held = self.entrance.held(self.sequences) if gone else held

    def _in_its_way(self, first: Sequence, held: Holdings, now: float) -> list[Sequence]:
        """Running sequences that must leave, and may be made to, for the waiting one to start."""
        may_go = list(self.entrance.displaceable(first, self.sequences, held))
        start = self.start_of(first, held) if may_go else None
        need = start.need if isinstance(start, Wait) else 0

        def enough(count: int) -> bool:
            orders = {s.order for s in may_go[:count]}
            searches = {s.request.id for s in may_go[:count]} & self._beams.keys()
            gone = [s for s in self.sequences if s.order in orders or s.request.id in searches]
            rest = [s for s in self.sequences if s.order not in orders and s.request.id not in searches]
            then = self.entrance.held(rest)
            lanes = self.entrance.num_lanes - sum(own.rows for own in then.pools.values())
            blocks = self.tables.pool.num_free + sum(not self.tables.pool.is_shared(b) for s in gone for b in s.held)
            fits = lanes >= self.entrance.lanes(first) and blocks >= need + self.entrance.owed(rest, first)
            return fits and self.entrance.may_start(first, need, then, now, gone)

        if not may_go or not enough(len(may_go)):
            return []
        return may_go[: bisect_left(range(len(may_go)), True, key=enough)]

    def _preempt(self, sequence: Sequence, by: Sequence) -> None:
        """The sequence, with the other beams of its request, gives back all it holds and waits again, where it stood: to be
        computed again, or with what nothing else keeps in host memory."""
        search, now = self._beams.get(sequence.request.id), self.clock()
        if search is not None:
            search.forget()
        for s in [s for s in self.sequences if search is not None and s.request is sequence.request] or [sequence]:
            swaps = search is None and self._swaps(s)
            self.trace.note(*s.key, now, "preempted", by=by.request.id, how="swap" if swaps else "recompute")
            if swaps:
                self.tables.swap_out(s)
                self.stats.swaps += 1
            else:
                s.epoch = next(self.epochs)
                s.num_scheduled = s.num_committed = s.num_pending = 0
            self.vacate(s)
            self.entrance.queue.push(s, now)
            self.stats.preemptions += 1
        if search is not None:
            self.lanes += search.lanes
            search.lanes = []

    def _swaps(self, sequence: Sequence) -> bool:
        """Whether to keep what only this sequence has in host memory: where both can be measured, if moving it there and back takes
        less time than computing it again."""
        blocks, rate = self.tables.unnamed(sequence), self.entrance.rates.prefill_rate
        room = 0 if sequence.reserved else self.tables.places.num_free
        if self.preemption == "recompute" or blocks > room or not self.tables.places.capacity:
            return False
        if self.preemption == "swap" or rate is None or self.swap_seconds is None:
            return True
        tokens = sequence.num_scheduled - sequence.named * self.tables.size
        return 2 * blocks * self.swap_seconds < tokens / rate

    def vacate(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.tables.release(sequence)
        if sequence.request.id not in self._beams:
            self.lanes.append(sequence.lane)
        sequence.lane = -1


def _joined(row: Row, more: Row) -> Row:
    """A chunk of a prompt and the one after it, of the same plan."""
    assert row.tokens is not None and more.tokens is not None and row.start + row.count == more.start
    targets = None if row.targets is None else row.targets + (more.targets or ())  # the last token of a prompt has none
    return more._replace(start=row.start, count=row.count + more.count, tokens=row.tokens + more.tokens, targets=targets)
