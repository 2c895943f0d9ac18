"""What the memory manager does, on a real model in debug mode: fresh blocks are NaN, a guard block and every owner are checked
after each step. Tokens are the judge's (tests/judge.py) whatever is shared, copied, swapped or reserved."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np
import pytest
from judge import check_output
from reference_llama import ReferenceLlama

from pagedjax.engine import Engine
from pagedjax.host import beam
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.request import Request, SamplingParams, Service, TokenEvent
from pagedjax.limits import NUM_LOGPROBS

BLOCK = 5 * 2 * 4 * 16 * 8 * 4  # bytes, of stories260K with 16 tokens in a block
SMALL = {"debug": True, "cache.kv_memory": 15 * BLOCK, "cache.swap_memory": 40 * BLOCK, "cache.prefix_caching": False}


def run(engine: Engine, requests: Iterable[Request]) -> dict[tuple[str, int], list[TokenEvent]]:
    for request in requests:
        engine.add(request)
    events: dict[tuple[str, int], list[TokenEvent]] = {}
    while engine.has_work():
        for event in engine.step():
            events.setdefault((event.request_id, event.index), []).append(event)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.capacity
    assert engine.compilations_after_start == 0
    return events


def crowd() -> list[Request]:
    """Four requests, greedy and seeded, that do not fit together."""
    params = [SamplingParams(max_tokens=60, temperature=0.5 * (i % 2)) for i in range(4)]
    return [Request(f"r{i}", (1, *range(400 + i, 410 + i)), p, seed=i) for i, p in enumerate(params)]


@pytest.mark.parametrize(("how", "caching"), [("swap", False), ("recompute", False), ("swap", True)])
def test_preempted_sequences_get_their_tokens(stories_engine: Callable[..., Engine], how: str, caching: bool) -> None:
    engine = stories_engine(**{**SMALL, "cache.prefix_caching": caching, "schedule.preemption": how})
    made = crowd()
    events = run(engine, made)
    for request in made:
        check_output(request, 0, events[request.id, 0])
    stats = engine.scheduler.stats
    assert stats.preemptions > 0
    assert stats.swaps == (stats.preemptions if how == "swap" else 0)
    assert (stats.recomputed_tokens == 0) == (how == "swap")


@pytest.mark.parametrize("mode", ["oracle", "pow2", "max"])
def test_reserved_runs_give_the_same_tokens(stories_engine: Callable[..., Engine], mode: str) -> None:
    engine = stories_engine(debug=True, **{"cache.reserve": mode, "cache.kv_memory": 40 * BLOCK})
    made = crowd()
    events = run(engine, made)
    for request in made:
        check_output(request, 0, events[request.id, 0])
    assert engine.scheduler.stats.preemptions == 0


def test_samples_fork_the_prompt(stories_engine: Callable[..., Engine]) -> None:
    engine = stories_engine(**SMALL)
    before = engine.scheduler.stats.copies
    request = Request("a", (1, *range(400, 420)), SamplingParams(n=3, max_tokens=12, temperature=0.8), seed=5)
    events = run(engine, [request])
    assert engine.scheduler.stats.copies - before == 2
    for index in range(3):
        check_output(request, index, events["a", index])


def test_a_copy_that_is_left_out_gives_other_tokens(stories_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a fork that does not copy."""
    engine = stories_engine(**SMALL)
    dispatch = engine._dispatch
    monkeypatch.setattr(engine, "_dispatch", lambda plan: dispatch(replace(plan, copies=())))
    request = Request("a", (1, *range(400, 420)), SamplingParams(n=3, max_tokens=12, temperature=0.8), seed=5)
    events = run(engine, [request])
    with pytest.raises(AssertionError):
        for index in range(3):
            check_output(request, index, events["a", index])


def unshared(request: Request) -> list[beam.Hypothesis]:
    """The same search over whole texts, by the reference model in float64."""
    model = ReferenceLlama()

    def pairs(text: tuple[int, ...]) -> list[tuple[int, float]]:
        logits = model.logits(list(text))[-1].astype(np.float64)
        logprobs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        return [(int(t), float(logprobs[t])) for t in np.argsort(-logprobs, kind="stable")[:NUM_LOGPROBS]]

    state, texts, done = beam.start(request, request.params.max_tokens or 0), {0: request.prompt}, False
    while not done:
        state, children, done = beam.advance(state, {slot: pairs(text) for slot, text in texts.items()})
        texts = {child.slot: (*texts[child.parent], child.token) for child in children}
    return beam.results(state)


@pytest.mark.parametrize(("width", "penalty"), [(2, 1.0), (4, 0.0)])
def test_beams_are_those_of_an_unshared_search(stories_engine: Callable[..., Engine], width: int, penalty: float) -> None:
    """Tokens, reasons and scores, beside another request."""
    engine = stories_engine(debug=True)
    params = SamplingParams(n=width, max_tokens=14, beam_width=width, length_penalty=penalty, logprobs=0)
    request = Request("a", (1, *range(400, 420)), params, stop_ids=(2, 426))
    other = Request("b", (1, 300), SamplingParams(max_tokens=20, temperature=0))
    events = run(engine, [request, other])
    check_output(other, 0, events["b", 0])
    for index, best in enumerate(unshared(request)):
        (event,) = events["a", index]
        assert (event.tokens, event.finish) == (best.tokens, best.finish)
        score = sum(p.logprob for p in event.logprobs or ()) / len(event.tokens) ** penalty
        assert score == pytest.approx(best.score, abs=1e-4)


def test_a_follower_goes_on_behind_what_its_leader_has_computed(stories_engine: Callable[..., Engine]) -> None:
    """An interactive request comes while batch work computes the same 96 tokens in steps of 32; another comes when its own tail is
    computed. All get their tokens, and nothing is computed twice."""
    engine = stories_engine(debug=True)
    params, shared = SamplingParams(max_tokens=8, temperature=0), (1, *range(300, 395))
    pools = [Service(pool="batch"), Service(), Service(tenant="other")]
    made = [Request(f"f{i}", (*shared, *range(400, 405 + i)), params, service=own) for i, own in enumerate(pools)]
    before = engine.scheduler.stats.scheduled_tokens
    engine.add(made[0])
    events = engine.step()
    engine.add(made[1])
    events += engine.step()
    engine.add(made[2])
    while engine.has_work():
        events += engine.step()
    for request in made:
        check_output(request, 0, [event for event in events if event.request_id == request.id])
    assert engine.scheduler.stats.scheduled_tokens - before == 96 + (5 + 6 + 7) + 3 * 7


def test_the_guard_block_is_guarded(stories_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a block table that names it."""
    engine = stories_engine(debug=True)
    guard = engine.state.kv.shape[1] - 1
    dispatch = engine._dispatch

    def wrong(plan) -> None:
        rows = [row._replace(table=np.where(row.table > 0, guard, 0).astype(np.int32)) for row in plan.rows]
        dispatch(replace(plan, rows=tuple(rows)))

    monkeypatch.setattr(engine, "_dispatch", wrong)
    engine.add(Request("a", (1, 300), SamplingParams(max_tokens=3, temperature=0)))
    with pytest.raises(AssertionError, match=f"the guard block {guard} was written to"):
        while engine.has_work():
            engine.step()
    monkeypatch.undo()
    engine.cancel("a")
    while engine.has_work():
        engine._in_flight.clear()
    assert engine._watch is not None
    engine.state = replace(engine.state, kv=engine._watch.start(engine.state.kv))


def test_the_oracle_counts_owners(stories_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a pool that forgets a release."""
    engine = stories_engine(debug=True)
    monkeypatch.setattr(BlockPool, "release", lambda self, blocks: list(blocks))
    engine.add(Request("a", (1, 300), SamplingParams(max_tokens=2, temperature=0)))
    with pytest.raises(AssertionError, match="reference counts differ"):
        while engine.has_work():
            engine.step()
