"""python -m pallas_kernels.aot: which cases there are, what counts as a failure. The compilers are played here; test_aot_compile.py
and make aot have the real ones."""

import dataclasses
import importlib
import json
from pathlib import Path

import pytest

from pallas_kernels import OPS
from pallas_kernels.aot.cases import POOL, PRODUCTS, config_of_entry, load_of_entry, loads_of, most_temporary
from pallas_kernels.aot.compile import CompileError
from pallas_kernels.aot.worker import Report
from pallas_kernels.common import tuning
from pallas_kernels.common.dispatch import Backend, Op
from pallas_kernels.common.targets import CHIPS, chip
from pallas_kernels.paged_decode import xla
from pallas_kernels.workload import Attention, Write
from pallas_kernels.workload_matmul import Quantized

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
    assert short == 0 and len(few) == len(CHIPS) * 2 + 4 * 3
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


@pytest.mark.parametrize("name", [*POOL, *PRODUCTS])
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
    for name, (first, *_) in POOL.items():
        (op,) = [op for op in OPS if op.name == name]
        loads = loads_of(op, False, "cuda")
        assert len({load.name for load in loads}) == len(loads) >= 15
        assert isinstance(first, Write if name == "kv_write" else Attention)
        assert loads_of(op, True, "tpu")[0] == dataclasses.replace(first, block_size=128)


def test_every_product_has_cases_that_differ_and_that_are_taken():
    assert {op.name for op in OPS} == {*POOL, *PRODUCTS}
    for name in PRODUCTS:
        (op,) = [op for op in OPS if op.name == name]
        loads = loads_of(op, False, "cuda")
        assert len({load.name for load in loads}) == len(loads) > len(loads_of(op, True, "cuda"))
        for target in CHIPS:
            kernels = [b for b in op.backends if target.platform in b.platforms]
            for load in loads_of(op, True, target.platform):
                assert any(b.refuses(load.spec, target.platform, target) is None for b in kernels)


@pytest.mark.parametrize(
    ("change", "result"),
    [
        ({}, None),
        ({"spill_bytes": 8}, "spills 8 bytes of registers"),
        ({"temp_bytes": 2 * 4096 * 14336}, "has temporaries of 117440512 bytes, more than the 31457280 of activations and sums"),
    ],
    ids=str,
)
def test_a_product_must_not_spill_nor_expand_its_weights_in_memory(change: dict, result: str | None):
    (op,) = [op for op in OPS if op.name == "quant_matmul"]
    (load, *_) = loads_of(op, True, "cuda")
    assert isinstance(load, Quantized) and most_temporary(load) < 4096 * 14336
    case = table.Case(op, op.backends[1], chip("sm_90a"), load)
    assert table.fault(case, dataclasses.replace(GOOD, **change)) == result


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--backend", "nosuch"], "--backend must be one of fast, xla, xla_tokens; got nosuch"),
        (["--op", "kv_write", "--backend", "xla", "--backend", "fast"], "--backend must be one of fast, xla_tokens; got xla"),
        (
            ["--op", "kv_write", "--chip", "sm_80", "--backend", "fast"],
            "--op, --chip and --backend must leave a case; got none of kv_write by fast for sm_80",
        ),
        (["--op", "kv_write", "--chip", "sm_80"], "must leave a case; got none of kv_write by any backend for sm_80"),
        (["--json", "/nowhere/x.json"], "--json must be in a folder that exists; got /nowhere/x.json"),
        (["--json", "/"], "--json must be a file and no folder; got /"),
    ],
    ids=str,
)
def test_what_makes_no_table_is_refused_before_anything_is_compiled(
    compilers, capsys: pytest.CaptureFixture, argv: list[str], told: str
):
    with pytest.raises(SystemExit):
        table.main(argv)
    said = capsys.readouterr()
    assert said.err.endswith(f"{told}\n")
    assert said.out == "" and compilers[1] == []


def test_a_compiler_that_is_missing_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(table, "missing", lambda chip: "compiles for TPU: needs libtpu (make aot)")
    with pytest.raises(SystemExit):
        table.main(["--chip", "v5e"])
    assert "v5e: compiles for TPU: needs libtpu (make aot)" in capsys.readouterr().err
