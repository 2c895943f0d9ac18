"""Beam search through the scheduler: hypotheses are those of a search that shares nothing, whatever happens to its blocks."""

from dataclasses import replace

import pytest
from fake_device import candidates, drive, expected, make_request, make_scheduler, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.errors import UserError
from pagedjax.host import beam
from pagedjax.host.request import Request, Service
from pagedjax.host.tables import BlockTables


def unshared(request: Request) -> list[beam.Hypothesis]:
    """The same search over whole texts."""
    state, texts, done = beam.start(request, request.params.max_tokens or 0), {0: request.prompt}, False
    while not done:
        state, children, done = beam.advance(state, {slot: candidates(text) for slot, text in texts.items()})
        texts = {child.slot: (*texts[child.parent], child.token) for child in children}
    return beam.results(state)


def check_beams(events, request: Request) -> None:
    for index, best in enumerate(unshared(request)):
        (event,) = events[request.id, index]
        assert (event.tokens, event.finish, event.stop_id) == (best.tokens, best.finish, best.stop_id)
        assert event.usage.generated == len(best.tokens) and event.usage.prompt == len(request.prompt)
        if request.params.logprobs is not None:
            assert event.logprobs == best.logprobs


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize(("prompt", "width"), [(1, 2), (7, 3), (8, 4), (13, 1)])
def test_hypotheses_are_those_of_an_unshared_search(prompt: int, width: int, delay: int) -> None:
    request = make_request("a", [*range(prompt)], 12, beam_width=width, n=width, stop_ids=(5, 50), logprobs=2)
    scheduler = make_scheduler(100)
    check_beams(drive(scheduler, {0: [request]}, delay), request)
    assert scheduler.num_waiting == 0 and not scheduler.has_work() and len(scheduler._runs.lanes) == 4


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 14), st.integers(0, 4), st.integers(0, 6)), min_size=1, max_size=5),
    st.integers(0, 30),
    st.sampled_from([2, 4, 8]),
    st.booleans(),
    st.integers(0, 1),
    st.sampled_from([(None,), (None, 9)]),
)
def test_beams_among_others(requests, extra: int, block_size: int, caching: bool, delay: int, windows) -> None:
    """Beams and samples together in a pool that is too small for them all."""
    made, arrivals = [], {}
    for i, (prompt, max_tokens, width, at) in enumerate(requests):
        params = {"beam_width": width, "n": width} if width else {}
        made.append(make_request(f"r{i}", [*range(prompt - 1), 40 + i], max_tokens, stop_ids=(7,), **params))
        arrivals.setdefault(at, []).append(made[-1])
    blocks = (max(-(-33 // block_size) * 4, 64 // block_size) + 1 + extra) * len(windows)
    scheduler = make_scheduler(
        blocks, block_size=block_size, prefix_caching=caching, max_model_len=34, windows=windows, host_blocks=20, preemption="swap"
    )
    events = drive(scheduler, arrivals, delay)
    for request in made:
        if request.params.beam_width:
            check_beams(events, request)
        else:
            assert tokens_of(events[request.id, 0]) == expected(request, 34)
    assert len(scheduler._runs.lanes) == 4


def test_beams_survive_preemption() -> None:
    """The one above is preempted by an older request that grows."""
    old = make_request("old", [*range(4)], 40)
    search = make_request("beams", [*range(20, 24)], 16, beam_width=3, n=3)
    scheduler = make_scheduler(16, max_model_len=48, prefix_caching=False)
    events = drive(scheduler, {0: [old], 3: [search]}, 1)
    check_beams(events, search)
    assert tokens_of(events["old", 0]) == expected(old, 48)
    assert scheduler.stats.preemptions > 0 and events["beams", 0][0].usage.recomputed > 0


def test_copies_for_rows_that_are_not_made_are_not_made() -> None:
    """Two beams copy the block that they part in, the third finds none, and all are preempted: what was to be copied to may be
    another's by then."""
    old, search = make_request("old", [*range(4)], 40), make_request("beams", [*range(20, 24)], 16, beam_width=3, n=3)
    scheduler = make_scheduler(17, max_model_len=52, prefix_caching=False)
    events = drive(scheduler, {0: [old], 3: [search]}, 1)  # looks at the copies of each plan
    check_beams(events, search)
    assert scheduler.stats.preemptions > 0


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("prompt", "width"), [(1, 2), (6, 3), (8, 4), (11, 5)])
def test_beams_hold_each_text_once(prompt: int, width: int, caching: bool) -> None:
    """Whenever all beams have a row, the blocks that are held are exactly one for each distinct text up to a block's end; what that
    saves follows from it (test_beam.py has the closed forms)."""
    scheduler, saved = make_scheduler(200, num_lanes=8, prefix_caching=caching), []

    def each_step(_, plan) -> None:
        beams = scheduler.running
        if plan is not None and len(plan.rows) == len(beams) == width:
            texts = {tuple(s.tokens[: min(end, s.num_scheduled)]) for s in beams for end in range(4, s.num_scheduled + 4, 4)}
            held = scheduler.pool.capacity - scheduler.pool.num_free
            assert held == len(texts)
            saved.append(1 - held / sum(len(s.held) for s in beams))

    drive(scheduler, {0: [make_request("a", [*range(prompt)], 16, beam_width=width)]}, 1, each_step)
    assert len(saved) > 8 and max(saved) > 0.3


def test_a_fork_without_its_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    take = BlockTables.take_moves
    monkeypatch.setattr(BlockTables, "take_moves", lambda self: ((), *take(self)[1:]))
    with pytest.raises((AssertionError, KeyError)):
        drive(make_scheduler(100), {0: [make_request("a", [*range(6)], 12, beam_width=4)]}, 1)


def test_a_cancelled_search_gives_all_back() -> None:
    scheduler = make_scheduler(100)
    request = make_request("a", [*range(6)], 30, beam_width=4, n=2)
    ended = []

    def each_step(step: int, _) -> None:
        if step == 6:
            ended.extend(scheduler.cancel("a"))

    drive(scheduler, {0: [request]}, 1, each_step)
    assert [(e.index, e.finish) for e in ended] == [(0, "cancelled"), (1, "cancelled")]
    assert len(scheduler._runs.lanes) == 4


def test_all_beams_are_on_one_account() -> None:
    """A tenant pays for the prompt once and for each beam's tokens, and nothing of the search is left when it is over."""
    scheduler = make_scheduler(100)
    request = replace(make_request("a", [*range(6)], 10, beam_width=4), service=Service(tenant="t"))
    drive(scheduler, {0: [request]}, 1)
    tenants = scheduler.entrance.tenants
    assert tenants.counter("interactive", "t") == 6 * 1.0 + scheduler.stats.generated_tokens * 2.0
    assert scheduler.stats.generated_tokens > 20 and not tenants._accounts
    assert [d.what for d in scheduler.trace.of("a")][-1] == "finished"


def test_a_deadline_ends_a_search_whichever_beams_live() -> None:
    now = [0.0]
    scheduler = make_scheduler(100, clock=lambda: now[0])
    request = replace(make_request("a", [*range(6)], 40, beam_width=4, n=2), service=Service(deadline=2.0))

    def tick(*_: object) -> None:
        now[0] += 0.1

    events = drive(scheduler, {0: [request]}, 1, tick)
    assert [events["a", i][-1].finish for i in range(2)] == ["deadline"] * 2
    assert now[0] < 3 and not scheduler._due and len(scheduler._runs.lanes) == 4


@pytest.mark.parametrize(
    ("width", "max_tokens", "message"),
    [
        (5, 10, "request a: 5 beams need as many lanes; there are 4"),
        (4, 50, "request a: prompt and output of 4 beams need 56 blocks of 4 tokens; the pool has 50"),
    ],
)
def test_what_cannot_fit_is_refused(width: int, max_tokens: int, message: str) -> None:
    scheduler = make_scheduler(51)
    with pytest.raises(UserError, match=message):
        scheduler.add(make_request("a", [*range(6)], max_tokens, beam_width=width))
    assert not scheduler.has_work() and len(scheduler._runs.lanes) == 4
