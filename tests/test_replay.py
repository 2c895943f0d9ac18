"""The replays of bench/replay.py on small parts of their traces."""

import json

import pytest

from bench.replay import hit_rate, main, poisson, saturated, sharegpt_like
from bench.traces import MOONCAKE, SHAREGPT_MEANS, ideal_hit_rate
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


def test_paged_blocks_hold_tokens() -> None:
    """At least 95 % of what is held with blocks of 16, as figure 2 of the paper says; blocks of 256 do not."""
    trace = sharegpt_like(120)
    said = saturated("paged", trace)
    assert said["token_share_of_held"] > 0.95 and said["worst_waste"] <= 15
    assert said["tokens"] + said["reserved"] + said["internal"] + said["external"] + said["free"] == pytest.approx(1)
    assert 25 < said["running"] < 45
    assert saturated("paged", trace, block_size=256)["token_share_of_held"] < 0.9


def test_poisson_arrivals_come_at_their_rate() -> None:
    made = list(poisson([Traced(0, 1, 1)] * 4000, 5.0))
    assert made[-1].at == pytest.approx(800, rel=0.05)
    assert made[:9] == list(poisson([Traced(0, 1, 1)] * 9, 5.0)) != list(poisson([Traced(0, 1, 1)] * 9, 5.0, seed=1))


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["rate", "--limit", "20", "--modes", "paged", "--rates", "0.1", "100"])
    head, slow, fast = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert head["requests"] <= 20
    assert (slow["mode"], slow["rate"], fast["rate"]) == ("paged", 0.1, 100)
    assert slow["running"] < fast["running"] and slow["normalized"]["mean"] < fast["normalized"]["mean"]
