"""python -m pallas_kernels.aot: which cases there are, what counts as a failure. The compilers are played here; test_aot_compile.py
and make aot have the real ones."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from pallas_kernels import OPS
from pallas_kernels.aot.cases import SHORT, config_of_entry, load_of_entry, loads_of
from pallas_kernels.aot.compile import CompileError
from pallas_kernels.aot.worker import Report
from pallas_kernels.common import tuning
from pallas_kernels.common.dispatch import Backend, Op
from pallas_kernels.common.targets import CHIPS, chip
from pallas_kernels.paged_decode import xla
from pallas_kernels.workload import Attention, Write

table = importlib.import_module("pallas_kernels.aot.__main__")
GOOD = Report("", 0.5, 1 << 40, 0, None, 92160, 150, 0, (), "")


def no_wide(spec, chip) -> str | None:
    return "takes heads up to 128 wide; got 192" if spec.width == 192 else None


DECODE = Op("paged_decode", (Backend("fast", ("tpu", "cuda"), "", no_wide, xla.candidates), Backend("xla", (), "")), None)
WRITE = Op("kv_write", (Backend("fast", ("tpu",), ""), Backend("xla_tokens", (), "")), None)


@pytest.fixture
def compilers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What a compiler answers, by chip; and the calls it was asked for."""
    answers: dict[str, Report | Exception] = {}
    asked = []

    def compile_for(chip: str, f, *shapes, donate):
        asked.append((chip, shapes, donate))
        tuning.tuned("paged_decode", "fast", None, tuning.Key((), 1), None)  # as a kernel does
        answer = answers.get(chip, GOOD)
        if isinstance(answer, Exception):
            raise answer
        return answer

    for name, value in {"compile_for": compile_for, "missing": lambda chip: None, "OPS": (DECODE, WRITE), "ROOT": tmp_path}.items():
        monkeypatch.setattr(table, name, value)
    return answers, asked


def run(*argv: str, path: Path) -> tuple[int, list[dict]]:
    code = table.main([*argv, "--json", str(path / "report.json")])
    return code, json.loads((path / "report.json").read_text())["rows"]


def test_backends_are_compiled_for_the_chips_of_their_platforms(compilers, tmp_path: Path):
    code, rows = run(path=tmp_path)
    assert code == 0
    assert {(r["op"], r["backend"], r["chip"]) for r in rows} == {
        *(("paged_decode", "fast", c.name) for c in CHIPS),
        *(("kv_write", "fast", c.name) for c in CHIPS if c.platform == "tpu"),
    }
    refused = [r for r in rows if r["result"] == "refused: it takes heads up to 128 wide; got 192"]
    assert len(refused) == len(CHIPS) and all(" D 192 " in r["case"] and "seconds" not in r for r in refused)
    assert all(r["registers"] == 150 for r in rows if r not in refused)
    short, few = run("--short", path=tmp_path)
    assert short == 0 and len(few) == len(CHIPS) * 2 + 4 * 2
    assert {r["chip"] for r in run("--chip", "v6e", "--op", "kv_write", path=tmp_path)[1]} == {"v6e"}
    assert {r["backend"] for r in run("--backend", "xla", path=tmp_path)[1]} == {"xla"}


@pytest.mark.parametrize(
    ("answer", "result"),
    [
        (CompileError("RESOURCE_EXHAUSTED: VMEM"), "failed: RESOURCE_EXHAUSTED: VMEM"),
        (KeyError("x"), "failed to trace: KeyError: 'x'"),
        (dataclasses.replace(GOOD, spill_bytes=180), "spills 180 bytes of registers"),
        (dataclasses.replace(GOOD, alias_bytes=0), r"writes \d+ bytes of pool, of which 0 are in place"),
        (dataclasses.replace(GOOD, temp_bytes=1 << 40), "has temporaries of 1099511627776 bytes, as large as a layer"),
    ],
    ids=str,
)
def test_what_a_backend_takes_and_cannot_do_is_a_failure(compilers, tmp_path: Path, answer, result: str):
    answers, _ = compilers
    answers["v5p"] = answer
    code, rows = run("--short", path=tmp_path)
    assert code == 1
    bad = [r for r in rows if r["result"] != "ok"]
    assert {r["chip"] for r in bad} == {"v5p"}
    with pytest.raises(AssertionError, match=result):
        raise AssertionError(bad[0]["result"])
    assert run("--short", "--chip", "v5e", path=tmp_path)[0] == 0  # the control


def test_tuned_entries_are_compiled_with_their_configs(compilers, tmp_path: Path, capsys: pytest.CaptureFixture):
    shape = {"block_size": 64, "dtype": "bfloat16", "group": 4, "kv_heads": 8, "scales": "none", "width": 128}
    entry = {"backend": "fast", "chip": "v5e", "shape": shape, "bucket": 19, "config": {"pairs": 3, "long": 1}}
    (tmp_path / "paged_decode").mkdir()
    tuning.save(tmp_path / "paged_decode" / "tuned.json", [entry | {"provenance": "heuristic"}])
    code, rows = run("--short", "--chip", "v5e", "--op", "paged_decode", path=tmp_path)
    (tuned,) = [r for r in rows if r["tuned"]]
    assert code == 0 and "Config(pairs=3, long=1)" in tuned["case"] and len(rows) == 3
    broken = entry | {"config": {"pairs": 3}, "provenance": "heuristic"}
    tuning.save(tmp_path / "paged_decode" / "tuned.json", [broken])
    code, rows = run("--short", "--chip", "v5e", "--op", "paged_decode", path=tmp_path)
    assert code == 1 and rows[-1]["result"] == "an entry of tuned.json that nothing can be made of"
    assert "1 failed" in capsys.readouterr().out


@pytest.mark.parametrize("name", SHORT)
def test_entries_become_calls_that_look_them_up(name: str):
    (op,) = [op for op in OPS if op.name == name]
    for load in loads_of(op, False, "cuda"):
        entry = {"shape": dict(load.key.shape), "bucket": load.key.bucket, "config": {"pairs": 2, "long": 1}}
        again = load_of_entry(op, entry)
        assert again is not None and again.key.shape == load.key.shape and again.key.bucket == load.key.bucket
    backend = Backend("xla", (), "", candidates=xla.candidates)
    assert config_of_entry(entry, backend, Attention(2, 64), chip("v5e")) == xla.Config(2, 1)
    assert load_of_entry(op, {"bucket": 3}) is None
    assert load_of_entry(Op("other", (), None), entry) is None


def test_every_op_on_the_pool_has_cases_that_differ():
    for name, (first, *_) in SHORT.items():
        (op,) = [op for op in OPS if op.name == name]
        loads = loads_of(op, False, "cuda")
        assert len({load.name for load in loads}) == len(loads) >= 15
        assert isinstance(first, Write if name == "kv_write" else Attention)
        assert loads_of(op, True, "tpu")[0] == dataclasses.replace(first, block_size=128)


def test_a_compiler_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(table, "missing", lambda chip: "compiles for TPU: needs libtpu (make aot)")
    with pytest.raises(SystemExit):
        table.main(["--chip", "v5e"])
    assert "v5e: compiles for TPU: needs libtpu (make aot)" in capsys.readouterr().err
