"""quant_matmul and grouped_matmul for TPU in Pallas's interpreter, where unwritten memory is NaN, against float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import grouped_matmul, quant_matmul
from pallas_kernels.common.targets import CHIPS, chip
from pallas_kernels.grouped_matmul import cases as grouped_cases
from pallas_kernels.grouped_matmul import mosaic_tpu as grouped
from pallas_kernels.grouped_matmul import reference as grouped_exact
from pallas_kernels.grouped_matmul.reference import error_bound as grouped_bound
from pallas_kernels.grouped_matmul.spec import TYPICAL_GROUPED
from pallas_kernels.quant_matmul import cases as quant_cases
from pallas_kernels.quant_matmul import mosaic_tpu as quant
from pallas_kernels.quant_matmul.reference import error_bound, reference
from pallas_kernels.quant_matmul.spec import TYPICAL_MATMUL, MatmulSpec

PLAIN, RACES = pltpu.InterpretParams(), pltpu.InterpretParams(detect_races=True, vector_clock_size=256)
TPUS = [c for c in CHIPS if c.platform == "tpu"]
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def twice(function, *args) -> np.ndarray:
    """What it gives, the same both times."""
    program = jax.jit(function).lower(*args).compile(compiler_options=FAST)
    first, second = np.asarray(program(*args)), np.asarray(program(*args))
    assert (first == second).all()
    return first


def check_quant(case: quant_cases.Case, chip_name: str = "v5e", params: pltpu.InterpretParams = PLAIN) -> None:
    x, weight = quant_cases.make(case)
    options = {"int8_activations": case.int8_activations, "out_dtype": case.out_dtype}
    fixed = {"chip": chip(chip_name), "config": quant.Config(16, 128), "interpret": params}
    got = twice(lambda x, weight: quant.matmul(x, weight, **options, **fixed), x, weight)
    error = np.abs(got.astype(np.float64) - reference(x, weight, int8_activations=case.int8_activations))
    assert got.dtype == case.out_dtype and (error <= error_bound(x, weight, **options)).all()


def check_grouped(case: grouped_cases.Case, params: pltpu.InterpretParams = PLAIN) -> None:
    args = grouped_cases.make(case)
    fixed = {"chip": chip("v6e"), "config": grouped.Config(16, 128), "interpret": params, "out_dtype": case.out_dtype}
    got = twice(lambda *args: grouped.matmul(*args, **fixed), *args)
    assert got.dtype == case.out_dtype and not got[sum(case.sizes) :].any()
    error = np.abs(got.astype(np.float64) - grouped_exact(*args))
    assert (error <= grouped_bound(*args, case.out_dtype)).all()


def named(cases, *names: str) -> list:
    return [pytest.param(case, id=case.name) for case in cases if not names or case.name in names]


SHARP = named(quant_cases.CASES, "int8 odd sizes", "int4 32 zeros", "int4 64 odd sizes")


@pytest.mark.parametrize("case", SHARP)
def test_quant_matmul(case: quant_cases.Case):
    check_quant(case)


def test_int8_sums_are_exact_without_a_unit_for_int8():
    """2304 products of 127 * 127 are more than f32 can add up."""
    x, weight = jnp.full((2, 2304), 3.0), quant_cases.quantize_int8(np.ones((128, 2304), np.float32))
    weight = weight._replace(scales=jnp.ones(128))
    fixed = {"int8_activations": True, "out_dtype": "float32", "interpret": PLAIN}
    exact = np.float32(2304 * 127 * 127) * np.float32(np.float32(3) / np.float32(127))
    got = [np.asarray(quant.matmul(x, weight, chip=chip(name), **fixed)) for name in ("v5e", "tpu7x")]
    assert (got[0] == got[1]).all() and np.allclose(got[0], exact, rtol=2.0**-23, atol=0)


@pytest.mark.parametrize("case", named(grouped_cases.CASES, "uneven", "odd sizes"))
def test_grouped_matmul(case: grouped_cases.Case):
    check_grouped(case)


def test_no_races():
    check_quant(quant_cases.Case("races", tokens=17, outputs=200, inputs=128, group=64, zeros=True), params=RACES)
    check_grouped(grouped_cases.Case("races", (5, 0, 17), past=3, outputs=130), RACES)


@pytest.mark.kernels_full
@pytest.mark.parametrize("chip_name", ["v5e", "tpu7x"])
@pytest.mark.parametrize("case", named([c for c in quant_cases.CASES if c.dtype == "bfloat16" or c.int8_activations]))
def test_quant_matmul_in_full(case: quant_cases.Case, chip_name: str):
    check_quant(case, chip_name)


@pytest.mark.kernels_full
@pytest.mark.parametrize("case", named([c for c in grouped_cases.CASES if c.dtype == "bfloat16"]))
def test_grouped_matmul_in_full(case: grouped_cases.Case):
    check_grouped(case)


find_visits = jax.jit(grouped.find_visits, static_argnums=(1, 2))


@pytest.mark.parametrize("seed", range(8))
def test_every_row_is_visited_once_by_its_expert(seed: int):
    rng, tokens, rows = np.random.default_rng(seed), 140, 16
    sizes = rng.integers(0, 21, 7) * rng.integers(0, 2, 7)
    visits = jax.tree.map(np.asarray, find_visits(jnp.asarray(sizes, jnp.int32), tokens, rows))
    count = int(visits.count)
    assert count <= len(visits.tile) == -(-tokens // rows) + 7
    owner = np.full(tokens, -1)
    for tile, expert, begin, end in zip(*(x[:count] for x in visits[:4]), strict=True):
        mine = slice(max(begin, tile * rows), min(end, (tile + 1) * rows, tokens))
        assert begin >= end or (owner[mine] == -1).all() and mine.stop > mine.start
        owner[mine] = expert
    assert owner.tolist() == np.repeat([*range(7), -1], [*sizes, tokens - sizes.sum()]).tolist()
    assert np.unique(visits.tile[:count]).tolist() == list(range(-(-tokens // rows)))  # each is written
    assert (np.diff(visits.tile[:count]) >= 0).all() and (np.diff(visits.expert[:count]) >= 0).all()


@pytest.mark.parametrize("c", TPUS, ids=lambda c: c.name)
def test_what_is_chosen_fits_half_of_vmem(c):
    for inputs, outputs, group in ((2048, 2048, 0), (14336, 4096, 0), (14336, 4096, 32), (28672, 8192, 128)):
        for tokens in (1, 64, 4096):
            spec = MatmulSpec(tokens, inputs, outputs, "bfloat16", "float32", group, group > 0)
            assert quant.supports(spec, c) is None
            assert quant.vmem_bytes(spec, quant.choose_config(spec, c)) <= c.fast_memory // 2
            wide = dataclasses.replace(TYPICAL_GROUPED, tokens=tokens, inputs=inputs, outputs=outputs)
            assert grouped.supports(wide, c) is None
            assert grouped.vmem_bytes(wide, grouped.choose_config(wide, c)) <= c.fast_memory // 2
    large = dataclasses.replace(TYPICAL_MATMUL, inputs=1 << 20)
    assert "MiB of VMEM for 1048576 inputs" in str(quant.supports(large, c))
    assert "MiB of VMEM for 1048576 inputs" in str(grouped.supports(dataclasses.replace(TYPICAL_GROUPED, inputs=1 << 20), c))
    many = dataclasses.replace(TYPICAL_GROUPED, tokens=1 << 24, experts=1 << 20)
    assert "KiB of SMEM for its visits, where 512 may be used: split the tokens" in str(grouped.supports(many, c))


def test_what_is_refused():
    x, weight = quant_cases.make(quant_cases.Case("int8 f32", dtype="float32"))
    with pytest.raises(ValueError, match="cannot run as mosaic_tpu: it takes bfloat16 activations; got float32: cast them, or"):
        quant_matmul(x, weight, backend="mosaic_tpu")
    with pytest.raises(ValueError, match="cannot run as mosaic_tpu: it takes bfloat16; got float32: cast both factors"):
        grouped_matmul(jnp.ones((2, 8)), jnp.ones((1, 8, 8)), jnp.array([2], jnp.int32), backend="mosaic_tpu")
