"""Beam search among the scheduler's sequences: one request is as many sequences as it has beams, each in its slot."""

from collections.abc import Callable
from dataclasses import dataclass, field

from pagedjax.host.beam import BeamState, Candidates, advance, results, start
from pagedjax.host.plan import RowResult
from pagedjax.host.request import Request, TokenEvent, Usage
from pagedjax.host.sequence import Sequence
from pagedjax.host.tables import BlockTables


@dataclass
class BeamSearch:
    """One request. A sequence is live while it holds a beam; the lanes of all slots are taken and given back together."""

    request: Request
    sequences: list[Sequence]  # by slot
    state: BeamState
    lanes: list[int] = field(default_factory=list)
    _found: dict[int, Candidates] = field(default_factory=dict)  # by slot, since the last advance

    @property
    def live(self) -> list[Sequence]:
        return [self.sequences[beam.slot] for beam in self.state.live]

    @property
    def outside(self) -> list[Sequence]:
        """Beams that wait while others of the search hold the lanes of all: they take a row together or not at all."""
        return [beam for beam in self.live if beam.lane < 0] if self.lanes else []

    def forget(self) -> None:
        """The beams were preempted: what was found is found again."""
        self._found.clear()

    def take(self, sequence: Sequence, result: RowResult) -> bool:
        """The candidates of one beam; whether those of all beams are there."""
        assert result.logprobs is not None, "the device gives logprobs for beams"
        self._found[sequence.index] = result.logprobs[0].top
        return len(self._found) == len(self.state.live)

    def advance(self, tables: BlockTables, enter: Callable[[Sequence], None], leave: Callable[[Sequence], None]) -> bool:
        """The next beams, once the candidates of all are there: a beam without children leaves, the first child of another one is
        its sequence, further ones fork it and enter. Whether the search is over; all beams have left then."""
        before = self.live
        self.state, children, done = advance(self.state, self._found)
        self._found = {}
        stay = {child.slot for child in children if child.slot == child.parent}
        for sequence in before:
            if sequence.index not in stay:
                leave(sequence)
        if done:
            return True
        for child in children:
            if child.slot != child.parent:
                parent, fork = self.sequences[child.parent], self.sequences[child.slot]
                known = parent.num_scheduled
                fork.tokens = [*parent.tokens[:known], child.token]
                fork.num_scheduled = fork.num_committed = fork.highest = known
                tables.fork(parent, fork, known)
                enter(fork)
        for child in children:
            if child.slot == child.parent:
                self.sequences[child.slot].tokens.append(child.token)
        return False

    def events(self) -> list[TokenEvent]:
        """Of a search that is over: one for each of the n hypotheses, best first. What all beams computed again is the first's."""
        recomputed = sum(sequence.recomputed for sequence in self.sequences)
        found, wants = results(self.state), self.request.params.logprobs is not None
        prompt, cached = len(self.request.prompt), self.sequences[0].cached
        events = []
        for index in range(self.request.params.n):
            best = found[index] if index < len(found) else None
            usage = Usage(prompt, cached, len(best.tokens) if best else 0, 0 if index else recomputed)
            events.append(
                TokenEvent(
                    self.request.id,
                    index,
                    best.tokens if best else (),
                    logprobs=best.logprobs if best and wants else None,
                    finish=best.finish if best else "length",
                    stop_id=best.stop_id if best else None,
                    usage=usage,
                )
            )
        return events


def begin(request: Request, sequences: list[Sequence], max_tokens: int) -> BeamSearch:
    """UserError where the device's candidates would not suffice."""
    return BeamSearch(request, sequences, start(request, max_tokens))
