"""quant_matmul and grouped_matmul for Hopper in Pallas's interpreter, where unwritten memory is NaN, against float64.

It has no product from registers: expanded weights go through shared memory there (`through_shared`).
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import grouped_matmul, quant_matmul
from pallas_kernels.common.targets import chip
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.grouped_matmul import mosaic_gpu as grouped
from pallas_kernels.grouped_matmul import reference as grouped_exact
from pallas_kernels.grouped_matmul import visits
from pallas_kernels.grouped_matmul.reference import error_bound as grouped_bound
from pallas_kernels.grouped_matmul.spec import TYPICAL_GROUPED, GroupedSpec
from pallas_kernels.quant_matmul import cases as quant_cases
from pallas_kernels.quant_matmul import mosaic_gpu as quant
from pallas_kernels.quant_matmul.reference import error_bound, reference
from pallas_kernels.quant_matmul.spec import TYPICAL_MATMUL, MatmulSpec
from tests.kernels.gpu_interpreter import GO_ON, no_race

PLAIN, RACES = plgpu.InterpretGPUParams(), plgpu.InterpretGPUParams(detect_races=True, **GO_ON)
HOPPER = chip("sm_90a")


def spec_of(case: quant_cases.Case) -> MatmulSpec:
    sizes = case.tokens, case.inputs, case.outputs, case.dtype, case.out_dtype
    return MatmulSpec(*sizes, group=case.group, zeros=case.zeros, int8_activations=case.int8_activations)


def check_quant(case: quant_cases.Case, params: plgpu.InterpretGPUParams = PLAIN, **change) -> np.ndarray:
    x, weight = quant_cases.make(case)
    options = {"int8_activations": case.int8_activations, "out_dtype": case.out_dtype}
    small = {"tokens": 8, "stages": 2, "splits": 1, "through_shared": True} | change
    config = dataclasses.replace(quant.choose_config(spec_of(case), HOPPER), **small)
    got = np.asarray(quant.matmul(x, weight, **options, chip=HOPPER, config=config, interpret=params))
    assert params is not RACES or no_race()
    error = np.abs(got.astype(np.float64) - reference(x, weight, int8_activations=case.int8_activations))
    assert got.dtype == case.out_dtype and (error <= error_bound(x, weight, **options)).all()
    return got


def check_grouped(case: grouped_cases.Case, rows: int, params: plgpu.InterpretGPUParams = PLAIN) -> np.ndarray:
    args = grouped_cases.make(case)
    fixed = {"chip": HOPPER, "config": grouped.Config(rows, 64, 2), "interpret": params, "out_dtype": case.out_dtype}
    got = np.asarray(grouped.matmul(*args, **fixed))
    assert params is not RACES or no_race()
    assert got.dtype == case.out_dtype and not got[sum(case.sizes) :].any()
    error = np.abs(got.astype(np.float64) - grouped_exact(*args))
    assert (error <= grouped_bound(*args, case.out_dtype)).all()
    return got


def test_int8_weights_in_splits_of_which_one_is_empty():
    case = quant_cases.Case("int8", tokens=9, inputs=192, outputs=64)  # three steps in four splits
    assert (check_quant(case, splits=4) == check_quant(case, splits=4)).all()


def test_int8_activations():
    check_quant(quant_cases.Case("w8a8", tokens=3, inputs=128, outputs=128, int8_activations=True))


def test_int4_weights():
    check_quant(quant_cases.Case("int4", tokens=5, inputs=200, outputs=64, group=32, zeros=True, out_dtype="bfloat16"))


@pytest.mark.parametrize("rows", [64, 128])
def test_grouped_matmul(rows: int):
    case = grouped_cases.Case("rows", (61, 0, 70, 1), past=9, inputs=64, outputs=64, out_dtype="bfloat16")
    check_grouped(case, rows)


RACY = grouped_cases.Case("races", (5, 0, 17), past=3, inputs=192, outputs=64)  # three stages in two slots


def test_no_races():
    check_quant(quant_cases.Case("int4", tokens=2, inputs=384, outputs=64, group=64, zeros=True), RACES, columns=64)
    assert (check_grouped(RACY, 64, RACES) == check_grouped(RACY, 64)).all()


def test_a_race_would_be_seen(monkeypatch: pytest.MonkeyPatch):
    """The control: nobody waits, so that a copy goes where another one does. The interpreter gives each copy to one of five
    threads; two of the same one are in order, and it may stop at barriers that nobody waited at: hence several tries."""
    monkeypatch.setattr(plgpu, "barrier_wait", lambda *args, **kwargs: None)

    def seen() -> bool:
        try:
            with contextlib.suppress(Exception):
                check_grouped(RACY, 64, RACES)
            return gpu_callbacks.get_races().races_found
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()

    assert any(seen() for _ in range(10))


def fits(case: quant_cases.Case) -> bool:
    return quant.supports(spec_of(case), HOPPER) is None


@pytest.mark.kernels_full
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in quant_cases.CASES if fits(c)])
def test_quant_matmul_in_full(case: quant_cases.Case, splits: int):
    check_quant(case, splits=splits, tokens=16)


@pytest.mark.kernels_full
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in grouped_cases.CASES if c.dtype == "bfloat16"])
def test_grouped_matmul_in_full(case: grouped_cases.Case, rows: int):
    check_grouped(case if case.outputs % 64 == 0 else case._replace(inputs=192, outputs=64), rows)


find_visits = jax.jit(visits.find_visits, static_argnums=(1, 2, 3))


@pytest.mark.parametrize("aligned", [1, 8])
@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_visited_once_by_its_expert(seed: int, aligned: int):
    rng, tokens, rows = np.random.default_rng(seed), 144, 16
    sizes = rng.integers(0, 21, 7) * rng.integers(0, 2, 7)
    found = jax.tree.map(np.asarray, find_visits(jnp.asarray(sizes, jnp.int32), tokens, rows, aligned))
    owner = np.full(tokens, -1)
    for expert, start, begin, end in zip(*found, strict=True):
        if begin < end:
            assert aligned * start <= begin and end <= aligned * start + rows and 0 <= aligned * start <= tokens - rows
            assert (owner[begin:end] == -1).all()
            owner[begin:end] = expert
    assert owner.tolist() == np.repeat(range(8), [*sizes, tokens - sizes.sum()]).tolist()


def test_one_row_an_expert_fits_the_list_of_visits():
    sizes = np.ones(24, np.int32)
    found = find_visits(jnp.asarray(sizes), 24, 16, 8)
    assert int((found.begin < found.end).sum()) == 24 <= len(found.begin)


def test_what_is_chosen_fits_shared_memory_and_fills_the_chip():
    for inputs, outputs, group in ((2048, 2048, 0), (14336, 4096, 0), (14336, 4096, 32), (28672, 8192, 128), (576, 576, 64)):
        for tokens in (1, 64, 4096):
            spec = MatmulSpec(tokens, inputs, outputs, "bfloat16", "float32", group, group > 0)
            config = quant.choose_config(spec, HOPPER)
            assert quant.supports(spec, HOPPER) is None and quant.shared_bytes(spec, config) <= HOPPER.fast_memory
            assert config.tokens <= 128 and spec.columns % config.columns == 0
            grouped_spec = GroupedSpec(tokens, inputs, outputs, 8, "bfloat16", "float32")
            assert grouped.supports(grouped_spec, HOPPER) is None
            assert grouped.shared_bytes(grouped_spec, grouped.choose_config(grouped_spec, HOPPER)) <= HOPPER.fast_memory
    few = quant.choose_config(MatmulSpec(1, 4096, 4096, "bfloat16", "bfloat16"), HOPPER)
    assert few.splits * 4096 // (64 * few.warpgroups) >= 0.9 * HOPPER.cores


@pytest.mark.parametrize(
    ("change", "name", "match"),
    [
        ({}, "sm_80", "is for sm_90a; got sm_80"),
        ({"dtype": "float32"}, "sm_90a", "takes bfloat16 activations; got float32: cast them, or quantize them"),
        ({"outputs": 100}, "sm_90a", "needs outputs in multiples of 64; got 100: pad the weight"),
        ({"inputs": 100}, "sm_90a", "needs inputs in multiples of 64; got 100: pad weight and activations"),
    ],
)
def test_what_quant_matmul_refuses(change: dict, name: str, match: str):
    assert match in str(quant.supports(dataclasses.replace(TYPICAL_MATMUL, **change), chip(name)))


@pytest.mark.parametrize(
    ("change", "name", "match"),
    [
        ({}, "sm_80", "is for sm_90a; got sm_80"),
        ({"dtype": "float32"}, "sm_90a", "takes bfloat16; got float32: cast both factors"),
        ({"outputs": 100}, "sm_90a", "needs inputs and outputs in multiples of 64; got 4096 and 100: pad the weights"),
    ],
)
def test_what_grouped_matmul_refuses(change: dict, name: str, match: str):
    assert match in str(grouped.supports(dataclasses.replace(TYPICAL_GROUPED, **change), chip(name)))


def test_a_refused_call_is_not_traced():
    x, weight = quant_cases.make(quant_cases.Case("int8", outputs=77))
    with pytest.raises(ValueError, match="quant_matmul cannot run as mosaic_gpu: it needs outputs in multiples of 64; got 77"):
        quant_matmul(x, weight, backend="mosaic_gpu")
    lhs, rhs, sizes = grouped_cases.make(grouped_cases.Case("odd", (3,), outputs=77))
    with pytest.raises(ValueError, match="grouped_matmul cannot run as mosaic_gpu: it needs inputs and outputs in multiples of 64"):
        grouped_matmul(lhs, rhs, sizes, backend="mosaic_gpu")
