"""SamplingParams takes what it says and refuses the rest in one sentence."""

from typing import Any

import numpy as np
import pytest

from pagedjax.errors import UserError
from pagedjax.host.request import SamplingParams

INTEGERS = ("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs")


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
        ({"allowed_token_ids": (1, 2.5)}, "each of allowed_token_ids must be an integer; got 2.5"),
        ({"allowed_token_ids": ()}, "allowed_token_ids must not be empty"),
        ({"stop_token_ids": ["a"]}, "each of stop_token_ids must be an integer; got 'a'"),
        ({"stop_token_ids": [True]}, "each of stop_token_ids must be an integer; got True"),
        ({"stop_token_ids": 5}, "stop_token_ids must be token ids; got 5"),
        ({"logit_bias": {1: float("nan")}}, "logit_bias values must be numbers; got nan"),
        ({"logit_bias": {1: "x"}}, "logit_bias values must be numbers; got 'x'"),
        ({"logit_bias": {1.5: 1.0}}, "each token of logit_bias must be an integer; got 1.5"),
        ({"logit_bias": [(1, 2.0)]}, "logit_bias must map token ids to numbers"),
        ({"logit_bias": {1: 101.0}}, r"logit_bias values must be in \[-100, 100\]; got 101.0"),
        ({"stop": (1,)}, r"each of stop must be a string; got \[1\]"),
        ({"stop": 1}, "stop must be strings; got 1"),
        ({"stop": ("",)}, "stop must not hold an empty string"),
        ({"bad_words": ("a", b"b")}, r"each of bad_words must be a string; got \[b'b'\]"),
        ({"bad_words": tuple("abcdefghijklmnopq")}, "bad_words may hold 16 words; got 17"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        SamplingParams(**options)


def test_what_is_turned_into_plain_values() -> None:
    given: dict[str, Any] = {"stop": "end", "bad_words": ["a"], "stop_token_ids": np.arange(2), "allowed_token_ids": {7}}
    params = SamplingParams(**given, logit_bias={np.int32(5): 1}, top_k=-1)  # pyright: ignore[reportArgumentType]
    assert (params.stop, params.bad_words, params.top_k) == (("end",), ("a",), 0)
    assert (params.stop_token_ids, params.allowed_token_ids, params.logit_bias) == ((0, 1), (7,), {5: 1.0})
    assert all(type(i) is int for i in (*params.stop_token_ids, *params.logit_bias))
