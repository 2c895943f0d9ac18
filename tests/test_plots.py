"""The pictures of bench/plots.py, from the figures that are stored beside it."""

import re
from pathlib import Path

from bench.plots import PICTURES, main

ROOT = Path(__file__).parents[1]


def test_pictures_are_the_same_each_time_and_small(tmp_path: Path) -> None:
    for name in ("a", "b"):
        main([str(ROOT / "bench/results"), str(tmp_path / name)])
    for name in PICTURES:
        first, second = ((tmp_path / folder / f"{name}.svg").read_bytes() for folder in ("a", "b"))
        assert first == second and 5_000 < len(first) < 60_000
        assert not re.search(rb"[ ,](nan|inf)\b", first)
    assert {path.stem for path in (ROOT / "docs/img").glob("*.svg")} >= set(PICTURES)


def test_pictures_are_those_of_the_figures(tmp_path: Path) -> None:
    """Other figures, other curves."""
    lines = tmp_path / "lines"
    lines.mkdir()
    for path in (ROOT / "bench/results").glob("*.jsonl"):
        text = path.read_text()
        (lines / path.name).write_text(text.replace('"attained": 1.0', '"attained": 0.5'))
    main([str(lines), str(tmp_path / "other")])
    main([str(ROOT / "bench/results"), str(tmp_path / "own")])
    differ = {n for n in PICTURES if (tmp_path / "other" / f"{n}.svg").read_bytes() != (tmp_path / "own" / f"{n}.svg").read_bytes()}
    assert differ == {"overload"}
