"""Continuous batching at iteration level (Orca, Yu et al. 2022) over a paged cache (vLLM, Kwon et al. 2023).

`schedule` makes the Plan of one step from what is known; `commit` takes the step's tokens. Between the two a sequence may be
scheduled again: its newest token is then still on the device. Rows carry (request, index, epoch), and what belongs to an earlier
life of a preempted sequence, or to a request that ended before its id was used again, is dropped.
"""

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from pagedjax.errors import QueueFull, check
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.plan import Entry, Plan, Row, RowResult
from pagedjax.host.request import FinishReason, Request, TokenEvent, Usage
from pagedjax.host.reserve import BuddyPool, Reserve
from pagedjax.host.sequence import Key, Sequence, Stats
from pagedjax.host.tables import BlockTables, Found
from pagedjax.host.trace import Trace

Preemption = Literal["auto", "recompute", "swap"]


class Wait(NamedTuple):
    """Why a sequence does not start yet, and whether others may start before it: it waits for a step, not for room."""

    reason: str
    for_step: bool


class Scheduler:
    """Decides what each step computes. Holds every live sequence and the block pool; knows nothing of devices."""

    def __init__(
        self,
        pool: BlockPool | BuddyPool,
        *,
        block_size: int,
        max_model_len: int,
        num_lanes: int,
        token_budget: int,
        max_queued: int,
        decode_steps: int,
        prefix_caching: bool = True,
        windows: tuple[int | None, ...] = (None,),
        reserve: Reserve = "paged",
        host_blocks: int = 0,
        preemption: Preemption = "auto",
        clock: Callable[[], float] = time.monotonic,
    ):
        """token_budget is above num_lanes (ScheduleConfig checks it). max_queued counts sequences: n for a request. windows: of
        each layer group. host_blocks: places in host memory. clock: seconds."""
        self.tables = BlockTables(
            pool,
            block_size,
            max_model_len=max_model_len,
            windows=windows,
            prefix_caching=prefix_caching,
            reserve=reserve,
            places=host_blocks,
        )
        self.pool, self.block_size, self.max_model_len = pool, block_size, max_model_len
        self.token_budget, self.max_queued, self.decode_steps = token_budget, max_queued, decode_steps
        self.preemption, self.clock = preemption, clock
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission: one that was preempted comes back at the end
        self.stats, self.trace = Stats(), Trace()
        self._live: dict[Key, Sequence] = {}
        self._ids: Counter[str] = Counter()  # live sequences of each request that has any
        self._epochs, self._orders = itertools.count(), itertools.count()
        self._lanes = list(range(num_lanes - 1, -1, -1))

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues the request, or refuses it: QueueFull at the bound, UserError for what can never fit."""
        n, prompt = request.params.n, len(request.prompt)
        check(prompt > 0, f"request {request.id}: the prompt must hold at least one token; got 0")
        check(
            prompt < self.max_model_len,
            f"request {request.id}: the prompt must be shorter than max_model_len {self.max_model_len}; got {prompt} tokens",
        )
        max_len = self.max_len(request)
        need = self.tables.most(max_len - 1, self.token_budget)  # the last token is never written
        size, capacity = self.block_size, self.pool.capacity
        check(
            need <= capacity,
            f"request {request.id}: prompt and output need {need} blocks of {size} tokens; the pool has {capacity}",
        )
        check(request.id not in self._ids, f"request id {request.id} is already in use")
        if len(self.waiting) + n > self.max_queued:
            raise QueueFull(
                f"request {request.id}: the queue may hold {self.max_queued} sequences; {len(self.waiting)} wait, {n} more came"
            )
        now = self.clock()
        self.trace.begin(request.id)
        for index in range(n):
            sequence = self.tables.sequence(request, index, max_len, epoch=next(self._epochs))
            sequence.arrival, sequence.order = now, next(self._orders)
            self._live[sequence.key] = sequence
            self._ids[request.id] += 1
            self.waiting.append(sequence)
            self.trace.note(request.id, index, now, "queued", ahead=len(self.waiting) - 1, prompt=prompt)

    def max_len(self, request: Request) -> int:
        """Longest prompt and output of a request; without max_tokens as long as the pool allows (its last token is never
        written), but for one token at least."""
        prompt, wanted = len(request.prompt), request.params.max_tokens
        if wanted is None:
            room = self.pool.capacity // len(self.tables.windows) * self.block_size
            wanted = max(1, room + 1 - prompt)
        return min(prompt + wanted, self.max_model_len)

    def cancel(self, request_id: str) -> list[TokenEvent]:
        """Ends all sequences of a request; their blocks are free at once. Unknown ids are ignored."""
        sequences = [s for key, s in self._live.items() if key[0] == request_id]
        return [self._finish(s, "cancelled") for s in sequences]

    def finish(self, request_id: str, index: int, num_tokens: int) -> Usage | None:
        """Ends one sequence after its first num_tokens output tokens (a stop string was found in the text)."""
        sequence = self._live.get((request_id, index))
        if sequence is None:
            return None
        del sequence.tokens[sequence.prompt_len + num_tokens :]
        return self._finish(sequence, "stop").usage

    def has_work(self) -> bool:
        return bool(self._live)

    def find(self, request_id: str, index: int) -> Sequence | None:
        """The live sequence, or None when it has ended."""
        return self._live.get((request_id, index))

    def sequences(self) -> Iterator[Sequence]:
        return iter(self._live.values())

    def check(self) -> None:
        """Recounts who holds what; raises AssertionError where it does not add up."""
        self.tables.check(list(self._live.values()))

    # --- one step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """The next step, or None when every live sequence waits for a step in flight (or there is none)."""
        rows: list[Row] = []
        entries: list[Entry] = []
        planned: dict[Key, int] = {}
        before, now = self.stats.preemptions, self.clock()
        steps = self._decode_steps()
        budget = self.token_budget
        for sequence in list(self.running):
            if sequence.lane >= 0 and sequence.length - sequence.num_scheduled == 1 and self._wants_more(sequence):
                count = min(steps, sequence.max_len - sequence.length)
                if self._grow(sequence, sequence.num_scheduled + count, planned, may_yield=True):
                    rows.append(self._row(sequence, 1, count, planned))
                    budget -= 1
        for sequence in list(self.running):
            if sequence.lane >= 0 and sequence.length - sequence.num_scheduled > 1 and budget > 0:
                budget -= self._prefill(sequence, budget, rows, planned)
        aside = []
        while self.waiting and budget > 0 and self.stats.preemptions == before:
            # A prefix that is still being prefilled takes the whole budget: who shares it comes after its last chunk.
            sequence = self.waiting.popleft()
            start = self._start(sequence, planned)
            if isinstance(start, Wait):
                self.trace.waits(*sequence.key, now, start.reason)
                aside.append(sequence)
                if start.for_step:
                    continue
                break  # first come, first served: nobody passes the head
            entries.append(self._enter(sequence, start, now))
            budget -= self._prefill(sequence, budget, rows, planned)
        self.waiting.extendleft(reversed(aside))
        if not rows:
            return None  # what was to be copied or swapped goes with the next plan
        rows.sort(key=lambda row: row.count > 1)  # stable: rows with one token first
        copies, swap_out, swap_in = self.tables.take_moves()
        plan = Plan(tuple(rows), tuple(entries), max([row.steps for row in rows] + [1]), copies, swap_out, swap_in)
        self._count(plan)
        return plan

    def commit(self, plan: Plan, results: Iterable[RowResult]) -> list[TokenEvent]:
        """Takes the results of a step's rows, in the plan's order; frees what finished. Plans are committed in order."""
        events = []
        for row, result in zip(plan.rows, results, strict=True):
            sequence = self._live.get((row.request_id, row.index))
            if sequence is None or sequence.epoch != row.epoch:
                continue
            sequence.num_committed = row.start + max(row.count, row.steps)
            known = row.start - len(sequence.scored)  # results of a recomputed position are not taken twice
            sequence.scored.extend(result.scored[-known:] if known < 0 else result.scored)
            if row.steps:
                sequence.num_pending -= row.steps
                event = self._take(sequence, row, result)
                if event.finish is None and sequence.lane >= 0:
                    self.tables.publish(sequence, sequence.num_committed)
                events.append(event)
        return events

    def _take(self, sequence: Sequence, row: Row, result: RowResult) -> TokenEvent:
        first = len(sequence.tokens) == sequence.prompt_len
        finish, stop_id, taken = None, None, 0
        for token in result.tokens:
            sequence.tokens.append(token)
            taken += 1
            if (
                token in sequence.request.stop_ids
                and len(sequence.tokens) - sequence.prompt_len > sequence.request.params.min_tokens
            ):
                finish, stop_id = "stop", token
            elif len(sequence.tokens) >= sequence.max_len:
                finish = "length"
            if finish:
                break
        assert finish or taken == row.steps, (
            f"{sequence.key}: the device stopped after {taken} of {row.steps} tokens, the host did not"
        )
        self.stats.generated_tokens += taken
        usage = self._finish(sequence, finish).usage if finish else None
        return TokenEvent(
            request_id=sequence.request.id,
            index=sequence.index,
            tokens=result.tokens[:taken],
            logprobs=None if result.logprobs is None else result.logprobs[:taken],
            prompt_logprobs=tuple(sequence.scored) if first and sequence.request.params.prompt_logprobs is not None else None,
            finish=finish,
            stop_id=stop_id,
            usage=usage,
        )

    # --- parts of schedule ------------------------------------------------------------------------------------------

    def _wants_more(self, sequence: Sequence) -> bool:
        return sequence.length < sequence.max_len

    def _decode_steps(self) -> int:
        """Decode steps of this dispatch: one while anything waits, prefills or lacks blocks."""
        if self.decode_steps == 1 or self.waiting:
            return 1
        if any(s.length - s.num_scheduled > 1 for s in self.running):
            return 1
        ready = [s for s in self.running if s.length - s.num_scheduled == 1 and self._wants_more(s)]
        longest = max((s.max_len - s.length for s in ready), default=1)
        steps = min(self.decode_steps, longest)
        need = sum(self.tables.missing(s, min(s.num_scheduled + steps, s.max_len - 1)) for s in ready)
        return steps if need <= self.pool.num_free else 1

    def _row(self, sequence: Sequence, count: int, steps: int, planned: dict[Key, int]) -> Row:
        start = sequence.num_scheduled
        planned[sequence.key] = start
        on_device = start >= len(sequence.tokens)
        tokens = None if on_device else tuple(sequence.tokens[start : start + count])
        targets = None
        if sequence.request.params.prompt_logprobs is not None and start + 1 < sequence.prompt_len:
            targets = sequence.request.prompt[start + 1 : start + count + 1]
        sequence.num_scheduled += max(count, steps)
        sequence.num_pending += steps
        again = min(sequence.highest, sequence.num_scheduled) - start
        if again > 0:
            sequence.recomputed += again
            self.stats.recomputed_tokens += again
        sequence.highest = max(sequence.highest, sequence.num_scheduled)
        return Row(
            sequence.request.id, sequence.index, sequence.epoch, sequence.lane, start, count, tokens, sequence.table, steps, targets
        )

    def _prefill(self, sequence: Sequence, budget: int, rows: list[Row], planned: dict[Key, int]) -> int:
        """Schedules a chunk of the sequence's known tokens; its length."""
        left = len(sequence.tokens) - sequence.num_scheduled
        count = min(left, budget)
        if not self._grow(sequence, sequence.num_scheduled + count, planned, may_yield=False):
            room = self.tables.room(sequence)
            if room <= 0:
                return 0
            count = min(count, room)
            self._grow(sequence, sequence.num_scheduled + count, planned, may_yield=False)
        self.trace.note(*sequence.key, self.clock(), "chunk", start=sequence.num_scheduled, tokens=count)
        rows.append(self._row(sequence, count, 1 if count == left else 0, planned))
        self.tables.publish(sequence, sequence.num_scheduled)
        return count

    def _grow(self, sequence: Sequence, num_tokens: int, planned: dict[Key, int], *, may_yield: bool) -> bool:
        """Gives the sequence blocks for its first num_tokens positions, preempting the newest sequence (never one of this plan,
        never an older one) while there are too few; where may_yield the sequence itself may be the one that goes."""
        self.tables.trim(sequence)
        while self.tables.missing(sequence, num_tokens) > self.pool.num_free:
            at = self.running.index(sequence)
            victim = next((s for s in reversed(self.running[at + 1 :]) if s.key not in planned), sequence if may_yield else None)
            if victim is None:
                return False
            self._preempt(victim, sequence)
            if victim is sequence:
                return False
        self.tables.grow(sequence, num_tokens)
        return True

    def _start(self, sequence: Sequence, planned: dict[Key, int]) -> Found | Sequence | Wait:
        """What the waiting sequence can start from: blocks of the cache, a sample of the same request to be forked, or why it
        has to wait."""
        if not self._lanes:
            return Wait("all lanes are taken", False)
        if sequence.num_pending:
            return Wait("its last step is in flight", True)
        first, prompt = self._live.get((sequence.request.id, 0)), sequence.prompt_len
        if first is not None and first is not sequence and first.lane >= 0 and not sequence.highest and not first.reserved:
            if min(first.num_scheduled, planned.get(first.key, prompt)) < prompt:
                return Wait("the prompt is being computed for the first sample", True)
            if self._shares(sequence) and self.tables.can_fork(first, prompt - 1):
                need = len(self.tables.windows)  # for its own last token
                return first if self._fits(need) else self._lacks(need)
        # The last token is computed in any case, for its logits, and all are where the logprobs of the prompt are wanted.
        known = sequence.behind * self.block_size if sequence.places else len(sequence.tokens) - 1
        found = self.tables.find(sequence, known if self._shares(sequence) else 0)
        need = self.tables.to_start(sequence, found, len(sequence.tokens))
        return found if self._fits(need) else self._lacks(need)

    def _lacks(self, need: int) -> Wait:
        return Wait(f"{need} blocks are needed beside what others will take; {self.pool.num_free} are free", False)

    def _shares(self, sequence: Sequence) -> bool:
        return sequence.request.params.prompt_logprobs is None

    def _fits(self, need: int) -> bool:
        """Hysteresis: a sequence enters when its tokens fit beside what the running ones still have to prefill, with one block
        of each group left for each of those that will grow beyond it, so that it is not preempted again at once."""
        owed = 0
        for s in self.running:
            known = self.tables.missing(s, s.length)
            owed += known + self.tables.grows(s, s.length)
        return self.pool.fits(need) and need + owed <= self.pool.num_free

    def _enter(self, sequence: Sequence, start: Found | Sequence, now: float) -> Entry:
        sequence.lane = self._lanes.pop()
        self.running.append(sequence)
        if isinstance(start, Sequence):
            known = sequence.prompt_len - 1
            self.tables.fork(start, sequence, known)
        else:
            known = start.num_tokens
            self.tables.start(sequence, start)
        if sequence.places and known == sequence.behind * self.block_size:
            self.tables.swap_in(sequence)
        else:
            self.tables.drop_places(sequence)
            sequence.num_scheduled = sequence.num_committed = known
            self.stats.cached_tokens += known
        what = "resumed" if sequence.highest else "admitted"
        if sequence.highest == 0:
            sequence.cached = known
        sequence.highest = max(sequence.highest, sequence.num_scheduled)
        held = len(sequence.held)
        self.trace.note(*sequence.key, now, what, lane=sequence.lane, cached=sequence.num_scheduled, blocks=held)
        return Entry(sequence.lane, sequence.request, sequence.index, tuple(sequence.tokens), sequence.max_len)

    def _preempt(self, sequence: Sequence, by: Sequence) -> None:
        """The sequence gives back all it holds and waits at the head of the queue: to be computed again, or with what nothing
        else keeps in host memory."""
        swaps = self._swaps(sequence)
        self.trace.note(*sequence.key, self.clock(), "preempted", by=by.request.id, how="swap" if swaps else "recompute")
        if swaps:
            self.tables.swap_out(sequence)
            self.stats.swaps += 1
        else:
            sequence.epoch = next(self._epochs)
            sequence.num_scheduled = sequence.num_committed = sequence.num_pending = 0
        self._vacate(sequence)
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1

    def _swaps(self, sequence: Sequence) -> bool:
        room = self.tables.unnamed(sequence) <= self.tables.places.num_free and self.tables.places.capacity > 0
        return room and self.preemption != "recompute"

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.tables.release(sequence)
        self._lanes.append(sequence.lane)
        sequence.lane = -1

    def _finish(self, sequence: Sequence, reason: FinishReason) -> TokenEvent:
        if sequence.lane >= 0:
            self._vacate(sequence)
        else:
            self.tables.drop_places(sequence)
            self.waiting.remove(sequence)
        request_id = sequence.request.id
        del self._live[sequence.key]
        usage = sequence.usage()
        self.stats.slot_steps.ended(sequence)
        self.trace.note(*sequence.key, self.clock(), "finished", reason=reason, generated=usage.generated)
        self._ids[request_id] -= 1
        if not self._ids[request_id]:
            del self._ids[request_id]
            self.trace.end(request_id)
        return TokenEvent(request_id, sequence.index, (), finish=reason, usage=usage)

    def _count(self, plan: Plan) -> None:
        stats, size = self.stats, self.block_size
        stats.steps += plan.steps
        stats.copies += len(plan.copies)
        stats.scheduled_tokens += sum(max(row.count, row.steps) for row in plan.rows)
        stats.slots_held = (self.pool.capacity - self.pool.num_free) * size
        stats.slot_steps.external += self.pool.num_free * size * plan.steps
        stats.waste = 0
        for s in self.running:
            held, tokens = self.tables.slots(s)
            s.steps_held[held] = s.steps_held.get(held, 0) + plan.steps
            s.token_steps += tokens * plan.steps
            stats.waste += held - tokens
            if not s.reserved:
                stats.worst_waste = max(stats.worst_waste, (held - tokens) // len(s.blocks))
        assert stats.worst_waste < size, f"a sequence holds {stats.worst_waste} slots more than its tokens; blocks have {size}"
        stats.lookahead = sum(s.num_scheduled - s.num_committed for s in self.running)
        stats.peak_blocks = max(stats.peak_blocks, self.pool.capacity - self.pool.num_free)
        stats.running, stats.waiting = len(self.running), len(self.waiting)
