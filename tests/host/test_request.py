"""SamplingParams takes what it says and refuses the rest in one sentence."""

from typing import Any

import numpy as np
import pytest

from pagedjax.errors import UserError
from pagedjax.host.request import SamplingParams

INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "best_of")


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [2.5, 2.0, True, "2", [2]])
def test_integers(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"^{name} must be an integer; got"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("name", INTEGERS)
def test_any_kind_of_integer_will_do(name: str) -> None:
    given: dict[str, Any] = {name: np.int64(3)}
    params = SamplingParams(**given)
    assert getattr(params, name) == 3 and type(getattr(params, name)) is int


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": None}, "n must be an integer; got None"),
        ({"temperature": "hot"}, "temperature must be a number; got 'hot'"),
        ({"top_p": None}, "top_p must be a number; got None"),
        ({"temperature": float("nan")}, "temperature must be 0 or more, and finite; got nan"),
        ({"temperature": 1e39}, r"temperature must be 0 or more, and finite; got 1e\+39"),  # in single precision it is not
        ({"repetition_penalty": 1e39}, r"repetition_penalty must be positive, and finite; got 1e\+39"),
        ({"allowed_token_ids": (1, 2.5)}, "each of allowed_token_ids must be an integer; got 2.5"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must not be empty"),
        ({"stop_token_ids": ["a"]}, "each of stop_token_ids must be an integer; got 'a'"),
        ({"stop_token_ids": [True]}, "each of stop_token_ids must be an integer; got True"),
        ({"stop_token_ids": 5}, "stop_token_ids must be token ids; got 5"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias values must be numbers; got nan"),
        ({"logit_bias": {1: "x"}}, "logit_bias values must be numbers; got 'x'"),
        ({"logit_bias": {1.5: 1.0}}, "each token of logit_bias must be an integer; got 1.5"),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: 10**400}}, r"logit_bias values must be in \[-100, 100\]; got 10000"),
        ({"max_tokens": 2**30}, "max_tokens must be below 2\\^30; got 1073741824"),
        ({"min_tokens": 2**32 - 1, "max_tokens": None}, "min_tokens must be below 2\\^30; got 4294967295"),
        ({"top_k": 10**40}, "top_k must be below 2\\^30; got 1000"),
        ({"logit_bias": {1: 101.0}}, r"logit_bias values must be in \[-100, 100\]; got 101.0"),
        ({"stop": (1,)}, r"each of stop must be a string; got \[1\]"),
        ({"stop": 1}, "stop must be strings; got 1"),
        ({"stop": ("",)}, "stop must not hold an empty string"),
        ({"bad_words": ("a", b"b")}, r"each of bad_words must be a string; got \[b'b'\]"),
        ({"bad_words": tuple("abcdefghijklmnopq")}, "bad_words may hold 16 words; got 17"),
        ({"best_of": 2, "n": 3}, "best_of must be between n, which is 3, and 128; got 2"),
        ({"best_of": 129}, "best_of must be between n, which is 1, and 128; got 129"),
        ({"best_of": 2, "temperature": 0}, "best_of must be n at temperature 0, where all samples are the same; got best_of=2"),
        ({"best_of": 4, "beam_width": 4}, "best_of must not go with beam_width; got best_of=4 and beam_width=4"),
        ({"beam_width": None}, "beam_width must be an integer; got None"),
        ({"beam_width": 2.0}, "beam_width must be an integer; got 2.0"),
        ({"beam_width": 11}, "beam_width must be between 1 and 10, or 0 for sampling; got 11"),
        ({"beam_width": -1}, "beam_width must be between 1 and 10, or 0 for sampling; got -1"),
        ({"beam_width": 3, "n": 4}, "n must be at most beam_width 3; got 4"),
        ({"beam_width": 3, "length_penalty": "1"}, "length_penalty must be a number; got '1'"),
        ({"beam_width": 3, "length_penalty": 10.5}, r"length_penalty must be in \[-10, 10\]; got 10.5"),
        ({"beam_width": 3, "length_penalty": float("nan")}, r"length_penalty must be in \[-10, 10\]; got nan"),
        ({"beam_width": 3, "early_stopping": "always"}, "early_stopping must be True, False or 'never'; got 'always'"),
        ({"beam_width": 3, "early_stopping": 1}, "early_stopping must be True, False or 'never'; got 1"),
        ({"length_penalty": 0.5}, "length_penalty and early_stopping must go with a beam_width; got length_penalty=0.5"),
        ({"early_stopping": True}, "length_penalty and early_stopping must go with a beam_width; got early_stopping=True"),
        (
            {"beam_width": 3, "temperature": 0.5, "seed": 0, "top_p": 0.9},
            "to a stop id or max_tokens; it cannot honour temperature=0.5, top_p=0.9, seed=0$",
        ),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"min_p": 0.1},
        {"typical_p": 0.9},
        {"presence_penalty": 1},
        {"frequency_penalty": -1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {1: 2.0}},
        {"allowed_token_ids": (1,)},
        {"bad_words": ("a",)},
        {"stop": ("a",)},
    ],
)
def test_what_beam_search_cannot_honour(options: dict[str, Any]) -> None:
    SamplingParams(**options)
    with pytest.raises(UserError, match=f"it cannot honour {next(iter(options))}="):
        SamplingParams(beam_width=2, **options)


def test_what_goes_with_beams_and_best_of() -> None:
    beams = SamplingParams(beam_width=10, n=10, min_tokens=2, stop_token_ids=(3,), logprobs=2, early_stopping="never", top_k=-1)
    assert beams.temperature == 0 and beams.num_sequences == 10
    assert SamplingParams(n=2, best_of=5).num_sequences == 5 and SamplingParams(n=2).num_sequences == 2
    assert SamplingParams(n=2, best_of=2, temperature=0).num_sequences == 2


def test_what_is_turned_into_plain_values() -> None:
    given: dict[str, Any] = {"stop": "end", "bad_words": ["a"], "stop_token_ids": np.arange(2), "allowed_token_ids": {7}}
    params = SamplingParams(**given, logit_bias={np.int32(5): 1}, top_k=-1)  # pyright: ignore[reportArgumentType]
    assert (params.stop, params.bad_words, params.top_k) == (("end",), ("a",), 0)
    assert (params.stop_token_ids, params.allowed_token_ids, params.logit_bias) == ((0, 1), (7,), {5: 1.0})
    assert all(type(i) is int for i in (*params.stop_token_ids, *params.logit_bias))
