"""Which rows share a prefix, and which prefix is chosen."""

import jax
import numpy as np
import pytest

from pallas_kernels import find_shared, paged_decode
from pallas_kernels.common.shared import MIN_MEMBERS

SIZE = 4
find = jax.jit(find_shared, static_argnums=3)


def found(tables, lens, counts=None):
    lens = np.array(lens, np.int32)
    counts = np.ones(len(lens), np.int32) if counts is None else np.array(counts, np.int32)
    table, count, member = find(np.array(tables, np.int32), lens, counts, SIZE)
    return list(np.asarray(table)[: int(count)]), list(np.flatnonzero(member))


def rows(*begin, width=6):
    """Tables that begin so, and go on with blocks of their own."""
    return [[*b, *(100 * s + c for c in range(len(b), width))] for s, b in enumerate(begin, 1)]


def test_all_rows():
    assert found(rows([7, 8, 9], [7, 8, 9], [7, 8, 9], [7, 8, 9]), [24] * 4) == ([7, 8, 9], [0, 1, 2, 3])


def test_too_few_rows_share_nothing():
    few = MIN_MEMBERS - 1
    assert found(rows(*[[7, 8]] * few, [5, 8], [6]), [24] * (few + 2)) == ([], [])
    assert found(rows(*[[7, 8]] * MIN_MEMBERS, [5, 8]), [24] * (MIN_MEMBERS + 1)) == ([7, 8], list(range(MIN_MEMBERS)))


def test_equal_blocks_at_other_places_are_not_shared():
    assert found(rows([1, 7], [2, 7], [3, 7], [4, 7]), [24] * 4) == ([], [])


def test_only_blocks_before_every_query_count():
    tables = rows(*[[7, 8, 9]] * 5)
    assert found(tables, [13, 13, 13, 13, 13]) == ([7, 8, 9], [0, 1, 2, 3, 4])
    assert found(tables, [12, 12, 12, 12, 12]) == ([7, 8], [0, 1, 2, 3, 4])
    assert found(tables, [13] * 5, [5] * 5) == ([7, 8], [0, 1, 2, 3, 4])
    assert found(tables, [13, 13, 13, 13, 12]) == ([7, 8, 9], [0, 1, 2, 3])  # 9 blocks saved, and 8 with all five


def test_rows_of_length_0_and_rows_without_cached_tokens_are_not_members():
    tables = rows(*[[7, 8, 9]] * 6)
    assert found(tables, [13, 0, 13, 13, 12, 13], [1, 1, 1, 1, 12, 1]) == ([7, 8, 9], [0, 2, 3, 5])
    assert found(tables, [0] * 6) == ([], [])


def test_the_prefix_that_saves_most_blocks_wins():
    tables = rows(*[[1, 2, 3, 4]] * 4, *[[5]] * 8)
    assert found(tables, [24] * 12) == ([1, 2, 3, 4], [0, 1, 2, 3])
    tables = rows(*[[1, 2]] * 4, *[[5]] * 8)
    assert found(tables, [24] * 12) == ([5], list(range(4, 12)))
    tables = rows(*[[1, 2, 3]] * 4, *[[1]] * 7)  # 9 against 10
    assert found(tables, [24] * 11) == ([1], list(range(11)))


def test_a_window_is_refused():
    kv, q = np.zeros((1, 3, 2, 1, SIZE, 8), np.float32), np.zeros((4, 1, 8), np.float32)
    tables, lens = np.ones((4, 2), np.int32), np.full(4, 5, np.int32)
    shared = find(tables, lens, np.ones(4, np.int32), SIZE)
    with pytest.raises(ValueError, match="a shared prefix must come without a window; got window 3"):
        paged_decode(q, kv, 0, tables, lens, scale=1.0, window=3, shared=shared)
