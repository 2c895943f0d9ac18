"""The model of a step's time: what it adds up, that it is fitted as SciPy does, and what it refuses."""

import numpy as np
import pytest
from scipy.optimize import nnls

from pagedjax.errors import UserError
from pagedjax.host.step_time import H200_8B, StepTime, Work, fit, from_data_sheet, from_json, nonnegative_least_squares, to_json

MADE = StepTime(per_pass=4e-3, per_token=3e-5, per_row=2e-5, per_context=4e-8, per_pair=1e-9, per_moved=2e-7)


def works(count: int) -> list[Work]:
    rng = np.random.default_rng(0)
    return [Work(*(int(n) for n in rng.integers(1, (8, 2000, 256, 10**6, 10**8, 10**5)))) for _ in range(count)]


def test_seconds_are_the_sum_of_the_parts() -> None:
    time = StepTime(per_pass=1, per_token=10, per_row=100, per_context=1000, per_pair=10_000, per_moved=100_000)
    assert time.seconds(Work(2, 3, 4, 5, 6, 7)) == 765_432


def test_a_data_sheet() -> None:
    """Weights of 8 GB at 4 TB/s take 2 ms a pass; 16 GFLOP a token at 400 TFLOP/s take 40 us; 0.1 MB at 50 GB/s 2 us."""
    sheet = {"bandwidth": 4e12, "flops": 4e14, "host_bandwidth": 5e10}
    made = from_data_sheet(weight_bytes=8e9, kv_bytes=1e5, token_flops=16e9, pair_flops=4e5, **sheet)
    assert made == StepTime(per_pass=2e-3, per_token=4e-5, per_context=2.5e-8, per_pair=1e-9, per_moved=2e-6)


def test_the_step_time_that_simulate_begins_with() -> None:
    """16 GB of weights at 80 % of 4.8 TB/s, 16 GFLOP a token at 60 % of 989 TFLOP/s, 128 KiB of keys and values a token."""
    assert H200_8B.per_pass == pytest.approx(16.06 / 3840) and H200_8B.per_token == pytest.approx(16.06 / 593_400)
    assert H200_8B.per_context == pytest.approx(131_072 / 3.84e12)


def test_fit_finds_what_made_the_samples() -> None:
    found = fit([(work, MADE.seconds(work)) for work in works(40)])
    for name, value in vars(MADE).items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6), name


def test_fit_has_no_negative_part() -> None:
    """More rows that cost less: plain least squares would say so with a negative part, and the fit says 0."""
    samples = [(work, MADE.seconds(work) - 4e-5 * work.rows) for work in works(40)]
    columns, seconds = np.asarray([work for work, _ in samples], float), np.asarray([s for _, s in samples])
    assert np.linalg.lstsq(columns, seconds, rcond=None)[0].min() < 0
    assert fit(samples).per_row == 0


def test_least_squares_are_those_of_scipy() -> None:
    at_the_bound = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        a, b = rng.normal(size=(30, 5)) * 10.0 ** rng.integers(-3, 6, 5), rng.normal(size=30)
        expected = nnls(a, b)[0]
        assert nonnegative_least_squares(a, b) == pytest.approx(expected, rel=1e-6, abs=1e-12), seed
        at_the_bound += bool((expected == 0).any())
    assert at_the_bound > 10


def test_json_and_back() -> None:
    assert from_json(to_json(MADE)) == MADE
    assert from_json('{"per_pass": 1}') == StepTime(per_pass=1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("per_pass", "a step time must be JSON; Expecting value"),
        ("[1]", r"must be an object with per_pass, .*; got \[1\]"),
        ('{"per_step": 1}', "must be an object with per_pass, per_token.*got {'per_step': 1}"),
        ('{"per_pass": -1}', "per_pass must be seconds, 0 or more; got -1"),
        ('{"per_pass": NaN}', "per_pass must be seconds, 0 or more; got nan"),
        ('{"per_row": "1"}', "per_row must be seconds, 0 or more; got '1'"),
        ('{"per_row": 0}', "must have a part above 0 seconds; got 0 for all"),
    ],
)
def test_what_is_no_step_time(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_json(text)


def test_fit_wants_enough_samples_that_took_time() -> None:
    with pytest.raises(UserError, match="fitted to at least 6 steps; got 5"):
        fit([(work, 1.0) for work in works(5)])
    with pytest.raises(UserError, match=r"the seconds of a step must be positive; got 0\.0"):
        fit([(work, 0.0) for work in works(6)])
