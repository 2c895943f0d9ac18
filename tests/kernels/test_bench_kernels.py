"""bench.kernels and bench.gpu_checks, run on this CPU with small sizes; figures are not judged, how they are made is."""

import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import gpu_checks, kernels, rivals
from bench.kernels import BIG, BIG_FP8, LONG, PREFILL, Device, Row, goals, repeated
from pallas_kernels import OPS
from pallas_kernels.common.dispatch import Backend
from pallas_kernels.common.targets import chip
from pallas_kernels.workload import Attention, Write
from pallas_kernels.workload_matmul import Grouped, Quantized

CASE = Attention(3, 40, kv_heads=2, group=2, width=16, block_size=16, dtype="float32")


def test_everything_runs_and_is_written(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert (
        kernels.main(["--quick", "--budget", "0.002", "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.svg")]) == 0
    )
    report = json.loads((tmp_path / "a.json").read_text())
    assert {(r["op"], r["by"]) for r in report["rows"]} >= {
        ("paged_decode", "xla"),
        ("paged_decode", "gather all"),
        ("paged_attention", "xla"),
        ("paged_attention", "gather all"),
        ("kv_write", "xla_tokens"),
        ("quant_matmul", "xla"),
        ("grouped_matmul", "xla"),
    }
    assert all(r["microseconds"] > 0 for r in report["rows"] if not r["why"])
    assert report["device"]["read"] > 0 and report["device"]["matrix"] > 0
    assert {goal["reached"] for goal in report["goals"]} == {None}
    out = capsys.readouterr().out
    assert out.count("wanted") == out.count("not measured") == len(report["goals"])
    assert "read bandwidth measured on cpu" in (tmp_path / "a.svg").read_text()


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--json", "/nowhere/x.json"], "--json must be in a folder that exists; got /nowhere/x.json"),
        (["--json", "/"], "--json must be a file and no folder; got /"),
        (["--plot", "/nowhere/x.svg"], "--plot must be in a folder that exists; got /nowhere/x.svg"),
        (["--plot", "x.foo"], "--plot must end in .svg or .png; got x.foo"),
        (
            ["--only", "nosuch"],
            "--only must be in the op and name of a case, of paged_decode, paged_attention, kv_write, .*; got nosuch",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_written_or_matches_nothing_is_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, argv: list[str], told: str
):
    monkeypatch.setattr(kernels, "device_at_hand", lambda quick: pytest.fail("measured"))
    with pytest.raises(SystemExit):
        kernels.main(argv)
    assert re.search(f"error: {told}\n", capsys.readouterr().err)


def test_only_chooses_by_op_and_name():
    assert kernels.chosen_loads("cpu", True, None) == kernels.chosen_loads("cuda", True, "") == list(kernels.QUICK)
    assert kernels.chosen_loads("cpu", False, "kv_write") == [load for load in kernels.ON_CPU if load.op == "kv_write"] != []


def test_checks_on_a_gpu_need_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.setattr(gpu_checks, "compare", lambda *_: pytest.fail("checked"))
    (tmp_path / "file").touch()
    for folder in (tmp_path / "none", tmp_path / "file"):
        with pytest.raises(SystemExit):
            gpu_checks.main([str(folder), "--quick"])
        assert f"folder must be one that exists; got {folder}" in capsys.readouterr().err


def test_calls_are_made_one_after_the_other():
    """As many as asked for, each of the result before (kv_write), or with its input as it was (attention)."""
    add = lambda x, y: x + y
    assert repeated(add, 0, 5, True)(jnp.float32(1), jnp.float32(2)) == 11
    assert repeated(add, 1, 5, False)(jnp.float32(1), jnp.float32(2)) == 3
    text = jax.jit(repeated(CASE.function(None), 1, 7, False)).lower(*CASE.shapes()).as_text()
    assert "dense<7>" in text
    product = Quantized(3, 64, 48, "float32", 32)
    args = product.arguments()
    once, thrice = (np.asarray(jax.jit(repeated(product.function(None), 1, times, False))(*args)) for times in (1, 3))
    np.testing.assert_allclose(once, thrice, rtol=1e-6)
    write = Write(3, 40, kv_heads=2, width=16, block_size=16, dtype="float32")
    args = write.arguments()
    once, thrice = (jax.jit(repeated(write.function(None), 0, times, True))(*args) for times in (1, 3))
    np.testing.assert_array_equal(once, thrice)


@pytest.mark.parametrize("new", [7])
def test_the_control_computes_the_same(new: int):
    """Gathering the whole context is slower, not something else."""
    case = dataclasses.replace(CASE, new=new)
    args = case.arguments()
    ours = jax.tree.leaves(case.function(None)(*args))[0]
    run = rivals.gather_all(case, args, "cpu")
    assert run is not None
    np.testing.assert_allclose(np.asarray(run()).reshape(ours.shape), ours, atol=2e-5)
    assert rivals.gather_all(dataclasses.replace(case, window=3), args, "cpu") is None
    assert rivals.jax_kernel(case, args, "cpu") is None


def test_rivals_of_products_compute_the_same():
    case = Grouped(9, 32, 24, "float32", 3)
    args = case.arguments()
    run = rivals.ragged_dot(case, args, "cpu")
    assert run is not None and rivals.whole_weights(case, args, "cpu") is None and rivals.megablox(case, args, "cpu") is None
    np.testing.assert_allclose(run(), case.function(None)(*args), rtol=1e-5, atol=1e-5)
    quantized = Quantized(3, 64, 48, "float32")
    run = rivals.whole_weights(quantized, quantized.arguments(), "cpu")
    assert run is not None and run().shape == (3, 48) and rivals.ragged_dot(quantized, (), "cpu") is None


def test_what_fails_says_why_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch):
    def broken(*_):
        raise RuntimeError("no memory")

    monkeypatch.setitem(rivals.RIVALS, "gather all", broken)
    device = Device("cpu", "cpu", None, 1.0, 1.0)
    rows = kernels.run_load(CASE, device, 0.001)
    assert [(r.by, r.why, r.chosen) for r in rows if r.by != "torch sdpa"] == [
        ("xla", "", False),
        ("numba_cpu", "", True),
        ("gather all", "RuntimeError: no memory", False),
    ]
    assert "not measured: RuntimeError: no memory" in kernels.line(rows[2], device)


def test_goals_are_of_what_was_measured():
    device = Device("NVIDIA H200", "cuda", chip("sm_90a"), 4000.0, 800.0)
    row = lambda load, us, gb_s, tflop_s=0.0: Row(load.op, load.name, "mosaic", True, us, gb_s, tflop_s)
    rows = [row(BIG, 600.0, 3600.0), row(BIG_FP8, 300.0, 3000.0), row(PREFILL, 1.0, 1.0, 400.0)]
    rows += [Row(LONG.op, LONG.name, "mosaic", True, None, why="RuntimeError")]
    reached = {goal["goal"]: goal["reached"] for goal in goals(rows, device)}
    assert list(reached.values()) == [0.9, None, 2.0, 0.5, *[None] * 8]
    assert {goal["reached"] for goal in goals(rows, dataclasses.replace(device, name="NVIDIA A100"))} == {None}


def test_floors_are_those_of_the_notes():
    assert BIG.bytes_floor == pytest.approx(64 * 8192 * 2 * 8 * 128 * 2, rel=0.01)
    assert BIG.flops == 4 * 64 * 32 * 128 * 8192
    assert PREFILL.flops == pytest.approx(4 * 32 * 128 * (2048 * 6144 + 2048 * 2048 / 2), rel=0.001)
    windowed = dataclasses.replace(BIG, window=1024)
    assert windowed.bytes_floor == pytest.approx(BIG.bytes_floor / 8, rel=0.07)
    assert BIG_FP8.bytes_floor == pytest.approx(BIG.bytes_floor * (128 + 4) / 256, rel=0.01)


def test_wrong_kernels_are_found_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    report = {"device": {"name": "cpu", "read": 1.0}, "rows": [{"op": "a", "case": "b", "by": "c", "gb_s": 0.5}]}
    monkeypatch.setattr(kernels, "main", lambda argv: Path(argv[1]).write_text(json.dumps(report)))
    assert gpu_checks.main([str(tmp_path), "--quick"]) == 0
    report = json.loads((tmp_path / "cpu.json").read_text())
    assert len(report["checks"]) == 5 and report["rows"] and (tmp_path / "cpu.svg").exists()
    op = dataclasses.replace(OPS[0], backends=(Backend("off", (), ""), OPS[0].backends[-1]))
    monkeypatch.setattr(gpu_checks, "OPS", (op,))
    function = Attention.function
    for factors, error in (((1.1, 1), 0.1), ((1, 1.2), 0.2), ((1, np.nan), np.nan)):  # of the result, and of the second one

        def off(self, backend, factors=factors):
            return lambda *args: [x * factor for x, factor in zip(function(self, "xla")(*args), factors, strict=True)]

        monkeypatch.setattr(
            Attention, "function", lambda self, backend, off=off: (off if backend == "off" else function)(self, backend)
        )
        right, wrong = gpu_checks.compare(CASE, "cpu", None)
        assert right["ok"] and not wrong["ok"] and wrong["error"] == pytest.approx(error, rel=0.01, nan_ok=True)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_stored_numbers_may_be_neighbours_in_few_places(dtype: str):
    every = np.arange(256, dtype=np.uint8).view(dtype)
    every = every[np.isfinite(every.astype(np.float32))]
    values, numbers = every.astype(np.float32), np.asarray(gpu_checks.numbered(jnp.asarray(every)))
    order = np.argsort(numbers, kind="stable")
    assert (np.diff(values[order]) >= 0).all() and set(np.diff(numbers[order])) <= {0, 1}  # 0 and -0 are one number
    truth = np.zeros(1000, np.int32)
    assert gpu_checks.error_of(truth + (np.arange(1000) < 5), truth) == 0.005
    assert gpu_checks.error_of(truth + 2 * (np.arange(1000) < 1).astype(np.int32), truth) == np.inf
