"""Refusals, with their numbers and their retry estimates; predictions against a small simulation."""

import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queued import Queued, queued

from pagedjax.errors import QueueFull, UserError
from pagedjax.host.admission import (
    IN_FLIGHT,
    MARGIN,
    AdmissionLimits,
    Left,
    Load,
    Rates,
    admit,
    first_token,
    missed,
    steps_to_start,
)
from pagedjax.host.policy import Waiting
from pagedjax.host.waiting import Ahead, WaitingQueue

BUDGET, LANES = 64, 8


def step_seconds(tokens: int) -> float:
    return 0.002 + 0.0001 * tokens


def measured(*, steps: int = 50, decode: int = 4) -> Rates:
    rates = Rates(BUDGET)
    for i in range(steps):
        prefill = i % 3 * 10
        rates.observe(prefill, decode, step_seconds(prefill + decode))
    return rates


NOTHING = Load(waiting=0, tokens=0, ahead=Ahead(), lanes=LANES)


def lefts(*outputs: int) -> tuple[Left, ...]:
    return tuple(map(Left, outputs))


def latency(rates: Rates) -> float:
    """Of what was dispatched before a request came."""
    assert rates.step_seconds is not None
    return IN_FLIGHT * rates.step_seconds


# --- rates --------------------------------------------------------------------------------------------------------------


def test_rates_are_those_of_the_steps() -> None:
    rates = measured()
    assert rates.prefill_rate == pytest.approx((BUDGET - 4) / step_seconds(BUDGET))  # though no step was full
    assert rates.step_seconds == pytest.approx(step_seconds(14), rel=0.02)
    assert rates.finish(600, 10) == pytest.approx(600 / rates.prefill_rate + 10 * rates.step_seconds)
    many = measured()
    many.observe(0, 4 * 16, 16 * step_seconds(4), steps=16)
    assert many.seconds_of(30) == pytest.approx(step_seconds(30))


def test_rates_follow_the_machine() -> None:
    rates = measured()
    for i in range(1000):
        rates.observe(i % 50, 0, 3 * step_seconds(i % 50))
    assert rates.seconds_of(40) == pytest.approx(3 * step_seconds(40), rel=1e-3)


def test_little_is_known_at_first_and_nothing_of_prompts_without_one() -> None:
    rates = Rates(BUDGET)
    for _ in range(7):
        rates.observe(10, 1, 0.01)
        rates.observe(0, 0, 0.01)  # says nothing
        rates.observe(10, 0, 0.0)
    assert not rates.known
    rates.observe(10, 1, 0.01)
    assert rates.known and rates.prefill_rate == pytest.approx(63 / 0.01)  # one size of step: more tokens may cost nothing
    only_decode = Rates(BUDGET)
    for _ in range(100):
        only_decode.observe(0, 4, 0.01)
    unknown = (
        only_decode.prefill_rate,
        only_decode.step_seconds,
        only_decode.finish(10, 10),
        first_token(10, NOTHING, only_decode),
    )
    assert unknown == (None, None, None, None)


@given(st.lists(st.tuples(st.integers(0, 64), st.integers(0, 8), st.floats(1e-4, 10)), min_size=30, max_size=60))
def test_no_measurement_makes_a_rate_that_is_none(steps: list[tuple[int, int, float]]) -> None:
    rates = Rates(BUDGET)
    for prefill, decode, seconds in steps:
        rates.observe(prefill, decode, seconds)
    if rates.known:
        assert 0 < rates.seconds_of(1) <= rates.seconds_of(BUDGET)
        assert rates.prefill_rate is not None and rates.prefill_rate > 0


# --- refusals -----------------------------------------------------------------------------------------------------------


def refused(load: Load, limits: AdmissionLimits, rates: Rates, *, sequences: int = 1, prompt: int = 30) -> QueueFull:
    with pytest.raises(QueueFull) as caught:
        admit("r", sequences, prompt, load, limits, rates)
    return caught.value


def test_the_queue_is_bounded_in_sequences() -> None:
    limits = AdmissionLimits(max_queued=10)
    load = Load(waiting=9, tokens=900, ahead=Ahead(9, 900, 90), lanes=LANES, running=lefts(5, 20, 30, 40, 50, 60, 70, 80))
    admit("r", 1, 30, load, limits, measured())
    error = refused(load, limits, measured(), sequences=2)
    assert str(error) == "request r: the queue may hold 10 sequences; 9 wait, 2 more came"
    step, late = measured().step_seconds, latency(measured())
    assert error.retry_after == pytest.approx(MARGIN * 5 * step + late)  # until the first lane is free
    worse = refused(load, limits, measured(), sequences=4)  # three have to enter, of 1 + 30 / 2 steps each: at 5, at 20, at 21
    assert worse.retry_after == pytest.approx(MARGIN * 21 * step + late)
    assert refused(load, limits, Rates(BUDGET), sequences=2).retry_after is None


def test_the_queue_is_bounded_in_tokens() -> None:
    limits = AdmissionLimits(max_queued_tokens=1000)
    load = NOTHING._replace(waiting=9, tokens=900, ahead=Ahead(9, 900, 90))
    admit("r", 1, 100, load, limits, measured())
    error = refused(load, limits, measured(), prompt=101)
    assert str(error) == "request r: the queue may hold 1000 tokens; 900 wait, 101 more came"
    assert error.retry_after == pytest.approx(1 / measured().prefill_rate)
    assert refused(load, limits, measured(), prompt=5000).retry_after == pytest.approx(900 / measured().prefill_rate)
    admit("r", 1, 5000, NOTHING, limits, measured())  # alone it may wait
    assert refused(load, limits, Rates(BUDGET), prompt=101).retry_after is None


def test_the_time_to_the_first_token_is_bounded_once_it_is_known() -> None:
    rates, limits = measured(), AdmissionLimits(max_first_token=0.1)
    rate = rates.prefill_rate
    load = NOTHING._replace(waiting=9, tokens=2000, ahead=Ahead(9, 2000, 90))
    admit("r", 1, 30, load, limits, Rates(BUDGET))
    admit("r", 1, 30, load._replace(ahead=Ahead(3, 200, 90)), limits, rates)
    seconds = MARGIN * 2000 / rate + 30 / rate + latency(rates)
    error = refused(load, limits, rates)
    assert str(error) == (
        f"request r: the first token may take 0.1 s; {seconds:.3g} s are predicted, 2000 tokens wait before its own 30"
    )
    assert error.retry_after == pytest.approx(seconds - 0.1)
    admit("r", 1, 10**6, NOTHING, limits, rates)  # it would do no better later
    behind = refused(load, limits, rates, prompt=10**6)
    assert behind.retry_after == pytest.approx(MARGIN * 2000 / rate)
    barred = refused(NOTHING._replace(barred=40.0), limits, rates)  # its tenant may not start before that
    assert barred.retry_after == pytest.approx(40 + 30 / rate + latency(rates) - 0.1)


def test_queue_full_keeps_its_estimate() -> None:
    copy = pickle.loads(pickle.dumps(QueueFull("full", 2.5)))
    assert (str(copy), copy.retry_after) == ("full", 2.5)
    assert QueueFull("full").retry_after is None


def test_steps_until_there_is_a_lane() -> None:
    load = Load(0, 0, Ahead(), lanes=3, running=lefts(30, 10))
    assert steps_to_start(load) == 0
    assert steps_to_start(load._replace(ahead=Ahead(1, 5, 50))) == 10
    assert steps_to_start(load._replace(ahead=Ahead(2, 5, 50))) == 26  # each of them has 1 + 25
    assert steps_to_start(load._replace(ahead=Ahead(3, 5, 6))) == 9  # one after the other in the free lane
    assert steps_to_start(load._replace(ahead=Ahead(3000, 5, 30_000))) == pytest.approx(3000 * 10 / 3, rel=0.05)


def test_steps_until_there_are_blocks() -> None:
    """Lanes are free; 6 blocks are, and 10 and 4 more when those that run end."""
    load = Load(0, 0, Ahead(), lanes=9, running=(Left(30, 10), Left(12, 4)), free=6)
    assert [steps_to_start(load._replace(need=need)) for need in (5, 6, 7, 10, 11, 20)] == [0, 0, 12, 12, 30, 30]
    behind = load._replace(ahead=Ahead(2, 8, 40), need_ahead=12)  # 6 each, for 21 steps: at 0, and at 21 when the first has ended
    assert steps_to_start(behind._replace(need=5)) == 30


@pytest.mark.parametrize("name", ["max_queued", "max_queued_tokens", "max_first_token"])
def test_limits_are_checked(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} must be .*; got 0"):
        AdmissionLimits(**{name: 0})


# --- deadlines ----------------------------------------------------------------------------------------------------------


def test_a_deadline_that_cannot_be_met_is_found() -> None:
    waiting = Waiting(0, 10.0, prompt_left=100, output_left=20, deadline=15.0, seconds=2.0)
    assert missed(waiting, 13.0) is None
    assert missed(waiting, 13.5) == (
        "the deadline, 5 s after arrival, cannot be met: 1.5 s are left, and 100 tokens of prompt and 20 of output take 2 s"
    )
    assert missed(waiting, 16.0) == "the deadline, 5 s after arrival, was over 1 s ago"
    assert missed(waiting._replace(seconds=0.0), 14.9) is None  # nothing is predicted
    assert missed(waiting._replace(deadline=None), 1e9) is None


# --- predictions against what happens -----------------------------------------------------------------------------------


def overload(limits: AdmissionLimits, *, per_step: float, steps: int = 3000) -> tuple[list[float], list[float], int]:
    """Requests of 60 + 20 tokens at random: of each that was taken and started, predicted and real seconds to its first token; and
    the longest queue."""
    rng, rates = random.Random(1), Rates(BUDGET)
    queue: WaitingQueue[Queued] = WaitingQueue()
    running: list[Queued] = []
    predicted: dict[int, float | None] = {}
    real: dict[int, float] = {}
    now, longest = 0.0, 0
    for order in range(steps):
        if rng.random() < per_step:
            sequence = queued(order, arrival=now, prompt=60, max_tokens=20)
            left = lefts(*(queue.view(s).output_left for s in running))
            load = Load(len(queue), queue.tokens("interactive"), queue.ahead(queue.view(sequence)), LANES, left)
            try:
                admit("r", 1, 60, load, limits, rates)
                predicted[order] = first_token(60, load, rates)
                queue.push(sequence, now)
            except QueueFull as error:
                assert error.retry_after is None or error.retry_after > 0
        longest = max(longest, len(queue))
        decode = sum(s.num_scheduled >= s.prompt_len for s in running)
        budget, prefill = BUDGET - decode, 0
        for sequence in running:
            count = min(budget, max(0, sequence.prompt_len - sequence.num_scheduled))
            sequence.num_scheduled += count or (sequence.num_scheduled >= sequence.prompt_len)
            budget, prefill = budget - count, prefill + count
        while budget and len(running) < LANES and (head := queue.head("interactive", now, {})):
            queue.remove(head)
            running.append(head)
            head.num_scheduled = min(budget, head.prompt_len)
            budget, prefill = budget - head.num_scheduled, prefill + head.num_scheduled
        seconds = step_seconds(prefill + decode)
        now += seconds
        rates.observe(prefill, decode, seconds)
        for sequence in [s for s in running if s.num_scheduled >= s.prompt_len]:
            real.setdefault(sequence.order, now - sequence.arrival)
            sequence.tokens.append(1)
            if len(sequence.tokens) == sequence.max_len:
                running.remove(sequence)
    known = [(value, real[order]) for order, value in predicted.items() if value is not None and order in real]
    return [value for value, _ in known], [value for _, value in known], longest


def test_above_capacity_what_is_taken_is_in_time_and_without_bounds_next_to_nothing() -> None:
    slo = 0.15  # seconds; about 0.4 requests a step are served
    _, bounded, longest = overload(AdmissionLimits(max_first_token=slo), per_step=0.8)
    _, unbounded, all_of_them = overload(AdmissionLimits(max_queued=None), per_step=0.8)
    assert len(bounded) > 0.9 * len(unbounded)  # nothing is lost by refusing
    assert sum(value <= slo for value in bounded) >= 0.9 * len(bounded)
    assert sum(value <= slo for value in unbounded) <= 0.1 * len(unbounded)
    assert longest < 30 < 500 < all_of_them


def test_the_first_token_comes_about_when_it_is_predicted() -> None:
    predicted, real, _ = overload(AdmissionLimits(max_queued=20), per_step=0.6)
    errors = sorted(abs(p - r) / r for p, r in zip(predicted, real, strict=True))
    assert errors[len(errors) // 2] < 0.25
