"""bench/simulate.py on a small engine: what it measures, and that the steps it foretells are those that were taken."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench.rate import at_rate
from bench.simulate import compare, requests_of, run, traced_jobs
from pagedjax.engine import Engine
from pagedjax.host.step_time import StepTime, fit
from pagedjax.traces import Traced

TRACE = [Traced(10.0 * i, 40 + 30 * (i % 7), 10 + 20 * (i % 5)) for i in range(12)]


class Clock:
    """In place of the module `time`: it goes on while one sleeps, and a second with each step that an engine takes."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.now, step = 0.0, engine.step
        monkeypatch.setattr(engine, "step", lambda: (self.sleep(1.0), step())[1])
        monkeypatch.setattr("bench.simulate.time", self)

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_steps_are_measured_and_foretold(stories_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = stories_engine()
    Clock(engine, monkeypatch)
    jobs = traced_jobs(TRACE, 1, engine.model.vocab_size, 0.3, at_once=False)
    samples, lives, seconds = run(engine, requests_of(jobs, "measured"))
    assert "schedule" not in vars(engine.scheduler) and "commit" not in vars(engine.scheduler), "it is watched no longer"
    assert 0 < sum(sample.seconds for sample in samples) <= seconds
    assert all(sample.seconds > 0 for sample in samples)
    assert [life.arrival for life in lives] == pytest.approx([r.at for r in TRACE])
    assert all(life.arrival < (life.first or 0) <= (life.last or 0) <= seconds for life in lives)
    assert [life.usage and life.usage.generated for life in lives] == [len(range(new)) for _, (_, new) in jobs]

    step_time = fit((sample.work, sample.seconds) for sample in samples)
    foretold = sum(step_time.seconds(sample.work) for sample in samples)
    measured = sum(sample.seconds for sample in samples)
    assert foretold == pytest.approx(measured), "over the steps it was fitted to"

    at_once = requests_of(traced_jobs(TRACE, 2, engine.model.vocab_size, 0.3, at_once=True), "compared")
    said = compare(engine, step_time, at_once)
    assert said["same_steps"] and said["steps"]["engine"] == said["steps"]["simulator"] > len(TRACE)
    assert said["requests"] == len(TRACE)


def test_other_steps_are_noticed(stories_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the simulator is given another token budget than the engine has."""
    engine = stories_engine()
    at_once = requests_of(traced_jobs(TRACE, 3, engine.model.vocab_size, 0.3, at_once=True), "control")
    schedule = replace(engine.config.schedule, max_num_batched_tokens=20)
    monkeypatch.setattr(engine, "config", replace(engine.config, schedule=schedule))
    assert not compare(engine, StepTime(per_pass=1), at_once)["same_steps"]


def test_a_higher_rate_takes_longer(stories_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests at once against one after the other: the mean latency over tokens of output, and how many run.

    Each has 40 tokens, the first with its prompt, in steps of a second: one that is alone takes 40 of them, and half of 8 wait for
    the other half.
    """
    engine = stories_engine()
    Clock(engine, monkeypatch)
    trace = [Traced(0.0, 30, 40) for _ in range(8)]
    slow, fast = at_rate(engine, trace, 1e-3, 1.0), at_rate(engine, trace, 1e6, 1.0)
    assert slow["running"] == 1 and 3 < fast["running"] <= 4
    assert 1 <= slow["normalized"] < 1.1 and 1.5 < fast["normalized"] < 1.7
    assert fast["tokens_per_second"] > 3 * slow["tokens_per_second"]
