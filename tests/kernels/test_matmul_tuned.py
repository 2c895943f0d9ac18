"""Tuned sizes of quant_matmul and grouped_matmul: each kernel takes what was measured for its chip, where the call fits into it."""

import dataclasses
from pathlib import Path

import jax
import pytest

from pallas_kernels import OPS
from pallas_kernels.common import tuning
from pallas_kernels.common.targets import CHIPS, Chip, chip, cpu
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped_gpu
from pallas_kernels.grouped_matmul import mosaic_tpu as grouped_tpu
from pallas_kernels.grouped_matmul import triton as grouped_triton
from pallas_kernels.grouped_matmul.spec import TYPICAL_GROUPED, grouped_key
from pallas_kernels.quant_matmul import mosaic_gpu as quant_gpu
from pallas_kernels.quant_matmul import mosaic_tpu as quant_tpu
from pallas_kernels.quant_matmul import triton as quant_triton
from pallas_kernels.quant_matmul.spec import TYPICAL_MATMUL, matmul_key
from pallas_kernels.workload_matmul import Grouped, Quantized

MODULES = [
    *((module, c) for module in (quant_tpu, grouped_tpu) for c in CHIPS if c.platform == "tpu"),
    *((module, chip("sm_90a")) for module in (quant_gpu, grouped_gpu)),
    *((module, c) for module in (quant_triton, grouped_triton) for c in CHIPS if c.platform == "cuda"),
]


def save(root: Path, op: str, backend: str, chip_name: str, key: tuning.Key, config) -> None:
    entry = {"backend": backend, "chip": chip_name, "shape": dict(key.shape), "bucket": key.bucket, "provenance": "heuristic"}
    (root / op).mkdir(exist_ok=True)
    tuning.save(root / op / "tuned.json", [entry | {"config": dataclasses.asdict(config)}])


@pytest.mark.parametrize(("module", "target"), MODULES, ids=lambda x: getattr(x, "__name__", getattr(x, "name", "")))
def test_what_was_measured_is_taken_where_it_fits(module, target: Chip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    _, op, backend = module.__name__.split(".")
    spec, key = (TYPICAL_MATMUL, matmul_key) if op == "quant_matmul" else (TYPICAL_GROUPED, grouped_key)
    rule, *others = module.candidates(spec, target)
    assert module.config_of(spec, target) == rule and others and rule not in others
    assert all(module.fits(spec, config, target) for config in (rule, *others))
    save(tmp_path, op, backend, target.name, key(spec), others[-1])
    assert module.config_of(spec, target) == others[-1]
    assert module.config_of(dataclasses.replace(spec, tokens=1), target) == others[-1]  # rounded up
    assert module.config_of(dataclasses.replace(spec, inputs=2048), target) != others[-1]
    far = dataclasses.replace(rule, outputs=1 << 20) if hasattr(rule, "outputs") else dataclasses.replace(rule, stages=1 << 20)
    save(tmp_path, op, backend, target.name, key(spec), far)
    assert module.config_of(spec, target) == rule


@pytest.mark.parametrize("load", [Quantized(3, 512, 4096, "float32"), Grouped(80, 64, 128, "float32")], ids=lambda x: x.name)
def test_the_ops_take_what_is_in_their_file(load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tuning, "ROOT", tmp_path)
    backend = next(op for op in OPS if op.name == load.op).backends[-1]
    programs = []
    for config in backend.candidates(load.spec, cpu())[:2]:
        save(tmp_path, load.op, "xla", cpu().name, load.key, config)
        programs.append(jax.jit(load.function("xla")).lower(*load.shapes()).as_text())
    assert programs[0] != programs[1]
