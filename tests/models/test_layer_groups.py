"""Layer groups: which layers share blocks, and that window layers do not depend on blocks that have left the window."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagedjax.config import LayerGroups, LayerKind, group_layers
from pagedjax.device.sharding import make_mesh
from tests.golden.tiny_models import LENGTHS, texts
from tests.models.goldens import TOLERANCE, distance, expected, load, open_golden
from tests.models.paging import BLOCK, compiled_pass, run, shuffled_tables

# Chunks beside decode rows, so that windows begin in the middle of what a prefill reads; then decode steps.
CHUNKED = [(22, 0), (1, 19), (15, 1), (1, 5), *[(1, 1)] * 4, (2, 0)]


def test_groups_of_real_models():
    unit: tuple[LayerKind, ...] = ("window", "window", "window", "window", "window", "full")
    gemma_3_1b = group_layers([unit[i % 6] for i in range(26)], 512)
    assert (gemma_3_1b.size, gemma_3_1b.windows) == (4, (None, *[512] * 6)) and gemma_3_1b.count == 7
    assert [gemma_3_1b.places[i] for i in (0, 3, 4, 5, 6, 11, 25)] == [(1, 0), (1, 3), (2, 0), (0, 0), (2, 1), (0, 1), (6, 1)]
    gemma_2_2b = group_layers(("window", "full") * 13, 4096)
    assert (gemma_2_2b.size, gemma_2_2b.windows) == (13, (None, 4096))
    assert gemma_2_2b.places == tuple((1 - i % 2, i // 2) for i in range(26))
    assert group_layers(("window",) * 3, 4096) == LayerGroups(3, (4096,), ((0, 0), (0, 1), (0, 2)))  # Mistral 7B v0.1
    assert group_layers(("full",) * 3, None) == LayerGroups(3, (None,), ((0, 0), (0, 1), (0, 2)))
    upper = group_layers(("full",) * 3 + ("window",), 64)  # Qwen2: three full layers to one of a window
    assert upper == LayerGroups(1, (None, None, None, 64), ((0, 0), (1, 0), (2, 0), (3, 0)))


@given(st.lists(st.sampled_from(["full", "window"]), min_size=1, max_size=70))
def test_every_layer_has_its_own_place(kinds):
    """Among layers of its kind, in their order; only the last group of a kind is incomplete, and full groups come first."""
    groups = group_layers(kinds, 9)
    assert len(set(groups.places)) == len(kinds) == len(groups.places)
    assert all(0 <= j < groups.size for _, j in groups.places)
    assert [groups.windows[g] for g, _ in groups.places] == [9 if kind == "window" else None for kind in kinds]
    assert sorted(groups.windows, key=lambda window: window is not None) == list(groups.windows)
    for wanted in ("full", "window"):
        ranks = [g * groups.size + j for (g, j), kind in zip(groups.places, kinds, strict=True) if kind == wanted]
        assert ranks == list(range(ranks[0], ranks[0] + len(ranks))) if ranks else wanted not in kinds


def without_left(tables: np.ndarray, done: Sequence[int], *, windows: Sequence[int | None], more: int) -> np.ndarray:
    """`tables` with 0 for each block that ends before the window of the row's next token, and for `more` blocks after those."""
    seen = tables.copy()
    for g, window in enumerate(windows):
        for i, position in enumerate(done):
            if window is not None and position + 1 > window:
                seen[g, i, : (position + 1 - window) // BLOCK + more] = 0
    return seen


@pytest.mark.parametrize(("name", "stacked"), [("gemma2", False), ("gemma3", True), ("mistral", False)])
def test_blocks_that_left_the_window_are_not_read(name, stacked, tmp_path):
    """Their entries are 0 and the scrap block is full of NaN: the logits are the same, bit by bit. With one block more, which the
    window still reaches, they are NaN."""
    mesh, ids = make_mesh(1), texts(name)
    params, cfg = load(open_golden(name, tmp_path), mesh, stacked=stacked)
    tables, windows = shuffled_tables(cfg, ids, 5), cfg.layer_groups.windows
    assert (without_left(tables, LENGTHS, windows=windows, more=0) != tables).sum(axis=(1, 2)).tolist() == [
        0 if window is None else sum((length + 1 - window) // BLOCK for length in LENGTHS) for window in windows
    ]
    forward = partial(run, compiled_pass(cfg), params, cfg, mesh, ids, CHUNKED, tables=tables)
    whole = forward()
    assert distance(whole, expected(name)) < TOLERANCE
    freed = forward(read=partial(without_left, windows=windows, more=0), scrap=np.nan)
    assert all(np.array_equal(a, b) for a, b in zip(freed, whole, strict=True))
    wrong = forward(read=partial(without_left, windows=windows, more=1), scrap=np.nan)
    assert all(np.isnan(logits).any() for logits in wrong)


def test_each_layer_reads_the_table_of_its_own_group(tmp_path):
    """The control of the tables: two window groups that read each other's blocks."""
    mesh, ids = make_mesh(1), texts("gemma3")
    params, cfg = load(open_golden("gemma3", tmp_path), mesh, stacked=True)
    assert cfg.layer_groups.windows == (None, 13, 13, 13)
    tables = shuffled_tables(cfg, ids, 6)
    got = run(compiled_pass(cfg), params, cfg, mesh, ids, CHUNKED, tables=tables, read=lambda tables, _: tables[[0, 2, 1, 3]])
    assert distance(got, expected("gemma3")) > 100 * TOLERANCE
