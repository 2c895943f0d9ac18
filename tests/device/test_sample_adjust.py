"""Masks, bans, biases and penalties against the reference, alone and all together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.device.adjust import adjusted, allow_only
from tests.device import sampling_reference as reference

VOCAB = 40
ROWS = 4
_adjusted = jax.jit(adjusted)

SETTINGS = {
    "mask": {"allowed": {0, 3, 31, 32, 39}},
    "one token": {"bad_words": [(7,)]},
    "several words": {"bad_words": [(5, 6), (1, 2, 3), (9,), (6, 8)]},
    "min_len": {"min_len": 9, "stop_ids": (2, 30)},
    "bias": {"bias": {0: 5.0, 39: -100.0, 6: 0.5}},
    "repetition": {"repetition": 1.3},
    "repetition below 1": {"repetition": 0.8},
    "presence": {"presence": 0.7},
    "frequency": {"frequency": -0.4},
}
SETTINGS["all"] = {name: value for one in SETTINGS.values() for name, value in one.items()}


def compare(rows, logits, histories, prompt_lens):
    lanes = reference.lanes(rows, VOCAB, histories=histories, prompt_lens=prompt_lens)
    got = np.asarray(_adjusted(logits, lanes, np.array([len(h) for h in histories], np.int32)))
    for row, x, settings_, history, prompt_len in zip(got, logits, rows, histories, prompt_lens, strict=True):
        expected = reference.adjusted(x, settings_, list(history), prompt_len)
        assert np.array_equal(row == -np.inf, expected == -np.inf), settings_
        finite = expected > -np.inf
        np.testing.assert_allclose(row[finite], expected[finite], rtol=2e-6, atol=2e-6)
    return got


def case(seed):
    rng = np.random.default_rng(seed)
    histories = [rng.integers(0, 10, rng.integers(1, 20)) for _ in range(ROWS)]
    return rng.normal(size=(ROWS, VOCAB)).astype(np.float32) * 3, histories, [int(rng.integers(0, len(h) + 1)) for h in histories]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_does_what_its_formula_says_and_leaves_other_rows_alone(name):
    changed = False
    for seed in range(5):
        logits, histories, prompt_lens = case(seed)
        got = compare([SETTINGS[name], {}, SETTINGS[name], {}], logits, histories, prompt_lens)
        assert np.array_equal(got[1::2], logits[1::2])
        changed |= not np.array_equal(got[::2], logits[::2])
    assert changed


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.lists(st.sets(st.sampled_from(sorted(SETTINGS))), min_size=ROWS, max_size=ROWS))
def test_any_combination_on_any_row(seed, names):
    rows = [{k: v for name in sorted(chosen) for k, v in SETTINGS[name].items()} for chosen in names]
    compare(rows, *case(seed))


def test_a_bad_word_is_banned_only_when_its_beginning_ends_the_history():
    word = {"bad_words": [(4, 5, 6)]}
    histories = [(4, 5), (1, 4, 5), (4, 5, 1), (5,)]  # the first two: within the prompt, and across its end
    got = compare([word] * ROWS, np.zeros((ROWS, VOCAB), np.float32), histories, [2, 2, 3, 1])
    assert list(got[:, 6] == -np.inf) == [True, True, False, False]
    assert (got == -np.inf).sum() == 2


def test_stop_ids_are_banned_until_min_len_tokens_are_known():
    row = {"min_len": 3, "stop_ids": (8,)}
    got = compare([row] * ROWS, np.zeros((ROWS, VOCAB), np.float32), [(1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)], [1] * ROWS)
    assert list(got[:, 8] == -np.inf) == [True, True, False, False]


def test_penalties_of_hand_written_numbers():
    """Prompt 1 1 2, output 2 3 3: repetition sees 1 2 3, frequency and presence see 2 once and 3 twice."""
    logits = np.zeros((ROWS, VOCAB), np.float32)
    logits[:, 1:4] = [4.0, -4.0, 8.0]
    history, row = (1, 1, 2, 2, 3, 3), {"repetition": 2.0, "frequency": 0.5, "presence": 0.25}
    got = compare([row] * ROWS, logits, [history] * ROWS, [3] * ROWS)
    np.testing.assert_allclose(got[0, :5], [0, 2.0, -8.75, 2.75, 0])


def test_a_mask_of_any_width_fits_padded_logits():
    row = {"allowed": {1, 33}}
    for words in (2, 3):
        lanes = reference.lanes([row], VOCAB, mask_words=words)
        for width in (64, 70, 40):
            got = np.asarray(allow_only(jnp.zeros((1, width)), lanes))[0]
            assert list(np.flatnonzero(got > -np.inf)) == [1, 33]
