"""Draws follow the reference's distribution; seeds, ties, logprobs, and what a row must not notice of its batch."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pagedjax.device import sample as sampling
from pagedjax.errors import UserError
from pagedjax.limits import NUM_LOGPROBS
from tests.device import sampling_reference as reference

DRAWS = 8192
ROWS, WIDTH = 8, 640  # the one shape of all tests that do not need another: a compilation takes seconds
P_VALUE = 1e-4

_sample = jax.jit(sampling.sample, static_argnames="vocab_size")


def draw(logits, settings, history=(), prompt_len=0, *, draws=DRAWS, seed=0):
    """Tokens of `draws` rows that differ in their seeds alone."""
    one = reference.lanes([settings], len(logits), 16, histories=[history], prompt_lens=[prompt_len])
    rows = jax.tree.map(lambda x: np.repeat(x, draws, axis=0), one)
    rows = rows.replace(seed=np.random.default_rng(seed).integers(0, 2**32, (draws, 2), dtype=np.uint32))
    out = _sample(np.repeat(logits[None], draws, axis=0), rows, np.full(draws, len(history), np.int32), vocab_size=len(logits))
    return np.asarray(out.tokens)


def sample(logits, settings, lengths=0, **lane_options):
    """Sampled of a few rows, through the one compiled shape: padded with plain rows, and with columns of -inf."""
    count, width = np.shape(logits)
    padded = np.pad(np.asarray(logits, np.float32), ((0, ROWS - count), (0, WIDTH - width)), constant_values=-np.inf)
    rows = reference.lanes([*settings, *[{}] * (ROWS - count)], WIDTH, **lane_options)
    length = np.zeros(ROWS, np.int32)
    length[:count] = lengths
    return jax.tree.map(lambda x: np.asarray(x)[:count], _sample(padded, rows, length, vocab_size=500))


def fit(tokens, p):
    """The chi-square p-value of tokens under probabilities p; cells expected fewer than 5 times are joined."""
    assert (p[tokens] > 0).all(), "a token outside the allowed set was drawn"
    count, expected = np.bincount(tokens, minlength=len(p)), p * len(tokens)
    small = expected < 5
    count = np.append(count[~small], count[small].sum())
    expected = np.append(expected[~small], expected[small].sum())
    count, expected = count[expected > 0], expected[expected > 0]
    return stats.chisquare(count, expected * count.sum() / expected.sum()).pvalue if len(count) > 1 else 1.0


SAMPLERS = {
    "temperature 1": {"temperature": 1.0},
    "temperature 0.5": {"temperature": 0.5},
    "temperature 1.7": {"temperature": 1.7},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.2},
    "typical": {"temperature": 1.0, "typical_p": 0.6},
    "filters": {"temperature": 1.3, "typical_p": 0.95, "min_p": 0.02, "top_k": 9, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition": 1.4, "presence": 0.5, "frequency": 0.3},
    "everything": (
        {"temperature": 1.2, "typical_p": 0.97, "min_p": 0.01, "top_k": 10, "top_p": 0.95}
        | {"repetition": 1.2, "presence": 0.4, "frequency": 0.2, "bias": {3: 1.5, 4: -2.0}, "bad_words": [(2, 7), (11,)]}
        | {"min_len": 9, "stop_ids": (0,), "allowed": set(range(15))}
    ),
}


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_follow_the_reference(name):
    logits = (np.random.default_rng(4).normal(size=16) * 1.5).astype(np.float32)
    history = (1, 5, 5, 2, 9, 2)
    p, clear = reference.distribution(logits, SAMPLERS[name], history, 3)
    assert clear
    tokens = draw(logits, SAMPLERS[name], history, 3)
    assert fit(tokens, p) > P_VALUE
    plain = reference.distribution(logits, {"temperature": 1.0})[0]
    if name != "temperature 1":  # the test can fail: the same draws do not fit the plain distribution
        assert fit(tokens, plain) < P_VALUE


@pytest.mark.parametrize("settings", [{"top_k": 200}, {"top_p": 0.9}, {"typical_p": 0.8}])
def test_draws_follow_the_reference_beyond_the_candidates(settings):
    logits = np.random.default_rng(8).normal(size=300).astype(np.float32)
    settings = {"temperature": 2.0, **settings}
    p, clear = reference.distribution(logits, settings)
    assert clear and (p > 0).sum() > 128
    tokens = draw(logits, settings, draws=DRAWS)
    assert fit(tokens, p) > P_VALUE
    assert fit(np.where(tokens == np.argmax(p), np.argmin(np.where(p > 0, p, 1)), tokens), p) < P_VALUE


def test_the_noise_is_gumbel_and_independent_of_padding_and_of_jax_flags():
    rng = np.random.default_rng(0)
    seed = jnp.asarray(rng.integers(0, 2**32, (4, 2), dtype=np.uint32))
    index, position = jnp.arange(4), jnp.arange(4) * 100
    noise = np.asarray(sampling.gumbel(seed, index, position, 5000))
    assert stats.kstest(noise.ravel(), "gumbel_r").pvalue > P_VALUE
    assert stats.kstest(noise.ravel() * 1.1, "gumbel_r").pvalue < P_VALUE
    for width in (1, 17, 4999, 8192):
        shared = min(width, 5000)
        assert np.array_equal(sampling.gumbel(seed, index, position, width)[:, :shared], noise[:, :shared])
    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        assert np.array_equal(sampling.gumbel(seed, index, position, 5000), noise)


def test_the_bits_are_those_of_jax():
    seed = np.array([[0, 0], [1, 2], [2**32 - 1, 5]], np.uint32)
    with jax.threefry_partitionable(True):
        expected = [jax.random.bits(jax.random.wrap_key_data(s, impl="threefry2x32"), (1000,)) for s in seed]
    assert np.array_equal(sampling._random_bits(jnp.asarray(seed), jnp.zeros((0, len(seed)), jnp.uint32), 1000), np.stack(expected))


def test_a_token_depends_on_seed_sample_and_position():
    base = {"temperature": 1.0, "seed": (5, 6)}
    settings = [base, {**base, "seed": (5, 7)}, {**base, "sample": 1}, base, base]
    tokens = sample(np.zeros((5, 500)), settings, [3, 3, 3, 4, 3]).tokens.tolist()
    assert len(set(tokens[:4])) == 4
    assert tokens[4] == tokens[0]


MIXED = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 200},
    {"temperature": 1.0, "top_p": 0.97, "num_logprobs": 2},
    {"temperature": 1.5, "typical_p": 0.8, "repetition": 1.2},
    {"temperature": 1.0, "min_p": 0.1, "presence": 1.0, "bias": {3: 2.0}},
    {"num_logprobs": 0, "allowed": set(range(100, 200)), "bad_words": [(1, 150)]},
    {"temperature": 1.0, "min_len": 30, "stop_ids": (1, 2), "frequency": 0.5, "top_k": 3},
]


def test_a_row_is_the_same_alone_in_any_lane_and_under_padding():
    rng = np.random.default_rng(2)
    logits = np.pad((rng.normal(size=(ROWS, 500)) * 1.2).astype(np.float32), ((0, 0), (0, WIDTH - 500)), constant_values=-np.inf)
    histories = [rng.integers(0, 500, 5 + i) for i in range(ROWS)]
    settings = [{**row, "seed": (9, i)} for i, row in enumerate(MIXED)]
    lanes = reference.lanes(settings, WIDTH, histories=histories, prompt_lens=[4] * ROWS)
    length = np.array([len(h) for h in histories], np.int32)
    whole = _sample(logits, lanes, length, vocab_size=500)

    def same(a, b):
        return jax.tree.all(jax.tree.map(np.array_equal, a, b))

    order = rng.permutation(ROWS).astype(np.int32)
    moved = _sample(logits[order], sampling.gather_lanes(lanes, order), length[order], vocab_size=500)
    assert same(moved, jax.tree.map(lambda x: x[order], whole))
    assert same(_sample(logits[:, :500], lanes, length, vocab_size=500), whole)
    for i in range(ROWS):
        ids = np.array([i], np.int32)
        alone = _sample(logits[ids], sampling.gather_lanes(lanes, ids), length[ids], vocab_size=500)
        assert same(alone, jax.tree.map(lambda x, ids=ids: x[ids], whole)), MIXED[i]


def test_greedy_takes_the_best_and_the_lower_id_and_ignores_filters():
    logits = [[0, 2, 1, 2], [3, -1, np.inf, np.inf], [-np.inf] * 4]
    for settings in ({}, {"top_k": 1, "top_p": 0.1, "min_p": 0.9, "typical_p": 0.1}):
        assert sample(logits, [settings] * 3).tokens.tolist() == [1, 2, 0]


def test_infinite_logits_and_rows_without_a_token_give_tokens():
    logits = [[-np.inf] * 4, [0, np.inf, 1, np.inf], [-np.inf, -np.inf, 5, -np.inf], [3e38, -3e38, 3e38, 0]]
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 2, "min_p": 0.1, "typical_p": 0.9, "num_logprobs": 0}
    for seed in range(20):
        out = sample(logits, [{**settings, "seed": (seed, i)} for i in range(4)])
        tokens = out.tokens
        assert tokens[0] == 0 and tokens[1] in (1, 3) and tokens[2] == 2 and tokens[3] in (0, 2)
        assert not np.isnan(out.logprob).any() and not np.isnan(out.top_logprobs).any()


def test_tiny_and_huge_temperatures():
    assert sample([[1.0, 1.0001, 0.0]] * 2, [{"temperature": 1e-30}, {"temperature": 1e-6}]).tokens.tolist() == [1, 1]
    logits = np.arange(16, dtype=np.float32)
    assert fit(draw(logits, {"temperature": 1e30}), np.full(16, 1 / 16)) > P_VALUE


def test_logprobs_are_of_the_raw_distribution():
    rng = np.random.default_rng(6)
    logits = np.round(rng.normal(size=(3, 60)) * 3, 1).astype(np.float32)  # with ties
    out = sample(logits, [{"num_logprobs": 5, "bias": {7: 50.0}}, {"bias": {7: 50.0}}, {"num_logprobs": 0}])
    assert list(out.tokens[:2]) == [7, 7]
    for i in (0, 2):
        p = reference.softmax(logits[i])
        order = np.lexsort((np.arange(60), -logits[i]))
        np.testing.assert_allclose(out.logprob[i], np.log(p[out.tokens[i]]), rtol=1e-5)
        assert order[out.rank[i] - 1] == out.tokens[i]
        assert list(out.top_ids[i]) == list(order[:NUM_LOGPROBS])
        np.testing.assert_allclose(out.top_logprobs[i], np.log(p[order[:NUM_LOGPROBS]]), rtol=1e-5)
    assert out.logprob[1] == out.rank[1] == 0 and not out.top_ids[1].any() and not out.top_logprobs[1].any()


def test_score_of_targets_and_of_small_vocabularies():
    logits = np.array([[1, 2, -np.inf, 0], [0, 0, 0, 0], [1, 2, 3, 4]], np.float32)
    logprob, rank, top_ids, top = map(np.asarray, sampling.score(jnp.asarray(logits), jnp.array([2, 3, -1])))
    assert logprob[0] == -np.inf and rank[0] == 4
    np.testing.assert_allclose(logprob[1], -np.log(4), rtol=1e-6)
    assert rank[1] == 4 and logprob[2] == rank[2] == 0
    assert list(top_ids[0, :5]) == [1, 0, 3, -1, -1] and list(top_ids[1, :4]) == [0, 1, 2, 3]
    assert (top[top_ids == -1] == -np.inf).all() and top.shape == (3, NUM_LOGPROBS)


def test_a_padding_row_is_plain_and_stopped():
    busy = {**MIXED[3], **MIXED[4], **MIXED[5], **MIXED[6], **MIXED[7]}
    lanes = reference.lanes([busy, busy], 500)
    rows = jax.tree.map(np.asarray, sampling.gather_lanes(lanes, jnp.array([1, 2])))
    plain = jax.tree.map(lambda x: x[0], reference.lanes([{}], 500))
    for name in (
        "temperature",
        "presence",
        "frequency",
        "repetition",
        "min_len",
        "masked",
        "num_logprobs",
        "stop_ids",
        "bad_words",
    ):
        assert np.array_equal(getattr(rows, name)[1], getattr(plain, name)), name
        assert np.array_equal(getattr(rows, name)[0], getattr(lanes, name)[1]), name
    assert np.array_equal(rows.bias_ids[1], plain.bias_ids) and rows.stopped[1] and not rows.stopped[0]


def test_a_full_vocabulary_in_one_row():
    logits = np.random.default_rng(1).normal(size=(1, 32000)).astype(np.float32)
    rows = reference.lanes([{"temperature": 1.0, "top_k": 40, "top_p": 0.9}], 32000)
    f = partial(_sample, logits, rows, vocab_size=32000)
    best = set(np.argsort(-logits[0])[:40].tolist())
    tokens = {int(f(np.array([n], np.int32)).tokens[0]) for n in range(30)}
    assert tokens <= best and len(tokens) > 5


def test_logits_narrower_than_the_vocabulary_are_refused():
    with pytest.raises(UserError, match="logits must have a column for each of 5 tokens; got 4"):
        sampling.sample(jnp.zeros((1, 4)), reference.lanes([{}], 5), jnp.zeros(1, jnp.int32), vocab_size=5)
