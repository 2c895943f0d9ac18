"""quant_matmul and grouped_matmul by Triton, in Pallas's interpreter, against float64: a few cases, and all with make kernels."""

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels import OPS
from pallas_kernels.common.dispatch import choose
from pallas_kernels.common.targets import CHIPS, chip
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.grouped_matmul import reference as grouped_exact
from pallas_kernels.grouped_matmul import triton as grouped
from pallas_kernels.grouped_matmul.reference import error_bound as grouped_bound
from pallas_kernels.grouped_matmul.spec import TYPICAL_GROUPED
from pallas_kernels.quant_matmul import cases as quant_cases
from pallas_kernels.quant_matmul import triton as quant
from pallas_kernels.quant_matmul.reference import error_bound, reference
from pallas_kernels.quant_matmul.spec import TYPICAL_MATMUL
from pallas_kernels.workload_matmul import Grouped, Quantized

GPUS = [c for c in CHIPS if c.platform == "cuda"]
A100 = chip("sm_80")


def twice(function, *args) -> np.ndarray:
    """What it gives, the same both times."""
    program = jax.jit(function)
    first, second = np.asarray(program(*args)), np.asarray(program(*args))
    assert (first == second).all()
    return first


def check_quant(case: quant_cases.Case, splits: int = 2) -> None:
    x, weight = quant_cases.make(case)
    options = {"int8_activations": case.int8_activations, "out_dtype": case.out_dtype}
    config = quant.Config(16, 32, case.group or 64, splits)
    got = twice(lambda x, weight: quant.matmul(x, weight, **options, chip=A100, config=config, interpret=True), x, weight)
    error = np.abs(got.astype(np.float64) - reference(x, weight, int8_activations=case.int8_activations))
    assert got.dtype == case.out_dtype and (error <= error_bound(x, weight, **options)).all()


def check_grouped(case: grouped_cases.Case, rows: int = 16) -> None:
    args = grouped_cases.make(case)
    fixed = {"chip": A100, "config": grouped.Config(rows, 64, 64), "interpret": True, "out_dtype": case.out_dtype}
    got = twice(lambda *args: grouped.matmul(*args, **fixed), *args)
    assert got.dtype == case.out_dtype and not got[sum(case.sizes) :].any()
    error = np.abs(got.astype(np.float64) - grouped_exact(*args))
    assert (error <= grouped_bound(*args, case.out_dtype)).all()


def named(cases, *names: str) -> list:
    return [pytest.param(case, id=case.name) for case in cases if not names or case.name in names]


SHARP = "int8 f32", "int8 odd sizes", "w8a8 odd sizes", "int4 64 odd sizes", "int4 64 zeros f32"


@pytest.mark.parametrize("case", named(quant_cases.CASES, *SHARP))
def test_quant_matmul(case: quant_cases.Case):
    check_quant(case, 5)  # more parts than there are steps


@pytest.mark.parametrize("case", named(grouped_cases.CASES, "even f32", "odd sizes", "nothing", "many small to bf16"))
def test_grouped_matmul(case: grouped_cases.Case):
    check_grouped(case)


def test_a_wrong_weight_would_be_seen():
    """The control of the bound: the halves of int4 weights exchanged."""
    x, weight = quant_cases.make(quant_cases.Case("control", group=32))
    swapped = weight._replace(values=(weight.values << 4) | ((weight.values >> 4) & 15))
    config = quant.Config(16, 32, 32, 1)
    got = quant.matmul(x, swapped, int8_activations=False, out_dtype="float32", chip=A100, config=config, interpret=True)
    error = np.abs(np.asarray(got, np.float64) - reference(x, weight))
    assert (error > error_bound(x, weight)).any()


@pytest.mark.kernels_full
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", named(quant_cases.CASES))
def test_quant_matmul_in_full(case: quant_cases.Case, splits: int):
    check_quant(case, splits)


@pytest.mark.kernels_full
@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("case", named(grouped_cases.CASES))
def test_grouped_matmul_in_full(case: grouped_cases.Case, rows: int):
    check_grouped(case, rows)


@pytest.mark.parametrize("load", [Quantized(5, 128, 64), Quantized(5, 128, 64, group=32), Grouped(5, 64, 32)], ids=lambda x: x.name)
def test_they_lower_for_a_gpu_on_a_machine_without_one(load):
    text = jax.jit(load.function("triton")).trace(*load.shapes()).lower(lowering_platforms=("cuda",)).as_text()
    assert "__gpu$xla.gpu.triton" in text


@pytest.mark.parametrize("target", GPUS, ids=lambda c: c.name)
def test_every_gpu_has_a_kernel_for_products(target):
    for op in OPS[-2:]:
        chosen = choose(op, op.typical, "cuda", target).name
        assert chosen == ("mosaic_gpu" if target.name == "sm_90a" else "triton")
        odd = dataclasses.replace(op.typical, outputs=100, inputs=100, dtype="float32")
        assert choose(op, odd, "cuda", target).name == "triton"


def test_a_weight_whose_bytes_it_cannot_count_is_refused():
    spec = dataclasses.replace(TYPICAL_MATMUL, inputs=1 << 16, outputs=1 << 15)
    assert quant.supports(spec, A100) == "counts the 2147483648 bytes of this weight in 32 bits; split the outputs"
    assert quant.supports(dataclasses.replace(spec, outputs=1 << 14), A100) is None


@pytest.mark.parametrize("target", GPUS, ids=lambda c: c.name)
def test_what_is_chosen_fits_and_is_the_first_candidate(target):
    for tokens in (1, 17, 64, 4096):
        for group, int8, dtype in (
            (0, False, "bfloat16"),
            (0, True, "float32"),
            (0, False, "float32"),
            (32, False, "bfloat16"),
            (128, False, "float32"),
        ):
            spec = dataclasses.replace(TYPICAL_MATMUL, tokens=tokens, group=group, int8_activations=int8, dtype=dtype)
            first, *others = quant.candidates(spec, target)
            assert first == quant.choose_config(spec, target) and quant.fits(spec, first, target) and first not in others
        for dtype in ("bfloat16", "float32"):
            spec = dataclasses.replace(TYPICAL_GROUPED, tokens=tokens, dtype=dtype)
            first, *others = grouped.candidates(spec, target)
            assert first == grouped.choose_config(spec) and grouped.fits(spec, first, target) and first not in others
    assert quant.candidates(TYPICAL_MATMUL, None) == [] and grouped.candidates(TYPICAL_GROUPED, None) == []
