"""Each filter keeps exactly the tokens that a sort in float64 keeps, with ties, extremes and any number of rows."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedjax.device import filters
from tests.device import sampling_reference as reference

# Below, at and just above the number of candidates, and far above it.
WIDTHS = (6, filters.NUM_CANDIDATES, filters.NUM_CANDIDATES + 1, 700)
STYLES = ("normal", "peaked", "flat", "ties", "equal", "one_hot", "some_forbidden", "huge")


def logits_of(style, width, rng):
    x = rng.normal(size=width) * {"peaked": 8, "flat": 0.05, "huge": 1e30}.get(style, 2)
    if style == "ties":
        x = np.round(x)
    elif style == "equal":
        x = np.full(width, rng.normal())
    elif style == "one_hot":
        x = np.where(np.arange(width) == rng.integers(width), 0.0, -np.inf)
    elif style == "some_forbidden":
        x[rng.permutation(width)[: width // 2]] = -np.inf
    return x.astype(np.float32)


@jax.jit
def _filtered(z, typical_p, min_p, top_k, top_p, active):
    rows: Any = SimpleNamespace(typical_p=typical_p, min_p=min_p, top_k=top_k, top_p=top_p)
    return filters.filtered(z, rows, active)


def _keep(name, z, value, active):
    """One filter alone; the others are off."""
    off = {"typical_p": np.float32(1), "min_p": np.float32(0), "top_k": np.int32(0), "top_p": np.float32(1)}
    settings_ = {k: np.full(len(z), v) for k, v in off.items()}
    return _filtered(z, **settings_ | {"typical_p" if name == "typical" else name: value}, active=active)


def check_filter(name, logits, values):
    """Compares rows; returns how many of them were clear (see the reference)."""
    z = np.stack([reference.scale(row, 0.7) for row in logits])
    assert np.array_equal(z, filters.scaled(jnp.asarray(logits), jnp.full(len(z), 0.7)), equal_nan=True)
    values = np.asarray(values, np.int32 if name == "top_k" else np.float32)
    out = np.asarray(_keep(name, z, values, np.ones(len(z), bool)))
    clear = 0
    for row, got, value in zip(z, out, values, strict=True):
        keep, sure = getattr(reference, name)(row, value)
        assert np.array_equal(got[got > -np.inf], row[got > -np.inf])  # what is kept is unchanged
        if sure:
            assert np.array_equal(got > -np.inf, keep & (row > -np.inf)), (name, value)
        clear += sure
    return clear


def values_of(name, count, width, rng):
    if name == "top_k":
        return rng.choice([1, 2, 5, width // 2, width - 1, width, 10 * width], count).clip(1)
    return rng.choice([1e-30, 1e-3, 0.1, 0.5, 0.9, 0.99, float(rng.random())], count)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "typical"])
def test_a_filter_keeps_what_a_sort_keeps(name, width):
    rng = np.random.default_rng(width)
    clear = total = 0
    for _ in range(6):
        logits = np.stack([logits_of(style, width, rng) for style in STYLES * 2])
        clear += check_filter(name, logits, values_of(name, len(logits), width, rng))
        total += len(logits)
    assert clear >= (1 if name in ("top_k", "min_p") else 0.8) * total


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from(["top_k", "top_p", "min_p", "typical"]),
    styles=st.lists(st.sampled_from(STYLES), min_size=4, max_size=4),
    share=st.floats(2**-20, 0.999),
)
def test_a_filter_keeps_what_a_sort_keeps_for_any_input(seed, name, styles, share):
    rng = np.random.default_rng(seed)
    logits = np.stack([logits_of(style, 300, rng) for style in styles])
    check_filter(name, logits, np.ceil([share * 300] * 4) if name == "top_k" else [share] * 4)


def test_of_equal_tokens_the_lower_ids_stay():
    z = np.zeros((3, 400), np.float32)
    z[:, 5] = -1
    on = np.ones(3, bool)
    kept = np.asarray(_keep("top_k", z, np.array([3, 200, 399], np.int32), on)) > -np.inf
    expected = [i for i in range(400) if i != 5]
    assert [list(np.flatnonzero(row)) for row in kept] == [expected[:3], expected[:200], expected]
    equal = np.zeros((3, 400), np.float32)
    kept = np.asarray(_keep("top_p", equal, np.array([0.5, 0.25, 0.75], np.float32), on)) > -np.inf
    assert [list(np.flatnonzero(row)) for row in kept] == [list(range(n)) for n in (200, 100, 300)]


@pytest.mark.parametrize("name", ["top_p", "min_p", "typical"])
@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-12])
def test_at_least_one_token_stays(name, value):
    rng = np.random.default_rng(3)
    z = np.stack([reference.scale(logits_of(style, 700, rng), 1) for style in STYLES])
    kept = np.asarray(_keep(name, z, np.full(len(z), value, np.float32), np.ones(len(z), bool))) > -np.inf
    assert (kept.sum(axis=1) >= 1).all()
    if name != "min_p":
        assert (kept.sum(axis=1) == 1).all()


def test_min_p_of_one_keeps_only_the_best():
    z = reference.scale([1.0, 3.0, 3.0, 2.9999], 1)[None]
    assert list(np.asarray(_keep("min_p", z, np.ones(1, np.float32), np.ones(1, bool)))[0] > -np.inf) == [False, True, True, False]


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "typical"])
def test_a_row_is_the_same_in_any_batch_and_under_any_padding(name):
    rng = np.random.default_rng(11)
    z = np.stack([reference.scale(logits_of(style, 700, rng), 1) for style in STYLES])
    value = np.full(len(z), 300 if name == "top_k" else 0.93, np.int32 if name == "top_k" else np.float32)
    on = np.ones(len(z), bool)
    whole = np.asarray(_keep(name, z, value, on))
    padded = np.pad(z, ((0, 0), (0, 68)), constant_values=-np.inf)
    assert np.array_equal(np.asarray(_keep(name, padded, value, on))[:, :700], whole)
    for i in range(len(z)):
        assert np.array_equal(np.asarray(_keep(name, z[i : i + 1], value[:1], on[:1]))[0], whole[i])
    some = np.arange(len(z)) % 2 == 0
    part = np.asarray(_keep(name, z, value, some))
    assert np.array_equal(part, np.where(some[:, None], whole, z))


def test_all_rows_at_once_find_the_same_as_row_by_row():
    """The form for accelerators (vmap) and the one for CPU (map) of the bisection."""
    rng = np.random.default_rng(5)
    z = np.stack([reference.scale(logits_of(style, 300, rng), 1) for style in STYLES])
    weight = np.where(z > -np.inf, 1, 0).astype(np.float32)
    args = (z, weight, np.full(len(z), 120, np.float32), np.zeros(len(z), np.float32))
    at_once = jax.vmap(filters._bisect_row)(*args)
    by_row = jax.lax.map(lambda a: filters._bisect_row(*a), args)
    assert all(np.array_equal(a, b) for a, b in zip(at_once, by_row, strict=True))
    for row, threshold, last in zip(z, *map(np.asarray, at_once), strict=True):
        kept = (row > threshold) | ((row == threshold) & (np.arange(300) <= last))
        assert np.array_equal(kept & (row > -np.inf), reference.top_k(row, 120)[0])


def test_sums_do_not_change_with_padding_or_rows():
    x = np.random.default_rng(0).random((5, 1000), np.float32)
    whole = np.asarray(filters.row_sum(x))
    assert np.allclose(whole, x.astype(np.float64).sum(axis=1), rtol=1e-6)
    for extra in (1, 24, 28, 600, 5000):
        assert np.array_equal(filters.row_sum(np.pad(x, ((0, 0), (0, extra)))), whole)
    assert np.array_equal(filters.row_sum(x[3]), whole[3])
