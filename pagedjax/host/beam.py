"""Beam search of one request, as plain values: which beams live on, which hypotheses are finished, and when it is over.

The rules are those of transformers' beam search. Of all continuations of all live beams, ranked by the sum of their logprobs under
the model's own distribution:

- those that end by a stop id are finished if they are among the first `width`, and dropped otherwise;
- the first `width` of the others live on;
- at max_tokens the first `width` of all are finished, and the search is over.

A finished hypothesis has the score: sum of logprobs / length ** length_penalty, where length counts the generated tokens, with the
stop token and without the prompt. The best `width` are kept. Once there are so many, the search is over

- at once, where early_stopping is True;
- else when the best live beam cannot have a better score than the worst of them: of its present length (early_stopping False, a
  guess where length_penalty is positive), or of the length that is best for it, max_tokens where length_penalty is positive
  ("never").

The scheduler owns sequences and blocks: it gives `advance` the best (token, logprob) pairs of each live beam, and does what the
children say: a child in its parent's slot goes on in the parent's sequence, one in another slot is a fork of it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import itemgetter
from typing import Literal, NamedTuple

from pagedjax.errors import check
from pagedjax.host.request import FinishReason, Logprobs, Request
from pagedjax.limits import NUM_LOGPROBS

Candidates = Sequence[tuple[int, float]]  # (token, logprob), best first; of pairs that stand for nothing the logprob is -inf
Path = tuple["Path", Logprobs] | None  # a hypothesis' tokens, from its end; beams share their beginnings


@dataclass(frozen=True)
class Rules:
    """What does not change while a search runs."""

    width: int  # W: live beams, and finished hypotheses that are kept
    n: int  # hypotheses to return
    max_tokens: int  # generated
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0  # a stop id is no candidate before this many tokens
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_top: int = 0  # best tokens to report at each position

    @property
    def num_candidates(self) -> int:
        """Pairs of each beam that suffice: at most len(stop_ids) of them end it, and no beam has more than W children."""
        return self.width + len(self.stop_ids)

    def score(self, total: float, length: int) -> float:
        return total / length**self.length_penalty


@dataclass(frozen=True, eq=False)
class Beam:
    """A hypothesis that may be continued, in one of W slots."""

    slot: int
    total: float = 0.0  # sum of its logprobs
    path: Path = field(default=None, repr=False)


@dataclass(frozen=True, eq=False)
class Finished:
    score: float
    finish: FinishReason
    path: Path = field(repr=False)


@dataclass(frozen=True, eq=False)
class BeamState:
    """A search between two steps. Best first: live beams by total, finished hypotheses by score (the older of equal ones)."""

    rules: Rules
    length: int = 0  # tokens of each live beam
    live: tuple[Beam, ...] = (Beam(0),)
    finished: tuple[Finished, ...] = ()
    done: bool = False


class Child(NamedTuple):
    """A beam of the next step: token, in `slot`, after what stands in slot `parent`."""

    parent: int
    slot: int
    token: int
    logprob: float


@dataclass(frozen=True)
class Hypothesis:
    score: float
    tokens: tuple[int, ...]  # generated, the stop token too
    logprobs: tuple[Logprobs, ...]
    finish: FinishReason
    stop_id: int | None  # the last token, where it ended the hypothesis


class _Candidate(NamedTuple):
    total: float
    beam: Beam
    token: int
    rank: int  # of the token in the beam's distribution; 1 is the best


def start(request: Request, max_tokens: int) -> BeamState:
    """The search of a request with a beam_width, for up to max_tokens tokens. Its one beam, the prompt, is in slot 0.

    UserError where the device's NUM_LOGPROBS pairs of a beam would not suffice."""
    params = request.params
    rules = Rules(
        width=params.beam_width,
        n=params.n,
        max_tokens=max_tokens,
        stop_ids=frozenset(request.stop_ids),
        min_tokens=params.min_tokens,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        num_top=params.logprobs or 0,
    )
    check(
        rules.num_candidates <= NUM_LOGPROBS,
        f"request {request.id}: beam_width and the number of stop ids must be at most {NUM_LOGPROBS} together; "
        f"got {rules.width} and {len(rules.stop_ids)}",
    )
    return BeamState(rules)


def advance(state: BeamState, candidates: Mapping[int, Candidates]) -> tuple[BeamState, tuple[Child, ...], bool]:
    """(next state, its live beams, whether the search is over) from the pairs of each live slot, rules.num_candidates of them or
    all there are. When the search is over there are no children. Of equal candidates the one of the better beam goes first, then
    the one that its beam names first."""
    rules, length = state.rules, state.length + 1
    last = length == rules.max_tokens
    going: list[_Candidate] = []
    ended: list[_Candidate] = []
    for place, c in enumerate(_ranked(state, candidates)):
        if last or c.token in rules.stop_ids:
            if place < rules.width:
                ended.append(c)
        elif len(going) < rules.width:
            going.append(c)
        elif place >= rules.width:
            break
    finished = list(state.finished)
    for c in ended:
        reason = "stop" if c.token in rules.stop_ids else "length"
        finished.append(Finished(rules.score(c.total, length), reason, _extended(c, candidates, rules)))
    finished.sort(key=lambda hypothesis: -hypothesis.score)
    del finished[rules.width :]
    slots = _slots([c.beam.slot for c in going], rules.width)
    live = tuple(Beam(slot, c.total, _extended(c, candidates, rules)) for slot, c in zip(slots, going, strict=True))
    if not live and not finished:  # nothing can follow: the beams end as they stand
        return replace(state, done=True), (), True
    after = BeamState(rules, length, live, tuple(finished))
    if not live or _cannot_improve(after):
        return replace(after, done=True), (), True
    children = (Child(c.beam.slot, slot, c.token, _logprob(c, candidates)) for slot, c in zip(slots, going, strict=True))
    return after, tuple(children), False


def results(state: BeamState) -> list[Hypothesis]:
    """The n best finished hypotheses, best score first; of a search that has finished none, the live beams as they stand. There
    are fewer than n only where there were fewer to find, or the search is not done."""
    rules, found = state.rules, state.finished
    if not found and state.length:
        found = [Finished(rules.score(beam.total, state.length), "length", beam.path) for beam in state.live]
    return [_hypothesis(item) for item in found[: rules.n]]


def _ranked(state: BeamState, candidates: Mapping[int, Candidates]) -> Iterator[_Candidate]:
    """All that may follow, best first."""
    rules = state.rules
    may_stop = state.length >= rules.min_tokens
    found = [
        (beam.total + logprob, beam, token, rank)
        for beam in state.live
        for rank, (token, logprob) in enumerate(islice(candidates[beam.slot], rules.num_candidates), 1)
        if logprob > -float("inf") and (may_stop or token not in rules.stop_ids)
    ]
    found.sort(key=itemgetter(0), reverse=True)  # stable: of equal ones the first
    return map(_Candidate._make, found)


def _cannot_improve(state: BeamState) -> bool:
    rules = state.rules
    if len(state.finished) < rules.width:
        return False
    if rules.early_stopping is True:
        return True
    ahead = rules.early_stopping == "never" and rules.length_penalty > 0
    best = rules.score(state.live[0].total, rules.max_tokens if ahead else state.length)
    return best <= state.finished[-1].score


def _slots(parents: Sequence[int], width: int) -> list[int]:
    """A slot for each child: the parent's for the first child of a parent, so that as few are forked as can be, and those of
    beams without children, or of none, for the others."""
    others = iter(sorted(set(range(width)) - set(parents)))
    return [next(others) if parent in parents[:i] else parent for i, parent in enumerate(parents)]


def _logprob(candidate: _Candidate, candidates: Mapping[int, Candidates]) -> float:
    return candidates[candidate.beam.slot][candidate.rank - 1][1]


def _extended(candidate: _Candidate, candidates: Mapping[int, Candidates], rules: Rules) -> Path:
    top = tuple(candidates[candidate.beam.slot][: rules.num_top])
    return candidate.beam.path, Logprobs(candidate.token, _logprob(candidate, candidates), candidate.rank, top)


def _hypothesis(item: Finished) -> Hypothesis:
    logprobs, path = [], item.path
    while path is not None:
        path, entry = path
        logprobs.append(entry)
    tokens = tuple(entry.token for entry in reversed(logprobs))
    return Hypothesis(item.score, tokens, tuple(reversed(logprobs)), item.finish, tokens[-1] if item.finish == "stop" else None)


def choose(logprobs: Sequence[Iterable[float]], n: int) -> tuple[int, ...]:
    """Of best_of sampled sequences, given the logprob of each generated token, the indices of the n with the highest mean, best
    first; of equal ones the first."""
    means = [sum(values) / max(1, len(values)) for values in map(list, logprobs)]
    return tuple(sorted(range(len(means)), key=lambda index: -means[index])[:n])
