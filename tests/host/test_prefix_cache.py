"""Prompts that begin alike are computed once: counts in closed form, and a model-free device that reads only what was written."""

from dataclasses import replace

import pytest
from fake_device import drive, expected, make_request, make_scheduler, tokens_of

from pagedjax.host.block_pool import BlockPool
from pagedjax.host.prefix_cache import Content, PrefixCache, key_of
from pagedjax.host.request import Request, Service

P = 4


def check_tokens(events, requests: list[Request]) -> None:
    for request in requests:
        for index in range(request.params.n):
            assert tokens_of(events[request.id, index]) == expected(request, 64), request.id


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize(("prefix", "suffix"), [(8, 1), (8, 3), (9, 1), (11, 5), (3, 2), (20, 4), (23, 9)])
def test_a_shared_prefix_is_computed_once(prefix: int, suffix: int, at_once: bool, delay: int) -> None:
    """(p + s) + (N - 1)(s + p mod P) tokens of prompt, also where the leader takes several steps and all arrive together."""
    count = 6
    made = [make_request(f"r{i}", [*range(prefix), *[50 + i] * suffix], 3) for i in range(count)]
    scheduler = make_scheduler(200, num_lanes=8, token_budget=12)
    arrivals = {0: made} if at_once else {30 * i: [request] for i, request in enumerate(made)}
    prompts, shared = 0, prefix // P * P

    def each_step(_, plan) -> None:
        nonlocal prompts
        for row in plan.rows if plan else ():
            prompts += max(0, min(row.start + row.count, prefix + suffix) - row.start)
        if at_once and len(scheduler.running) == count:
            held = scheduler.pool.capacity - scheduler.pool.num_free
            assert held == shared // P + sum(len(s.held) - shared // P for s in scheduler.running)

    events = drive(scheduler, arrivals, delay, each_step)
    check_tokens(events, made)
    assert prompts == (prefix + suffix) + (count - 1) * (suffix + prefix % P)
    assert [events[f"r{i}", 0][-1].usage.cached for i in range(count)] == [0] + [shared] * (count - 1)
    assert scheduler.stats.cached_tokens == (count - 1) * shared


@pytest.mark.parametrize(("caching", "batch", "at_once"), [(True, 0, 11), (True, 1, 11), (False, 0, 4)])
def test_as_many_run_at_once_as_fit_with_what_they_share(caching: bool, batch: int, at_once: int) -> None:
    """60 blocks: 10 of the prefix, and 4 more for each. A shared block counts once, also against the share that interactive work
    has while batch work waits."""
    made = [make_request(f"r{i}", [*range(40), 50 + i], 12) for i in range(11)]
    wide = [replace(make_request(f"b{i}", [70 + i] * 50, 12), service=Service(pool="batch")) for i in range(batch)]
    scheduler = make_scheduler(61, num_lanes=16, token_budget=64, prefix_caching=caching)
    most = 0

    def each_step(_, plan) -> None:
        nonlocal most
        most = max(most, sum(s.request.service.pool == "interactive" for s in scheduler.running))

    check_tokens(drive(scheduler, {0: made[:1], 2: made[1:] + wide}, 1, each_step), made + wide)
    assert most == at_once


def test_without_the_cache_all_is_computed() -> None:
    """The control."""
    made = [make_request(f"r{i}", [*range(9)], 2) for i in range(3)]
    scheduler = make_scheduler(prefix_caching=False)
    events = drive(scheduler, {0: made}, 1)
    check_tokens(events, made)
    assert scheduler.stats.cached_tokens == 0 and scheduler.stats.scheduled_tokens == 3 * (9 + 1)


def test_the_last_token_is_computed_even_if_all_are_known() -> None:
    for length, cached in ((8, 4), (9, 8)):
        made = [make_request(name, [*range(length)], 2) for name in "ab"]
        events = drive(make_scheduler(), {0: made[:1], 20: made[1:]}, 1)
        check_tokens(events, made)
        assert events["b", 0][-1].usage.cached == cached


def test_outputs_are_found_by_the_next_turn_of_a_chat() -> None:
    first = make_request("a", [1, 2, 3], 12)
    answer = expected(first, 64)
    second = make_request("b", [1, 2, 3, *answer, 7, 8], 3)
    events = drive(make_scheduler(), {0: [first], 40: [second]}, 1)
    check_tokens(events, [first, second])
    # 14 positions of the first turn hold tokens: its last output was never an input.
    assert events["b", 0][-1].usage.cached == 14 // P * P


def test_another_salt_and_prompt_logprobs_share_nothing() -> None:
    made = [make_request("a", [*range(9)], 2), make_request("c", [*range(9)], 2, prompt_logprobs=0)]
    salted = Request("b", made[0].prompt, made[0].params, salt="tenant")
    for other in (salted, made[1]):
        scheduler = make_scheduler()
        scheduler.add(made[0])
        while scheduler.num_waiting:
            scheduler.schedule()
        scheduler.add(other)
        plan = scheduler.schedule()
        assert plan is not None and plan.rows[-1].start == 0


def test_samples_of_a_request_share_its_prompt() -> None:
    request = make_request("a", [*range(13)], 3, n=4)
    scheduler = make_scheduler()
    events = drive(scheduler, {0: [request]}, 1)
    check_tokens(events, [request])
    assert scheduler.stats.cached_tokens == 3 * 12


def test_a_preempted_sequence_finds_what_is_left_of_it() -> None:
    made = [make_request(f"r{i}", [60 + i] * 9, 20) for i in range(3)]
    scheduler = make_scheduler(18, token_budget=32)
    events = drive(scheduler, {0: made}, 1)
    check_tokens(events, made)
    assert scheduler.stats.preemptions > 0
    assert scheduler.stats.cached_tokens > 0
    assert all(own[-1].usage.cached == 0 for own in events.values()), "cached counts the first time alone"


def test_the_block_unused_for_longest_goes_first_and_the_end_of_a_chain_before_its_beginning() -> None:
    scheduler = make_scheduler(12)  # 11 blocks
    old, new = make_request("old", [*range(17)], 1), make_request("new", [*range(30, 47)], 1)
    drive(scheduler, {0: [old], 20: [new]}, 0)  # 4 whole blocks each, kept
    assert scheduler.tables.cache is not None and len(scheduler.tables.cache) == 8
    drive(scheduler, {0: [make_request("third", [*range(60, 80)], 1)]}, 0)  # 5 blocks, of which 2 must be taken
    assert len(scheduler.tables.cache.find("0:", old.prompt)) == 2
    assert len(scheduler.tables.cache.find("0:", new.prompt)) == 4


def test_tokens_decide_where_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagedjax.host.prefix_cache.key_of", lambda parent, tokens: b"same")
    pool = BlockPool(4)
    cache = PrefixCache(pool, 2)
    (block,) = pool.allocate(1)
    ((key, content),) = cache.keys("", [1, 2])
    cache.publish(key, content, block)
    assert cache.find("", [1, 2]) == [block]
    assert cache.find("", [1, 3]) == []


def test_check_sees_a_wrong_key() -> None:
    pool = BlockPool(4)
    cache = PrefixCache(pool, 2)
    (block,) = pool.allocate(1)
    content = Content(b"", b"\\0" * 8)
    cache.publish(key_of(b"", b"other"), content, block)
    with pytest.raises(AssertionError, match="not that of its content"):
        cache.check()
