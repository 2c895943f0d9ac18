"""Continuous batching at iteration level (Orca, Yu et al. 2022) over a paged cache (vLLM, Kwon et al. 2023).

`schedule` makes the Plan of one step from what is known; `commit` takes the step's tokens. Between the two a sequence may be
scheduled again: its newest token is then still on the device. Rows carry (request, index, epoch), and what belongs to an earlier
life of a preempted sequence, or to a request that ended before its id was used again, is dropped.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from pagedjax.errors import QueueFull, check
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.plan import Entry, Plan, Row, RowResult
from pagedjax.host.prefix_cache import PrefixCache
from pagedjax.host.request import FinishReason, Logprobs, Request, TokenEvent, Usage

Key = tuple[str, int]  # request id, index of the sequence


@dataclass(eq=False, slots=True)
class Sequence:
    """One output of a request. Positions below num_committed are in the cache; up to num_scheduled they are, or will be when
    the steps in flight are done."""

    request: Request
    index: int
    max_len: int  # prompt and output
    tokens: list[int]  # prompt and the output the host has seen
    table: np.ndarray  # i32[G, B]: its blocks, then zeros
    epoch: int  # of its present life; no other life in this scheduler has the same
    blocks: list[int] = field(default_factory=list)  # G for each column of the table
    lane: int = -1
    num_scheduled: int = 0
    num_committed: int = 0
    num_pending: int = 0  # tokens sampled by steps in flight
    recomputed: int = 0
    cached: int = 0  # prompt tokens that were in the cache when it first entered
    highest: int = 0  # positions that were in the cache in any life
    keys: list[bytes] = field(default_factory=list)  # of its first blocks, those that others may share
    scored: list[Logprobs] = field(default_factory=list)  # prompt logprobs so far

    @property
    def key(self) -> Key:
        return self.request.id, self.index

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)

    @property
    def length(self) -> int:
        """Tokens of prompt and output, those in flight included."""
        return len(self.tokens) + self.num_pending

    def usage(self) -> Usage:
        generated = len(self.tokens) - self.prompt_len
        return Usage(prompt=self.prompt_len, cached=self.cached, generated=generated, recomputed=self.recomputed)


@dataclass
class Stats:
    """Counters since start, and gauges of the last schedule. `waste`: slots held minus tokens computed or scheduled."""

    steps: int = 0
    scheduled_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0  # that a sequence found in the prefix cache when it entered
    slots_held: int = 0
    waste: int = 0
    worst_waste: int = 0  # of one sequence, ever; at most P - 1
    lookahead: int = 0  # tokens of dispatched steps that are not committed
    peak_blocks: int = 0
    running: int = 0
    waiting: int = 0


class Scheduler:
    """Decides what each step computes. Holds every live sequence and the block pool; knows nothing of devices."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_model_len: int,
        num_lanes: int,
        token_budget: int,
        max_queued: int,
        decode_steps: int,
        prefix_caching: bool = True,
        num_groups: int = 1,
    ):
        """token_budget is above num_lanes (ScheduleConfig checks it). max_queued counts sequences: n for a request."""
        self.prefix_cache = PrefixCache(pool, block_size) if prefix_caching and num_groups == 1 else None
        self.pool, self.block_size, self.max_model_len = pool, block_size, max_model_len
        self.token_budget, self.max_queued, self.decode_steps = token_budget, max_queued, decode_steps
        self.num_groups, self.table_width = num_groups, -(-max_model_len // block_size)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission: one that was preempted comes back at the end
        self.stats = Stats()
        self._live: dict[Key, Sequence] = {}
        self._ids: Counter[str] = Counter()  # live sequences of each request that has any
        self._epochs = itertools.count()
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
        need = self.blocks_for(max_len - 1)  # the last token is never written
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
        for index in range(n):
            table = np.zeros((self.num_groups, self.table_width), np.int32)
            sequence = Sequence(request, index, max_len, list(request.prompt), table, next(self._epochs))
            self._live[sequence.key] = sequence
            self._ids[request.id] += 1
            self.waiting.append(sequence)

    def max_len(self, request: Request) -> int:
        """Longest prompt and output of a request; without max_tokens as long as the pool allows (its last token is never
        written), but for one token at least."""
        prompt, wanted = len(request.prompt), request.params.max_tokens
        if wanted is None:
            wanted = max(1, self.pool.capacity // self.num_groups * self.block_size + 1 - prompt)
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

    # --- one step ---------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan | None:
        """The next step, or None when every live sequence waits for a step in flight (or there is none)."""
        rows: list[Row] = []
        entries: list[Entry] = []
        planned: set[Key] = set()
        before = self.stats.preemptions
        steps = self._decode_steps()
        budget = self.token_budget
        for sequence in list(self.running):
            if sequence.lane >= 0 and sequence.length - sequence.num_scheduled == 1 and self._wants_more(sequence):
                count = min(steps, sequence.max_len - sequence.length)
                if self._grow(sequence, sequence.num_scheduled + count, planned, may_yield=True):
                    rows.append(self._row(sequence, 1, count))
                    planned.add(sequence.key)
                    budget -= 1
        for sequence in list(self.running):
            if sequence.lane >= 0 and sequence.length - sequence.num_scheduled > 1 and budget > 0:
                budget -= self._prefill(sequence, budget, rows, planned)
        while self.waiting and self._lanes and budget > 0 and self.stats.preemptions == before:
            # A prefix that is still being prefilled takes the whole budget: who shares it comes after its last chunk.
            found = self._find_prefix(self.waiting[0])
            if not self._fits(self.waiting[0], found):
                break  # first come, first served: nobody passes the head
            entries.append(self._enter(self.waiting.popleft(), found))
            budget -= self._prefill(self.running[-1], budget, rows, planned)
        if not rows:
            return None
        rows.sort(key=lambda row: row.count > 1)  # stable: rows with one token first
        plan = Plan(tuple(rows), tuple(entries), max([row.steps for row in rows] + [1]))
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
                if event.finish is None:
                    self._publish(sequence, sequence.num_committed)
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

    def blocks_for(self, tokens: int) -> int:
        """In all groups together."""
        return self.num_groups * -(-tokens // self.block_size)

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
        need = sum(self.blocks_for(min(s.num_scheduled + steps, s.max_len - 1)) - len(s.blocks) for s in ready)
        return steps if need <= self.pool.num_free else 1

    def _row(self, sequence: Sequence, count: int, steps: int) -> Row:
        start = sequence.num_scheduled
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

    def _prefill(self, sequence: Sequence, budget: int, rows: list[Row], planned: set[Key]) -> int:
        """Schedules a chunk of the sequence's known tokens; its length."""
        left = len(sequence.tokens) - sequence.num_scheduled
        count = min(left, budget)
        if not self._grow(sequence, sequence.num_scheduled + count, planned, may_yield=False):
            room = (len(sequence.blocks) + self.pool.num_free) // self.num_groups * self.block_size - sequence.num_scheduled
            if room <= 0:
                return 0
            count = min(count, room)
            self._grow(sequence, sequence.num_scheduled + count, planned, may_yield=False)
        rows.append(self._row(sequence, count, 1 if count == left else 0))
        planned.add(sequence.key)
        self._publish(sequence, sequence.num_scheduled)
        return count

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the cache that the waiting sequence can start from. Its last token is computed in any case, for its logits,
        and all are where the logprobs of the prompt are wanted."""
        if self.prefix_cache is None or sequence.request.params.prompt_logprobs is not None:
            return []
        return self.prefix_cache.find(sequence.request.salt, sequence.tokens[:-1])

    def _publish(self, sequence: Sequence, end: int) -> None:
        """Makes the sequence's whole blocks below position `end` known to others."""
        done = len(sequence.keys)
        if self.prefix_cache is None or done == min(end, len(sequence.tokens)) // self.block_size:
            return
        tokens = sequence.tokens[:end]
        for key, content in self.prefix_cache.keys(sequence.request.salt, tokens, sequence.keys):
            self.prefix_cache.publish(key, content, sequence.blocks[len(sequence.keys)])
            sequence.keys.append(key)

    def _grow(self, sequence: Sequence, num_tokens: int, planned: set[Key], *, may_yield: bool) -> bool:
        """Gives the sequence blocks for its first num_tokens positions, preempting the newest sequence (never one of this plan,
        never an older one) while there are too few; where may_yield the sequence itself may be the one that goes."""
        need = self.blocks_for(num_tokens) - len(sequence.blocks)
        while need > self.pool.num_free:
            at = self.running.index(sequence)
            victim = next((s for s in reversed(self.running[at + 1 :]) if s.key not in planned), sequence if may_yield else None)
            if victim is None:
                return False
            self._preempt(victim)
            if victim is sequence:
                return False
        if need > 0:
            groups, new = self.num_groups, self.pool.allocate(need)
            held = len(sequence.blocks) // groups
            sequence.table[:, held : held + need // groups] = np.reshape(new, (-1, groups)).T
            sequence.blocks += new
        return True

    def _fits(self, sequence: Sequence, found: list[int]) -> bool:
        """Hysteresis: a sequence enters when its tokens fit beside what the running ones still have to prefill, with one block
        left for each of those that will grow beyond it, so that it is not preempted again at once."""
        owed = 0
        for s in self.running:
            held, known = len(s.blocks), self.blocks_for(s.length)
            owed += max(0, known - held)
            owed += self.num_groups * (self.blocks_for(s.max_len - 1) > max(held, known))
        need = self.blocks_for(len(sequence.tokens)) - len(found) + self.pool.num_idle(found)
        return need + owed <= self.pool.num_free

    def _enter(self, sequence: Sequence, found: list[int]) -> Entry:
        sequence.lane = self._lanes.pop()
        self.running.append(sequence)
        self.pool.share(found)
        sequence.blocks += found
        sequence.keys += [self.prefix_cache.key(block) for block in found] if self.prefix_cache else []
        sequence.table[:, : len(found)] = found
        sequence.num_scheduled = sequence.num_committed = len(found) * self.block_size
        if sequence.highest == 0:
            sequence.cached = sequence.num_scheduled
        sequence.highest = max(sequence.highest, sequence.num_scheduled)
        self.stats.cached_tokens += sequence.num_scheduled
        return Entry(sequence.lane, sequence.request, sequence.index, tuple(sequence.tokens), sequence.max_len)

    def _preempt(self, sequence: Sequence) -> None:
        """By recomputation: the sequence gives back all it holds and waits at the head of the queue."""
        self._vacate(sequence)
        sequence.epoch = next(self._epochs)
        sequence.num_scheduled = sequence.num_committed = sequence.num_pending = 0
        self.waiting.appendleft(sequence)
        self.stats.preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.release(reversed(sequence.blocks))
        sequence.blocks.clear()
        sequence.keys.clear()
        sequence.table = np.zeros_like(sequence.table)  # a step in flight may still be packed from the old one
        self._lanes.append(sequence.lane)
        sequence.lane = -1

    def _finish(self, sequence: Sequence, reason: FinishReason) -> TokenEvent:
        if sequence.lane >= 0:
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        del self._live[sequence.key]
        self._ids[sequence.request.id] -= 1
        if not self._ids[sequence.request.id]:
            del self._ids[sequence.request.id]
        return TokenEvent(sequence.request.id, sequence.index, (), finish=reason, usage=sequence.usage())

    def _count(self, plan: Plan) -> None:
        stats, size = self.stats, self.block_size
        stats.steps += plan.steps
        stats.scheduled_tokens += sum(max(row.count, row.steps) for row in plan.rows)
        wastes = [len(s.blocks) // self.num_groups * size - s.num_scheduled for s in self.running]
        stats.slots_held = (self.pool.capacity - self.pool.num_free) * size
        stats.waste = sum(wastes)
        stats.worst_waste = max([stats.worst_waste, *wastes])
        assert stats.worst_waste < size, f"a sequence holds {stats.worst_waste} slots more than its tokens; blocks have {size}"
        stats.lookahead = sum(s.num_scheduled - s.num_committed for s in self.running)
        stats.peak_blocks = max(stats.peak_blocks, self.pool.capacity - self.pool.num_free)
        stats.running, stats.waiting = len(self.running), len(self.waiting)
