"""Look-up of tuned sizes: it rounds up, is never an error, and says where a number is from."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from pallas_kernels import OPS
from pallas_kernels.common.spec import TYPICAL_DECODE, TYPICAL_WRITE
from pallas_kernels.common.targets import CHIPS, CPUS, chip, cpu
from pallas_kernels.common.tuning import (
    ROOT,
    Entry,
    Key,
    attention_key,
    complaints,
    load,
    look_up,
    place_of,
    save,
    trying,
    tuned,
    write_key,
)
from pallas_kernels.paged_decode import xla


@dataclass(frozen=True)
class Config:
    tile: int
    late: bool = False


RULE = Config(1)
SHAPE = {"dtype": "bfloat16", "width": 128}
MEASURED = {"device": "NVIDIA H200", "gb_s": 3900.5, "jax": "0.12.0.1", "command": "python -m x", "date": "2026-11-30"}


def entry(bucket: object = 10, tile: object = 64, **changed: object) -> Entry:
    config = {"tile": tile, "late": False}
    whole = {"backend": "mosaic", "chip": "sm_90a", "shape": SHAPE, "bucket": bucket, "config": config, "provenance": MEASURED}
    return whole | changed


def key(size: int) -> Key:
    return Key(tuple(SHAPE.items()), size)


@pytest.mark.parametrize(("size", "tile"), [(1, 16), (16, 16), (17, 64), (1024, 64), (1025, 256), (4096, 256), (1 << 20, 256)])
def test_sizes_are_rounded_up_and_the_largest_entry_serves_all_above(size: int, tile: int):
    entries = [entry(12, 256), entry(4, 16), entry(10, 64)]
    assert look_up(entries, "mosaic", "sm_90a", key(size), RULE) == Config(tile)


@pytest.mark.parametrize(
    "changed",
    [{"backend": "triton"}, {"chip": "sm_80"}, {"shape": SHAPE | {"width": 64}}, {"shape": {"width": 128}}, {"shape": None}],
    ids=str,
)
def test_entries_for_something_else_are_not_taken(changed: dict):
    assert look_up([entry(**changed)], "mosaic", "sm_90a", key(100), RULE) == RULE
    assert look_up([entry()], "mosaic", "sm_90a", key(100), RULE) == Config(64)  # the control


@pytest.mark.parametrize(
    "broken",
    [
        {},
        entry(bucket="10"),
        entry(bucket=None),
        entry(tile="64"),
        entry(tile=64.0),
        entry(tile=0),
        entry(tile=True),
        entry(config=None),
        entry(config={"tile": 64}),
        entry(config={"tile": 64, "late": False, "more": 1}),
        entry(config=[64, False]),
    ],
    ids=str,
)
def test_broken_entries_are_passed_over(broken: Entry):
    assert look_up([broken], "mosaic", "sm_90a", key(1000), RULE) == RULE
    assert look_up([broken, entry(20, 32)], "mosaic", "sm_90a", key(1000), RULE) == Config(32)


@pytest.mark.parametrize("text", [None, "", "{", "{}", "[1, null]", "3"])
def test_files_that_are_missing_or_broken_hold_nothing(tmp_path: Path, text: str | None):
    path = tmp_path / "tuned.json"
    if text is not None:
        path.write_text(text)
    assert load(path) == ()
    save(path, [entry()])
    assert load(path) == (entry(),)


def test_an_op_without_a_file_has_its_rules():
    assert tuned("no_such_op", "mosaic", None, key(1), RULE) == RULE
    with trying("no_such_op", "mosaic", Config(7)):
        assert tuned("no_such_op", "mosaic", None, key(1), RULE) == Config(7)
        assert tuned("no_such_op", "triton", None, key(1), RULE) == RULE
    assert tuned("no_such_op", "mosaic", chip("v5e"), key(1), RULE) == RULE
    with pytest.raises(LookupError, match="mosaic of no_such_op did not ask for its sizes"), trying("no_such_op", "mosaic", RULE):
        pass


def test_keys_are_what_sizes_depend_on():
    assert attention_key(TYPICAL_DECODE).bucket == 19  # 64 rows of 128 blocks of 64 tokens
    assert attention_key(dataclasses.replace(TYPICAL_DECODE, rows=65)).bucket == 20
    assert dict(attention_key(TYPICAL_DECODE).shape) == {
        "block_size": 64,
        "dtype": "bfloat16",
        "group": 4,
        "kv_heads": 8,
        "scales": "none",
        "width": 128,
    }
    assert write_key(TYPICAL_WRITE).bucket == 6
    assert "group" not in dict(write_key(TYPICAL_WRITE).shape)


def test_what_is_written_stands_in_order_and_replaces_what_was_there(tmp_path: Path):
    path = tmp_path / "tuned.json"
    save(path, [entry(12), entry(4), entry(10, chip="v5e", provenance="heuristic")])
    save(path, [entry(4, 98), entry(4, 99)])
    said = json.loads(path.read_text())
    assert [(e["chip"], e["bucket"], e["config"]["tile"]) for e in said] == [("sm_90a", 4, 99), ("sm_90a", 12, 64), ("v5e", 10, 64)]
    assert [file.name for file in tmp_path.iterdir()] == ["tuned.json"]
    before = path.read_text()
    with pytest.raises(ValueError, match="provenance must be heuristic or have device, gb_s, jax, command, date; got 'guess'"):
        save(path, [entry(5), entry(6, provenance="guess")])
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"provenance": None}, "provenance must be heuristic or have"),
        ({"provenance": MEASURED | {"gb_s": "fast"}}, "gb_s must be float; got 'fast'"),
        ({"bucket": 3.0}, "bucket must be int; got 3.0"),
        ({"config": []}, r"config must be dict; got \[\]"),
    ],
)
def test_complaints(changed: dict, why: str):
    with pytest.raises(ValueError, match=why):
        raise ValueError(complaints(entry(**changed))[0])
    assert complaints(entry()) == []


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_what_is_shipped_is_whole_and_for_chips_and_backends_that_there_are(op):
    path = ROOT / op.name / "tuned.json"
    entries = json.loads(path.read_text()) if path.exists() else []
    assert [complaints(e) for e in entries] == [[]] * len(entries)
    assert {e["chip"] for e in entries} <= {*(f"cpu {name}" for name in CPUS), *(c.name for c in CHIPS)}
    assert {e["backend"] for e in entries} <= {b.name for b in op.backends}
    places = [place_of(e) for e in entries]
    assert places == sorted(places) and len({str(p) for p in places}) == len(places)


def test_a_list_shorter_than_a_long_iteration_goes_by_rule():
    """An entry of a larger call, looked up by a smaller one, must not make it compute what it has not."""
    spec = dataclasses.replace(TYPICAL_DECODE, rows=1, blocks=16)
    with trying("paged_decode", "xla", xla.Config(8, 4)):
        assert xla.config_of(spec, None) == xla.Config(8, 4)
    with trying("paged_decode", "xla", xla.Config(16, 4)):
        assert xla.config_of(spec, None) == xla.default_config(spec, None)


@pytest.mark.parametrize(("cache", "mib"), [(0, 16), (260 << 20, 16), (32 << 20, 8), (1 << 20, 4)])
def test_a_long_iteration_stays_in_the_cache_of_a_cpu(cache: int, mib: int):
    """By rule: a quarter of it, at most 16 MiB, and never less than a short one. Other chips have no such bound."""
    spec = dataclasses.replace(TYPICAL_DECODE, rows=64, blocks=64)
    each = xla.block_bytes(spec.pool, spec.dtype)
    config = xla.default_config(spec, dataclasses.replace(cpu(), fast_memory=cache))
    assert config.pairs * each == 4 << 20 and config.pairs * config.long * each == mib << 20
    assert xla.default_config(spec, chip("sm_80")).long == 4
