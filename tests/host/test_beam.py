"""Beam search against an unshared reference in float64, against transformers, and in blocks of the pool."""

import functools
import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.errors import UserError
from pagedjax.host.beam import BeamState, Child, Hypothesis, Rules, advance, choose, results, start
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.request import Request, SamplingParams
from pagedjax.limits import NUM_LOGPROBS
from tests.golden.beam_toys import PROMPT, VOCAB, toy_logits

GOLDENS = json.loads((Path(__file__).parents[1] / "golden" / "beam_search.json").read_text(encoding="utf-8"))

Model = Callable[[tuple[int, ...]], np.ndarray]  # f64[V]: logprobs of the token after these


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())


def random_model(seed: int, vocab: int, spread: float = 2.0) -> Model:
    @functools.cache
    def logprobs(tokens: tuple[int, ...]) -> np.ndarray:
        return log_softmax(spread * np.random.default_rng([seed, *tokens]).normal(size=vocab))

    return logprobs


def pairs(logprobs: np.ndarray) -> list[tuple[int, float]]:
    """As the device gives them: NUM_LOGPROBS, best first; where the vocabulary is smaller, what is left is -1 and -inf."""
    best = np.argsort(-logprobs, kind="stable")[:NUM_LOGPROBS]
    found = [(int(token), float(logprobs[token])) for token in best]
    return found + [(-1, -np.inf)] * (NUM_LOGPROBS - len(found))


def run(model: Model, rules: Rules, each_step: Callable[[BeamState, tuple[Child, ...]], None] = lambda *_: None) -> BeamState:
    """The search to its end. The texts are put together from the children alone, as the scheduler would."""
    state, texts, done = BeamState(rules), {0: ()}, False
    while not done:
        state, children, done = advance(state, {slot: pairs(model(text)) for slot, text in texts.items()})
        texts = {child.slot: (*texts[child.parent], child.token) for child in children}
        each_step(state, children)
        assert len(texts) == len(children) <= rules.width and all(slot < rules.width for slot in texts)
        assert state.length <= rules.max_tokens
    return state


def reference(model: Model, rules: Rules) -> list[tuple[float, tuple[int, ...], str]]:
    """(score, tokens, finish), best first: matrices of W x V continuations, every score summed anew from the model."""

    def total(tokens: tuple[int, ...]) -> float:
        return float(sum(model(tokens[:i])[token] for i, token in enumerate(tokens)))

    width, stops = rules.width, set(rules.stop_ids)
    live: list[tuple[int, ...]] = [()]
    finished: list[tuple[float, tuple[int, ...], str]] = []
    for length in range(1, rules.max_tokens + 1):
        matrix = np.array([[total((*tokens, token)) for token in range(len(model(())))] for tokens in live])
        if length <= rules.min_tokens:
            matrix[:, sorted(stops)] = -np.inf
        order = [divmod(int(i), matrix.shape[1]) for i in np.argsort(-matrix, axis=None, kind="stable")]
        order = [at for at in order if matrix[at] > -np.inf]
        best = [(*live[beam], token) for beam, token in order]
        ending = [tokens for tokens in best[:width] if tokens[-1] in stops or length == rules.max_tokens]
        finished += [
            (total(tokens) / length**rules.length_penalty, tokens, "stop" if tokens[-1] in stops else "length") for tokens in ending
        ]
        finished = sorted(finished, key=lambda item: -item[0])[:width]
        live = [tokens for tokens in best if tokens[-1] not in stops][:width]
        if not live or length == rules.max_tokens:
            break
        if len(finished) == width:
            if rules.early_stopping is True:
                break
            hoped = rules.max_tokens if rules.early_stopping == "never" and rules.length_penalty > 0 else length
            if total(live[0]) / hoped**rules.length_penalty <= finished[-1][0]:
                break
    return finished[: rules.n]


def plain(found: list[Hypothesis]) -> list[tuple[float, tuple[int, ...], str]]:
    return [(pytest.approx(item.score, abs=1e-9), item.tokens, item.finish) for item in found]


@st.composite
def searches(draw: st.DrawFn) -> tuple[Model, Rules]:
    vocab = draw(st.integers(2, 30))
    width = draw(st.integers(1, 10))
    rules = Rules(
        width=width,
        n=draw(st.integers(1, width)),
        max_tokens=draw(st.integers(1, 12)),
        stop_ids=frozenset(draw(st.lists(st.integers(0, vocab - 1), max_size=min(vocab - 1, 8)))),
        min_tokens=draw(st.sampled_from([0, 0, 1, 4])),
        length_penalty=draw(st.sampled_from([1.0, 0.0, 0.6, 2.0, -1.0, -0.1])),
        early_stopping=draw(st.sampled_from([False, True, "never"])),
    )
    return random_model(draw(st.integers(0, 10**6)), vocab, draw(st.sampled_from([0.5, 3.0]))), rules


@given(searches())
@settings(max_examples=300, deadline=None)
def test_equals_the_unshared_reference(search: tuple[Model, Rules]) -> None:
    model, rules = search
    state = run(model, rules)
    found = results(state)
    assert plain(found) == reference(model, rules)
    for item in found:
        assert item.stop_id == (item.tokens[-1] if item.finish == "stop" else None)
        for i, entry in enumerate(item.logprobs):
            logprobs = model(item.tokens[:i])
            assert (entry.token, entry.logprob) == (item.tokens[i], logprobs[item.tokens[i]])
            assert entry.rank == 1 + (logprobs > entry.logprob).sum()


@pytest.mark.parametrize("change", [{"length_penalty": 0.0}, {"early_stopping": True}, {"stop_ids": frozenset({1})}, {"width": 2}])
def test_every_rule_matters(change: dict[str, Any]) -> None:
    """The control: a search with another rule than the reference's is told apart."""
    same = 0
    for seed in range(40):
        model = random_model(seed, 12)
        rules = Rules(4, 2, 8, frozenset({0, 1}), early_stopping="never")
        same += plain(results(run(model, replace(rules, **change)))) == reference(model, rules)
    assert same < 40


@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda case: f"model{case['model']}")
def test_equals_transformers(case: dict[str, Any]) -> None:
    assert (VOCAB, list(PROMPT)) == (GOLDENS["vocab"], GOLDENS["prompt"])
    table = toy_logits(case["model"])
    model = lambda tokens: log_softmax(table[tuple((*PROMPT, *tokens)[-2:])])
    options = {k: v for k, v in case.items() if k not in ("model", "found", "stop_ids")}
    rules = Rules(n=case["width"], stop_ids=frozenset(case["stop_ids"]), **options)
    found = results(run(model, rules))
    assert [list(item.tokens) for item in found] == [item["tokens"] for item in case["found"]]
    assert [item.score for item in found] == pytest.approx([item["score"] for item in case["found"]], abs=3e-5)


@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0])
@pytest.mark.parametrize("early", [False, True])
def test_one_beam_is_greedy(penalty: float, early: bool) -> None:
    """Not so with "never" and a positive penalty: that goes on for as long as a longer one could have a better score."""
    for seed in range(20):
        model = random_model(seed, 6)
        tokens: list[int] = []
        while len(tokens) < 12 and (not tokens or tokens[-1] != 0):
            tokens.append(int(np.argmax(model(tuple(tokens)))))
        rules = Rules(1, 1, 12, frozenset({0}), length_penalty=penalty, early_stopping=early)
        (found,) = results(run(model, rules))
        assert list(found.tokens) == tokens


def test_wide_enough_it_is_exhaustive() -> None:
    """Two tokens, of which one stops, and three steps: four hypotheses; or three tokens and two steps: seven."""
    for vocab, steps, count in ((2, 3, 4), (3, 2, 7)):
        everything = [
            tokens
            for length in range(1, steps + 1)
            for tokens in itertools.product(range(vocab), repeat=length)
            if 0 not in tokens[:-1] and (tokens[-1] == 0 or length == steps)
        ]
        assert len(everything) == count
        for seed in range(20):
            model = random_model(seed, vocab)
            total = lambda t, model=model: sum(model(t[:i])[token] for i, token in enumerate(t))
            best = sorted(everything, key=lambda t: -total(t) / len(t))
            for early in (False, True, "never"):
                found = results(run(model, Rules(count, count, steps, frozenset({0}), early_stopping=early)))
                assert [item.tokens for item in found] == best


def test_a_narrow_search_is_not_exhaustive() -> None:
    """The control: the best of all first tokens need not begin the best pair."""
    table = {(): [0.6, 0.4], (0,): [0.5, 0.5], (1,): [0.99, 0.01]}
    model = lambda tokens: np.log(np.array(table[tokens]))
    assert results(run(model, Rules(1, 1, 2)))[0].tokens == (0, 0)
    assert results(run(model, Rules(2, 1, 2)))[0].tokens == (1, 0)


def test_nothing_can_follow() -> None:
    rules = Rules(2, 2, 5)
    state, children, done = advance(BeamState(rules), {0: [(3, -0.1), (4, -2.0)]})
    assert (children, done) == ((Child(0, 0, 3, -0.1), Child(0, 1, 4, -2.0)), False)
    assert [item.tokens for item in results(state)] == [(3,), (4,)]
    nan = float("nan")
    state, children, done = advance(state, {0: [(1, nan)], 1: [(-1, -np.inf)]})
    assert (children, done) == ((), True)
    assert [(item.tokens, item.finish, item.score) for item in results(state)] == [((3,), "length", -0.1), ((4,), "length", -2.0)]


def test_ties_go_to_the_better_beam_and_the_first_token() -> None:
    state, children, _ = advance(BeamState(Rules(3, 3, 9)), {0: [(7, -1.0), (8, -1.0), (2, -1.0), (1, -1.0)]})
    assert [(child.slot, child.token) for child in children] == [(0, 7), (1, 8), (2, 2)]
    _, children, _ = advance(state, {slot: [(5, -1.0), (6, -1.0)] for slot in range(3)})
    assert [(child.parent, child.token) for child in children] == [(0, 5), (0, 6), (1, 5)]


def test_a_beam_that_could_only_be_as_good_does_not_go_on() -> None:
    state, _, _ = advance(BeamState(Rules(1, 1, 9, frozenset({0}))), {0: [(5, -1.0)]})
    _, children, done = advance(state, {0: [(0, -1.0), (7, -1.0)]})
    assert (children, done) == ((), True)


@pytest.mark.parametrize(
    ("penalty", "live", "early", "over"),
    [
        (-0.1, -1.0, False, False),
        (-0.1, -1.0, "never", False),
        (-0.1, -1.0, True, True),
        (3.0, -12.0, False, True),
        (3.0, -12.0, "never", False),
    ],
)
def test_how_long_the_best_live_beam_is_thought_to_become(penalty: float, live: float, early: Any, over: bool) -> None:
    """Finished: -1.5 / 1 and -3 / 2 ** penalty; live: one of two tokens, of at most a million."""
    rules = Rules(2, 2, 10**6, frozenset({0}), length_penalty=penalty, early_stopping=early)
    state, _, _ = advance(BeamState(rules), {0: [(5, -1.0), (0, -1.5)]})
    state, _, done = advance(state, {0: sorted([(7, live), (0, -2.0)], key=lambda pair: -pair[1])})
    assert len(state.finished) == 2 and done == over


def test_slots_and_top_logprobs() -> None:
    """The first child of a parent stays, the others take the slots of those that have none."""
    rules = Rules(4, 4, 9, num_top=2)
    state, children, _ = advance(BeamState(rules), {0: pairs(np.array([-4.0, -3.0, -2.0, -1.0, -9.0]))})
    assert [(child.parent, child.slot, child.token) for child in children] == [(0, 0, 3), (0, 1, 2), (0, 2, 1), (0, 3, 0)]
    none, good = [(0, -50.0)], [(1, -0.1), (2, -0.2)]
    state, children, _ = advance(state, {0: none, 1: good, 2: good, 3: none})
    assert [(child.parent, child.slot) for child in children] == [(1, 1), (1, 0), (2, 2), (2, 3)]
    entry = results(state)[1].logprobs[1]
    assert (entry.token, entry.logprob, entry.rank, entry.top) == (2, -0.2, 2, ((1, -0.1), (2, -0.2)))


class Blocks:
    """Block tables of the beams of one request: forks share, and copy the last block before they write to it."""

    def __init__(self, prompt: int, size: int, pool: BlockPool):
        self.pool, self.size, self.length = pool, size, prompt
        self.tables = {0: pool.allocate(-(-prompt // size))}
        self.copies = self.forks = 0

    def step(self, _: BeamState, children: tuple[Child, ...]) -> None:
        """The children's tokens are written."""
        tables = {child.slot: list(self.tables[child.parent]) for child in children}
        self.forks += sum(child.slot != child.parent for child in children)
        for child in children:
            if child.slot != child.parent:
                self.pool.share(tables[child.slot])
        for slot, table in self.tables.items():
            if all(child.parent != slot or child.slot != slot for child in children):
                self.pool.release(table)
        self.tables = tables
        for table in tables.values():
            if self.length % self.size == 0:
                table += self.pool.allocate(1)
            elif sum(table[-1] in other for other in tables.values()) > 1:
                (block,) = self.pool.allocate(1)
                self.pool.release([table[-1]])
                table[-1], self.copies = block, self.copies + 1
        self.length += bool(children)
        self.pool.check(tables.values())

    @property
    def held(self) -> int:
        return self.pool.capacity - self.pool.num_free


@pytest.mark.parametrize(("prompt", "size"), [(7, 4), (8, 4), (9, 4), (3, 8)])
@pytest.mark.parametrize("width", [2, 5])
def test_blocks_held_are_exactly_what_sharing_allows(prompt: int, size: int, width: int) -> None:
    """One block for each distinct text up to a block's end, and the forks are the fewest there can be."""
    for seed in range(10):
        blocks, texts = Blocks(prompt, size, BlockPool(200)), {0: ()}

        def each_step(state: BeamState, children: tuple[Child, ...], blocks: Blocks = blocks, texts: dict = texts) -> None:
            forks = blocks.forks
            blocks.step(state, children)
            after = {child.slot: (*texts[child.parent], child.token) for child in children}
            texts.clear()
            texts.update(after)
            whole = [(None,) * prompt + text for text in after.values()]
            ends = {text[: min(end, len(text))] for text in whole for end in range(size, len(text) + size, size)}
            assert blocks.held == len(ends)
            assert blocks.forks - forks == len(children) - len({child.parent for child in children})

        run(random_model(seed, 8), Rules(width, 1, 20, frozenset({0})), each_step)
        assert blocks.held == 0


@pytest.mark.parametrize("kind", ["apart", "one parent"])
def test_savings_have_the_closed_form(kind: str) -> None:
    """Beams that part at the first token and never again share the prompt's whole blocks, (W - 1) floor(p / B) of them, as samples
    do; where all children are one beam's, they share all but the last block, (W - 1) (ceil((p + t) / B) - 1)."""
    width, prompt, size, steps = 4, 10, 4, 13
    vocab = 8

    def model(tokens: tuple[int, ...]) -> np.ndarray:
        sure = np.full(vocab, -30.0)
        if kind == "apart" and tokens:
            sure[tokens[0]] = 0.0  # each repeats its first token
        elif kind == "apart":
            sure[:width] = -0.01 * np.arange(width)
        else:
            sure[:] = -0.001 * np.arange(vocab) - 5.0 * sum(tokens)  # the beam of zeros has the best children
        return sure

    blocks, saved = Blocks(prompt, size, BlockPool(200)), []

    def each_step(state: BeamState, children: tuple[Child, ...]) -> None:
        blocks.step(state, children)
        saved.append(len(children) * -(-(prompt + state.length) // size) - blocks.held)

    run(model, Rules(width, 1, steps + 1), each_step)
    if kind == "apart":
        assert saved[:-1] == [(width - 1) * (prompt // size)] * steps
        assert blocks.forks == width - 1
    else:
        assert saved[:-1] == [(width - 1) * (-(-(prompt + t) // size) - 1) for t in range(1, steps + 1)]
        assert blocks.forks == steps * (width - 1)


def test_what_a_request_says() -> None:
    params = SamplingParams(beam_width=3, n=2, min_tokens=1, length_penalty=0.5, early_stopping="never", logprobs=4, max_tokens=99)
    state = start(Request("a", (1, 2), params, stop_ids=(5, 6)), 7)
    assert state.rules == Rules(3, 2, 7, frozenset({5, 6}), 1, 0.5, "never", 4)
    assert state.rules.num_candidates == 5
    with pytest.raises(
        UserError, match="request a: beam_width and the number of stop ids must be at most 20 together; got 10 and 11"
    ):
        start(Request("a", (1,), SamplingParams(beam_width=10), stop_ids=tuple(range(11))), 7)


def test_best_of() -> None:
    assert choose([[-1.0], [-0.5, -0.7], [-0.1, -3.0], [-0.6]], 3) == (1, 3, 0)  # of equal ones the first
    assert choose([[-2.0, -2.0], [-2.5]], 1) == (0,)  # the mean, not the sum
    assert choose([[-1.0], [-1.0]], 2) == (0, 1)
