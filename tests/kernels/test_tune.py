"""The tuner: run for real on this CPU, and with a candidate that does not compile."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import jax
import pytest

from pallas_kernels import OPS, tune
from pallas_kernels.common import tuning
from pallas_kernels.common.dispatch import Backend
from pallas_kernels.common.targets import chip_for, cpu
from pallas_kernels.common.tuning import complaints, load, look_up
from pallas_kernels.measure import with_donation
from pallas_kernels.paged_decode import xla
from pallas_kernels.tune import Trial, best_of, default_loads, entry_of, load_of, main, try_all
from pallas_kernels.workload import Attention, Write
from pallas_kernels.workload_matmul import Grouped, Quantized

SMALL = "rows=3,context=40,kv_heads=1,group=2,width=8,block_size=16,dtype=float32"


def test_what_it_writes_is_what_the_op_looks_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    out, spec = tmp_path / "tuned.json", load_of("paged_decode", SMALL).spec
    few = xla.candidates(spec, cpu())[:3]
    monkeypatch.setattr(
        tune, "OPS", (dataclasses.replace(tune.OPS[0], backends=(Backend("xla", (), "", candidates=lambda *_: few),)),)
    )
    seconds = iter((3e-3, 5e-3, 2e-3, 4e-3, 1e-3, 2e-3, 3e-3, 6e-3, 2e-3))  # in turns: the best of each counts
    compiled = []
    monkeypatch.setattr(tune, "with_donation", lambda f, *_: compiled.append(f.as_text()))
    monkeypatch.setattr(tune, "seconds_of", lambda *_, **__: next(seconds))
    assert main(["paged_decode", "--load", SMALL, "--out", str(out)]) == 0
    assert "3.00 times as fast as by rule" in capsys.readouterr().out
    assert len(set(compiled)) == 3  # every candidate is another program
    (entry,) = json.loads(out.read_text())
    assert complaints(entry) == [] and entry["chip"] == cpu().name and entry["provenance"]["jax"] == jax.__version__
    assert entry["provenance"]["command"] == f"python -m pallas_kernels.tune paged_decode --load {SMALL} --out {out}"
    key = load_of("paged_decode", SMALL).key
    assert look_up(load(out), "xla", cpu().name, key, xla.default_config(spec, cpu())) == few[1] != few[0]
    assert look_up([], "xla", cpu().name, key, xla.default_config(spec, cpu())) == few[0]


def test_it_measures(tmp_path: Path):
    """The whole command, on one call and all of its candidates."""
    out = tmp_path / "tuned.json"
    text = "rows=2,context=16,kv_heads=1,group=1,width=8,block_size=16,dtype=float32"
    assert main(["paged_decode", "--load", text, "--out", str(out), "--budget", "0.001"]) == 0
    (entry,) = json.loads(out.read_text())
    assert entry["provenance"]["gb_s"] >= 0 and entry["bucket"] == 5


@pytest.mark.parametrize(
    ("op", "load"),
    [
        ("quant_matmul", "tokens=2,inputs=64,outputs=32,dtype=float32"),
        ("grouped_matmul", "tokens=70,inputs=8,outputs=16,experts=8"),
    ],
)
def test_it_measures_products(op: str, load: str, tmp_path: Path):
    out = tmp_path / "tuned.json"
    assert main([op, "--load", load, "--out", str(out), "--budget", "0.001"]) == 0
    (entry,) = json.loads(out.read_text())
    assert entry["backend"] == "xla" and entry["shape"] == dict(load_of(op, load).key.shape)


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_what_is_tuned_without_being_told_has_something_to_choose(op, platform: str):
    """On a CPU the write to the pool alone has nothing."""
    loads = default_loads(op.name, platform)
    some = [
        b for b in op.backends if any(len(b.candidates(x.spec, chip_for(platform))) > 1 for x in loads if takes(b, x, platform))
    ]
    assert len({load.key.shape + (load.key.bucket,) for load in loads}) == len(loads)  # an entry for each
    assert bool(some) == ((op.name, platform) not in (("kv_write", "cpu"), ("paged_attention", "cpu"), ("kv_write", "cuda")))


def takes(backend: Backend, load, platform: str) -> bool:
    return backend.refuses(load.spec, platform) is None


def test_a_candidate_that_fails_is_told_and_left_out():
    said = []
    broken = Backend("xla", (), "", candidates=lambda spec, chip: [xla.Config(0, 1), xla.Config(2, 1)])
    (trial,) = try_all(load_of("paged_decode", SMALL), broken, None, 0.001, said.append)  # pyright: ignore[reportArgumentType]
    assert trial.config == xla.Config(2, 1)
    assert "Config(pairs=0, long=1): " in said[0] and "Error" in said[0] and "GB/s" in said[1]


def test_a_candidate_that_fails_on_the_device_is_told_and_its_arguments_are_made_anew(monkeypatch: pytest.MonkeyPatch):
    """In the second round, after its call gave the pool away: the others go on with another."""
    call = Write(2, 32, kv_heads=1, width=8, block_size=16, dtype="float32")
    backend = Backend("xla_tokens", (), "", candidates=lambda spec, chip: ["first", "second"])  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(tune, "trying", lambda *_: contextlib.nullcontext())
    said, times, given = [], iter(range(99)), []

    def seconds(f, **_):
        jax.block_until_ready(f())
        if next(times) == 2:
            given[0][0].delete()
            raise RuntimeError("out of memory")
        return 1e-3

    def remember(f, args, donate):
        given.append(args)
        return with_donation(f, args, donate)

    monkeypatch.setattr(tune, "seconds_of", seconds)
    monkeypatch.setattr(tune, "with_donation", remember)
    (trial,) = try_all(call, backend, None, 0.001, said.append)
    assert trial.config == "second" and said[0] == "  first: RuntimeError: out of memory" and next(times) == 5
    assert given[0] is given[1]  # one pool for all


def test_the_rule_stays_unless_something_gains():
    rule, little, much = Trial("rule", 1.0), Trial("little", 0.99), Trial("much", 0.9)
    assert best_of([rule, little]) is rule
    assert best_of([rule, little, much]) is much


def test_loads_are_read():
    assert load_of("kv_write", "rows=2,context=64,scales=token,dtype=int8") == Write(2, 64, scales="token", dtype="int8")
    assert load_of("paged_attention", "rows=2,context=64") == Attention(2, 64, ragged=True)
    assert load_of("quant_matmul", "tokens=3,inputs=64,outputs=8,group=32,zeros=1") == Quantized(3, 64, 8, group=32, zeros=True)
    assert load_of("grouped_matmul", "tokens=3,inputs=64,outputs=8,experts=4") == Grouped(3, 64, 8, experts=4)
    with pytest.raises(ValueError, match="a load must have tokens, inputs and outputs; got tokens=3"):
        load_of("quant_matmul", "tokens=3")
    with pytest.raises(ValueError, match="a load must be name=value pairs of rows, context, .*; got row=2"):
        load_of("paged_decode", "row=2,context=3")
    with pytest.raises(ValueError, match="a load must have rows and context; got rows=2"):
        load_of("paged_decode", "rows=2")
    assert load_of("quant_matmul", "tokens=3,inputs=64,outputs=8,int8_activations=1").spec.int8_activations is True


@pytest.mark.parametrize(
    ("op", "load", "told"),
    [
        ("paged_decode", "rows=a,context=3", "rows must be an integer from 1 to 999999999; got a"),
        ("paged_decode", "rows=1,context=-3", "context must be an integer from 1 to 999999999; got -3"),
        ("paged_decode", "rows=1,context=3,window=0", "window must be an integer from 1 to 999999999; got 0"),
        ("paged_decode", f"rows=1,context={'9' * 5000}", "context must be an integer from 1 to 999999999; got 99"),
        ("paged_decode", "rows=1,context=3,dtype=foo", "dtype must be one of float32, .*, int8, float8_e4m3fn; got foo"),
        ("quant_matmul", "tokens=1,inputs=3,outputs=3,dtype=int8", "dtype must be one of float32, bfloat16; got int8"),
        ("kv_write", "rows=1,context=3,scales=bar", "scales must be one of none, tensor, token; got bar"),
        ("grouped_matmul", "tokens=1,inputs=3,outputs=3,experts=0", "experts must be an integer from 1 to 999999999; got 0"),
        ("quant_matmul", "tokens=1,inputs=3,outputs=3,group=-1", "group must be an integer from 0 to 999999999; got -1"),
        ("quant_matmul", "tokens=1,inputs=3,outputs=3,zeros=2", "zeros must be 0 or 1; got 2"),
        ("quant_matmul", "tokens=1,inputs=3,outputs=3,group=33", "group must be one of 0, 32, 64, 128; got 33"),
        ("quant_matmul", "tokens=1,inputs=3,outputs=3,zeros=1", "zeros must be 0 with group 0, which is int8 weights; got 1"),
        (
            "quant_matmul",
            "tokens=1,inputs=3,outputs=3,group=32,int8_activations=1",
            "int8_activations must be 0 with group 32; got 1",
        ),
        ("paged_decode", "rows=1,context=3,scales=token", "scales must be none for bfloat16; got token"),
        ("kv_write", "rows=1,context=3,dtype=int8", "scales must be tensor or token for int8; got none"),
        ("kv_write", "rows=1,context=3,new=4", "new must be at most the 3 tokens of context; got 4"),
        ("paged_decode", "rows=1,context=3,new=2", "new must be 1 for paged_decode; got 2"),
        ("paged_attention", "rows=1,context=3,ragged=0", "a load must be name=value pairs of rows, .*, new; got ragged=0"),
        (
            "kv_write",
            "rows=1000000,context=1000000",
            "a load must have sizes that the op can count; got rows=1000000,context=1000000",
        ),
    ],
)
def test_a_load_that_cannot_be_is_one_sentence(op: str, load: str, told: str, capsys: pytest.CaptureFixture):
    with pytest.raises(ValueError, match=told):
        load_of(op, load)
    with pytest.raises(SystemExit):
        main([op, "--load", load])
    assert "pallas_kernels.tune: error: " in capsys.readouterr().err


def test_paths_and_names_are_checked_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(tune, "try_all", lambda *_: pytest.fail("measured"))
    nowhere = tmp_path / "none" / "t.json"
    for argv, told in (
        (["--out", str(nowhere)], f"--out must be in a folder that exists; got {nowhere}"),
        (["--out", str(tmp_path)], f"--out must be a file and no folder; got {tmp_path}"),
        (["--backend", "none"], "--backend must be one of mosaic_tpu, .*, xla; got none"),
    ):
        with pytest.raises(SystemExit):
            main(["paged_decode", *argv])
        assert re.search(told, capsys.readouterr().err)


def test_what_is_not_measured_says_why_and_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture):
    out = tmp_path / "t.json"
    for op, backend, told in (
        ("paged_decode", "mosaic_tpu", "float32, mosaic_tpu: it is for tpu\n"),
        ("kv_write", "xla_tokens", "\n  xla_tokens has no sizes to choose\n"),
    ):
        load = "rows=3,context=40,kv_heads=1,width=8,block_size=16,dtype=float32"
        assert main([op, "--backend", backend, "--load", load, "--out", str(out)]) == 1
        said = capsys.readouterr().out
        assert told in said and f"{out}: not written, for nothing was measured" in said and not out.exists()


def test_a_call_that_the_memory_does_not_hold_is_told(monkeypatch: pytest.MonkeyPatch):
    def too_much(self):
        raise MemoryError

    monkeypatch.setattr(Attention, "arguments", too_much)
    said = []
    assert try_all(load_of("paged_decode", SMALL), OPS[0].backends[-1], None, 0.001, said.append) == []
    assert said == ["  the arguments: MemoryError: "]


def test_the_op_takes_what_is_in_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    call = load_of("paged_decode", SMALL)
    (tmp_path / "paged_decode").mkdir()
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    programs = []
    for config in (xla.Config(1, 1), xla.Config(4, 2)):
        entry = entry_of(call, OPS[0].backends[-1], cpu(), Trial(config, 1.0), "a machine", "a command")
        tuning.save(tmp_path / "paged_decode" / "tuned.json", [entry])
        programs.append(jax.jit(call.function("xla")).lower(*call.shapes()).as_text())
    assert programs[0] != programs[1]
