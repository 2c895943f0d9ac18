"""Continuous batching at iteration level (Orca, Yu et al. 2022) over a paged cache (vLLM, Kwon et al. 2023).

`schedule` makes the Plan of one step from what is known; `commit` takes the step's tokens. Between the two a sequence may be
scheduled again: its newest token is then still on the device. Rows carry (request, index, epoch), and what belongs to an earlier
life of a preempted sequence, or to a request that ended before its id was used again, is dropped.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from pagedjax.errors import check
from pagedjax.host.beams import BeamSearch, begin
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.counting import count
from pagedjax.host.entrance import Entrance, ServiceRules
from pagedjax.host.plan import Plan, Row, RowResult
from pagedjax.host.pools import POOLS, tokens_for
from pagedjax.host.request import FinishReason, Request, TokenEvent, Usage
from pagedjax.host.reserve import BuddyPool, Reserve
from pagedjax.host.running import Preemption, Running, Step, Wait
from pagedjax.host.sequence import Key, Sequence
from pagedjax.host.tables import BlockTables


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
        service: ServiceRules | None = None,
        swap_seconds: float | None = None,
        debug: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """token_budget is above num_lanes (ScheduleConfig checks it). max_queued counts sequences: n for a request. windows: of
        each layer group. host_blocks: places in host memory. swap_seconds: that a block takes there, or back, as measured. debug:
        plans say which blocks are fresh. clock: seconds."""
        self.tables = BlockTables(
            pool,
            block_size,
            max_model_len=max_model_len,
            chunk=token_budget,
            windows=windows,
            prefix_caching=prefix_caching,
            reserve=reserve,
            places=host_blocks,
            debug=debug,
        )
        self.pool, self.block_size, self.max_model_len = pool, block_size, max_model_len
        self.token_budget, self.max_queued = token_budget, max_queued
        self.clock = clock
        self._live: dict[Key, Sequence] = {}
        self._ids: Counter[str] = Counter()  # live sequences of each request that has any
        self._followers: dict[str, list[Sequence]] = {}  # samples that wait for the first one to compute the prompt
        self._beams: dict[str, BeamSearch] = {}
        rules = service or ServiceRules()
        self.entrance = Entrance(rules, self.tables, self._beams, num_lanes=num_lanes, token_budget=token_budget)
        self._due: dict[str, float] = {}  # of requests with a deadline: when that is
        self._late: dict[str, str] = {}  # of those, why it cannot be met, where that was found too late for the plan of the step
        self._ended: list[TokenEvent] = []
        self._orders = itertools.count()
        self._runs = Running(
            self._live,
            self._beams,
            self.tables,
            self.entrance,
            decode_steps=decode_steps,
            preemption=preemption,
            swap_seconds=swap_seconds,
            clock=clock,
        )
        self.running, self.stats, self.trace = self._runs.sequences, self._runs.stats, self._runs.trace

    # --- requests ---------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queues the request, or refuses it: QueueFull at a bound, UserError for what can never fit."""
        params, prompt, beams = request.params, len(request.prompt), request.params.beam_width
        max_len = self.entrance.longest(request)
        check(request.id not in self._ids, f"request id {request.id} is already in use")
        now = self.clock()
        sequences = [
            self.tables.sequence(request, i, max_len, epoch=next(self._runs.epochs), arrival=now, order=next(self._orders))
            for i in range(params.num_sequences)
        ]
        search = begin(request, sequences, max_len - prompt) if beams else None
        followers = sum(map(len, self._followers.values()))
        self.entrance.admit(request, sequences[0], len(sequences), followers, self.running, self.max_queued, now)
        self.trace.begin(request.id)
        self.trace.note(request.id, 0, now, "queued", ahead=self.num_waiting, prompt=prompt)
        if search is not None:
            self._beams[request.id] = search
            sequences = sequences[:1]  # the other slots have no beam yet
        elif len(sequences) > 1:
            self._followers[request.id] = sequences[1:]
        for sequence in sequences:
            self._live[sequence.key] = sequence
            self._ids[request.id] += 1
        if request.service.deadline is not None:
            self._due[request.id] = now + request.service.deadline
        self.entrance.queue.push(sequences[0], now)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not run."""
        return len(self.entrance.queue) + sum(map(len, self._followers.values()))

    def cancel(self, request_id: str) -> list[TokenEvent]:
        """Ends all sequences of a request; their blocks are free at once. Unknown ids are ignored."""
        return self._end(request_id, "cancelled")

    def _end(self, request_id: str, reason: FinishReason) -> list[TokenEvent]:
        search = self._beams.get(request_id)
        ended = [self._finish(s, reason) for s in [s for key, s in self._live.items() if key[0] == request_id]]
        if search is None:
            return ended
        usage = search.sequences[0].usage()
        return [TokenEvent(request_id, i, (), finish=reason, usage=usage) for i in range(search.request.params.n)]

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
        now = self.clock()
        self.tables.advance(now)
        self._end_late(now)
        self._release_followers(now)
        if self.entrance.queue:
            self._runs.displace(now)
        step = Step(now, self.entrance.budget(len(self.running), self.token_budget))
        self._runs.decode(step, alone=not self.num_waiting)
        preemptions = self.stats.preemptions
        prefills = [s for s in self.running if s.length - s.num_scheduled > 1]
        for pool, tokens in self._shares(prefills, step):
            step.budget += tokens
            candidates = self.running if step.entries else prefills
            begun = [s for s in candidates if s.length - s.num_scheduled > 1 and s.request.service.pool == pool]
            begun.sort(key=self.entrance.turn)  # stable
            if begun and self.stats.preemptions == preemptions:
                self._let_in(pool, step, before=self.entrance.turn(begun[0]))
            for sequence in begun:
                if step.budget > 0 and sequence.lane >= 0:
                    self._runs.advance(sequence, step)
            if self.stats.preemptions == preemptions:
                self._let_in(pool, step)
        if not step.rows:
            return None  # what was to be copied or swapped goes with the next plan
        step.rows.sort(key=lambda row: row.count > 1)  # stable: rows with one token first
        moves = self.tables.take_moves()
        steps = max([row.steps for row in step.rows] + [1])
        plan = Plan(tuple(step.rows), tuple(step.entries), steps, *moves)
        count(self.stats, plan, self.running, self.tables)
        self.stats.running, self.stats.waiting = len(self.running), self.num_waiting
        return plan

    def commit(self, plan: Plan, results: Iterable[RowResult], seconds: float | None = None) -> list[TokenEvent]:
        """Takes the results of a step's rows, in the plan's order; frees what finished. Plans are committed in order. seconds: that
        the step took, if it was measured."""
        now, events = self.clock(), self.take_ended()
        if seconds is not None:
            decode = sum(row.count == 1 for row in plan.rows) * plan.steps
            prefill = sum(row.count for row in plan.rows if row.count > 1)
            self.entrance.rates.observe(prefill, decode, seconds, plan.steps)
            self.stats.took(prefill, decode, seconds, plan.steps)
        for row, result in zip(plan.rows, results, strict=True):
            sequence = self._live.get((row.request_id, row.index))
            if sequence is None or sequence.epoch != row.epoch:
                continue
            sequence.num_committed = row.start + max(row.count, row.steps)
            known = row.start - len(sequence.scored)  # results of a recomputed position are not taken twice
            sequence.scored.extend(result.scored[-known:] if known < 0 else result.scored)
            if not row.steps:
                continue
            sequence.num_pending -= row.steps
            if row.request_id in self._beams:
                self.stats.generated_tokens += 1
                self.entrance.generated(self._beams[row.request_id].sequences[0], 1, now)  # all beams on one account
                if self._beams[row.request_id].take(sequence, result):
                    events += self._advance(self._beams[row.request_id])
                continue
            event = self._take(sequence, row, result, now)
            if event.finish is None and sequence.lane >= 0:
                self.tables.publish(sequence, sequence.num_committed)
            events.append(event)
        return events

    def seconds_idle(self) -> float:
        """Until somebody who waits may start, or has waited too long, as far as that depends on time alone."""
        now = self.clock()
        idle = self.entrance.queue.seconds_idle(now) or 0.0
        return max(0.0, min(idle, min(self._due.values(), default=now + idle) - now))

    def take_ended(self) -> list[TokenEvent]:
        """Of sequences that ended by their deadlines since the last time it was asked."""
        ended, self._ended = self._ended, []
        return ended

    def _advance(self, search: BeamSearch) -> list[TokenEvent]:
        def enter(fork: Sequence) -> None:
            fork.lane = search.lanes[fork.index]
            self.running.append(fork)
            self._live[fork.key] = fork
            self._ids[search.request.id] += 1

        def leave(beam: Sequence) -> None:
            self._runs.vacate(beam)
            self._forget(beam)

        done = search.advance(self.tables, enter, leave)
        for beam in search.live if not done else ():
            self.tables.publish(beam, beam.num_committed)
        if not done:
            return []
        self.trace.note(search.request.id, 0, self.clock(), "finished", reason="beams")
        return search.events()

    def _take(self, sequence: Sequence, row: Row, result: RowResult, now: float) -> TokenEvent:
        first = len(sequence.tokens) == sequence.prompt_len
        finish, stop_id, taken = None, None, 0
        for token in result.tokens:
            belongs, finish, stop_id = sequence.take(token)
            taken += belongs
            if finish:
                break
        assert finish or taken == row.steps, (
            f"{sequence.key}: the device stopped after {taken} of {row.steps} tokens, the host did not"
        )
        self.stats.generated_tokens += taken
        self.entrance.generated(sequence, taken, now)
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

    def _end_late(self, now: float) -> None:
        """Ends what has passed its deadline, or cannot meet it any more."""
        passed = {request_id: "its deadline has passed" for request_id, due in self._due.items() if due <= now}
        for request_id, reason in (passed | self._late).items():
            self._drop(request_id, reason, now)

    def _drop(self, request_id: str, reason: str, now: float) -> None:
        self.trace.note(request_id, 0, now, "dropped", because=reason)
        self._ended += self._end(request_id, "deadline")

    def _release_followers(self, now: float) -> None:
        """Samples join the queue once the first one has computed the prompt for them, or has ended or been preempted."""
        for request_id, sequences in list(self._followers.items()):
            first = self._live.get((request_id, 0))
            if first is None or first.highest and (first.lane < 0 or first.num_scheduled >= first.prompt_len):
                del self._followers[request_id]
                for sequence in sequences:
                    self.entrance.queue.push(sequence, now)

    def _shares(self, prefills: list[Sequence], step: Step) -> Iterator[tuple[str, int]]:
        """(pool, tokens) of what is left of the step's budget, in the order in which the pools may use it; what one leaves, the
        next one has, too."""
        queue, budget = self.entrance.queue, step.budget
        wants = {
            pool: max(queue.tokens(pool), queue.count(pool))  # one that was swapped out in flight seems to want none
            + sum(s.length - s.num_scheduled for s in prefills if s.request.service.pool == pool)
            for pool in POOLS
        }
        if not wants["batch"]:
            yield "interactive", 0
            return
        first, _ = tokens_for(budget, wants["interactive"], wants["batch"], self.entrance.rules.shares)
        step.budget = 0
        yield "interactive", first
        yield "batch", budget - first
        yield "interactive", 0

    def _let_in(self, pool: str, step: Step, before: tuple[float, float] | None = None) -> None:
        """Waiting sequences, whose turn is `before` that, enter as the queue has them, while there are tokens, lanes and blocks."""
        queue, held = self.entrance.queue, None
        while queue.count(pool) and step.budget > 0:
            held = held or self.entrance.held(self.running)
            beam = self.entrance.outside(pool)
            sequence = beam or queue.head(pool, step.now, held.tenants)
            for other, reason in queue.passed_over(pool):
                self.trace.waits(*other.key, step.now, reason)
            if sequence is None or before is not None and self.entrance.turn(sequence) >= before:
                return
            late = self.entrance.late(sequence, step.now)
            if late is not None and any(row.request_id == sequence.request.id for row in step.rows):
                self._late[sequence.request.id] = late  # what this plan computes keeps its lane and blocks until the next one
                return
            if late is not None:
                self._drop(sequence.request.id, late, step.now)
                continue
            start = self._runs.start_of(sequence, held, step)
            if beam is not None and (capped := self.entrance.capped(beam, held)):
                start = Wait(capped)
            if isinstance(start, Wait) and start.lead is not None:  # its turn is the leader's
                if self._runs.prefill(start.lead.leader, step, start.lead.until):
                    self.trace.waits(*sequence.key, step.now, start.reason)
                    held = None
                    continue
                start = self._runs.start_of(sequence, held, step, follows=False)  # that one finds no blocks
            if isinstance(start, Wait):
                self.trace.waits(*sequence.key, step.now, start.reason)
                return  # nobody passes the head
            queue.remove(sequence)
            self._runs.enter(sequence, start, step)
            self._runs.prefill(sequence, step)
            held = None

    # --- who enters, and who leaves ---------------------------------------------------------------------------------

    def _finish(self, sequence: Sequence, reason: FinishReason) -> TokenEvent:
        followers = self._followers.get(sequence.request.id, [])
        if sequence.lane >= 0:
            self._runs.vacate(sequence)
        elif sequence in followers:
            followers.remove(sequence)
        else:
            self.tables.drop_places(sequence)
            self.entrance.queue.remove(sequence)
        usage = sequence.usage()
        now = self.clock()
        self.trace.note(*sequence.key, now, "finished", reason=reason, generated=usage.generated)
        self._forget(sequence)
        return TokenEvent(sequence.request.id, sequence.index, (), finish=reason, usage=usage)

    def _forget(self, sequence: Sequence) -> None:
        request_id = sequence.request.id
        del self._live[sequence.key]
        if request_id not in self._beams:
            self.entrance.left(sequence, self.clock())
        self.stats.slot_steps.ended(sequence)
        self._ids[request_id] -= 1
        if not self._ids[request_id]:
            del self._ids[request_id]
            self._followers.pop(request_id, None)
            self._due.pop(request_id, None)
            self._late.pop(request_id, None)
            search = self._beams.pop(request_id, None)
            if search is not None:
                self._runs.lanes += search.lanes
                self.entrance.left(search.sequences[0], self.clock())
            self.trace.end(request_id)
