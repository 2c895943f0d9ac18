"""The replays of bench/replay.py on small parts of their traces."""

import json

import pytest

from bench.replay import (
    MODES,
    PAPER,
    at_rate,
    hit_curve,
    hit_rate,
    main,
    poisson,
    preempting,
    rate_at,
    saturated,
    setting_of,
    sharegpt_like,
    with_deadlines,
)
from bench.traces import MOONCAKE, SHAREGPT_MEANS, ideal_hit_rate
from pagedjax.simulate import Slots
from pagedjax.traces import Traced, read_trace


def test_without_a_bound_the_cache_finds_all_there_is() -> None:
    """And less where the pool is small, or does not keep anything."""
    trace = read_trace(MOONCAKE["conversation"])[:800]
    ideal = ideal_hit_rate(trace)
    assert ideal > 0.19
    assert hit_rate(trace, None, one_by_one=True)["hit_rate"] == ideal
    small = hit_rate(trace, 1000, one_by_one=True)["hit_rate"]
    assert 0.01 < small < 0.9 * ideal
    assert hit_rate(trace, None, one_by_one=True, prefix_caching=False)["hit_rate"] == 0


def test_requests_that_run_at_once_find_as_much() -> None:
    trace = read_trace(MOONCAKE["conversation"])[:200]
    said = hit_rate(trace, None)
    assert said["hit_rate"] == ideal_hit_rate(trace) and said["refused"] == said["preemptions"] == 0


def test_the_scaled_trace_has_the_means_of_sharegpt() -> None:
    trace = sharegpt_like()
    assert len(trace) > 17_000
    prompts, outputs = (sum(lengths) / len(trace) for lengths in zip(*((r.prompt, r.output) for r in trace), strict=True))
    assert (prompts, outputs) == pytest.approx(SHAREGPT_MEANS, rel=0.02)
    assert len(sharegpt_like(100)) <= 100


def test_live_tokens_and_batch_by_mode() -> None:
    """In the paper's order, and paged and max within 6 points of it, on a small part of the scaled trace."""
    setting = setting_of("scaled", 120)
    said = {mode: saturated(mode, setting) for mode in MODES}
    for line in said.values():
        assert sum(line[name] for name in Slots._fields) == pytest.approx(1)
    tokens, batch = ([said[mode][name] for mode in MODES] for name in ("tokens", "running"))
    assert tokens == sorted(tokens) and batch == sorted(batch)
    assert abs(tokens[0] - PAPER["max"]) < 0.06 and abs(tokens[-1] - PAPER["paged"]) < 0.06
    assert said["paged"]["token_share_of_held"] > 0.95 and said["paged"]["worst_waste"] <= 15
    assert said["oracle"]["internal"] == 0 and batch[0] == 7  # of 2048 slots each


def test_large_blocks_hold_fewer_tokens() -> None:
    assert saturated("paged", setting_of("scaled", 120), block=256)["token_share_of_held"] < 0.9


def test_traces_as_they_are() -> None:
    """The longest sequence of the whole trace fits, in a pool of the same size for each mode."""
    setting = setting_of("code", 20)
    assert (len(setting.trace), setting.longest, setting.slots) == (20, 8192, 60_100)
    assert saturated("max", setting)["running"] <= 7


def test_the_rate_at_a_latency() -> None:
    setting = setting_of("scaled", 40)
    said = rate_at("paged", setting, 0.03, low=0.5, high=40.0)
    assert said["normalized"] <= 0.03 < at_rate("paged", setting, 1.05 * said["rate"])["normalized"]


def test_by_policy() -> None:
    """A pool that is too small, with a queue: the longest prefix first finds more than first come."""
    trace = read_trace(MOONCAKE["synthetic"])[:400]
    head, first, longest = hit_curve("synthetic", trace, [1000], ["first_come", "longest_prefix"], speed=0.5)
    assert head["unbounded"] == head["ideal"]
    assert (first["policy"], longest["policy"]) == ("first_come", "longest_prefix")
    assert 0 < first["hit_rate"] < longest["hit_rate"] < head["ideal"]


def test_preempted_sequences_are_swapped_where_that_is_faster() -> None:
    """By PCIe, moving a sequence is faster than computing it again; by a bus of a hundredth of its speed it is not."""
    setting = setting_of("scaled", 150)
    said = {(how, bus): preempting(how, setting, bus) for how in ("recompute", "swap", "auto") for bus in (0.01, 1.0)}
    assert all(line["preemptions"] > 0 for line in said.values())
    assert said["recompute", 1.0]["swaps"] == said["auto", 0.01]["swaps"] == 0
    assert said["swap", 1.0]["swaps"] == said["swap", 1.0]["preemptions"] and said["swap", 1.0]["recomputed"] == 0
    assert said["auto", 1.0]["seconds"] < said["recompute", 1.0]["seconds"]
    assert said["auto", 0.01]["seconds"] < said["swap", 0.01]["seconds"]


def test_deadlines_that_the_scheduler_knows() -> None:
    """In a flood more are done in time where it knows them: what is late is not begun, and does not hold up the others."""
    setting = setting_of("scaled", 300)
    blind = with_deadlines(setting, 12.0, "first_come", told=False)
    seen = with_deadlines(setting, 12.0, "deadline")
    assert blind["dropped"] == 0 < seen["dropped"] and blind["tokens_in_vain"] > seen["tokens_in_vain"]
    assert 0 < blind["in_time"] < seen["in_time"] < 1
    assert with_deadlines(setting, 0.2, "deadline")["in_time"] == 1


def test_poisson_arrivals_come_at_their_rate() -> None:
    made = list(poisson([Traced(0, 1, 1)] * 4000, 5.0))
    assert made[-1].at == pytest.approx(800, rel=0.05)
    assert made[:9] == list(poisson([Traced(0, 1, 1)] * 9, 5.0)) != list(poisson([Traced(0, 1, 1)] * 9, 5.0, seed=1))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rate", "--limit", "20", "--modes", "paged", "--rates", "0.1", "100"])
    head, slow, fast = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert head["requests"] <= 20
    assert (slow["mode"], slow["rate"], fast["rate"]) == ("paged", 0.1, 100)
    assert slow["running"] < fast["running"] and slow["normalized"] < fast["normalized"]
