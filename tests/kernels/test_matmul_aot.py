"""quant_matmul and grouped_matmul compiled for chips that are not here: they fit, spill nothing, and copy no weights."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import Int4Weight, Int8Weight, grouped_matmul, quant_matmul
from pallas_kernels.aot.compile import compile_for
from pallas_kernels.common.targets import CHIPS


def with_marks(names: tuple[str, ...], mark: pytest.MarkDecorator, module: str, extra: str) -> list:
    here = importlib.util.find_spec(module) is not None
    return [
        pytest.param(n, marks=[mark, pytest.mark.skipif(not here, reason=f"needs the extra {extra} (make aot)")]) for n in names
    ]


TPUS = with_marks(tuple(c.name for c in CHIPS if c.platform == "tpu"), pytest.mark.aot_tpu, "libtpu", "aot-tpu")
HOPPER = with_marks(("sm_90a",), pytest.mark.aot_gpu, "jax_cuda13_plugin", "aot-gpu")

# tokens, inputs, outputs, group, zero points, int8 activations
QUANT = {
    "int8 decode": (64, 4096, 14336, 0, False, False),
    "int8 prefill": (2048, 4096, 4096, 0, False, False),
    "int8 one row": (1, 4096, 4096, 0, False, False),
    "w8a8": (64, 4096, 14336, 0, False, True),
    "int4 128": (64, 14336, 4096, 128, False, False),
    "int4 32 zeros": (256, 4096, 4096, 32, True, False),
}
GROUPED = {"few experts": (512, 4096, 14336, 8), "many experts": (16, 2048, 768, 128), "prefill": (4096, 4096, 2048, 8)}


def in_short(names, *short: str) -> list:
    """The others are compiled by `make aot` alone."""
    return [pytest.param(name, marks=[] if name in short else [pytest.mark.kernels_full]) for name in names]


def array(dtype: str, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def quant_report(chip: str, tokens: int, inputs: int, outputs: int, group: int, zeros: bool, int8_activations: bool):
    pairs = inputs // (2 * group) if group else 0
    lines = 2, pairs, outputs
    if group:
        weight = Int4Weight(
            array("int8", outputs, pairs * group), array("float32", *lines), array("int8", *lines) if zeros else None
        )
    else:
        weight = Int8Weight(array("int8", outputs, inputs), array("float32", outputs))
    platform = next(c.platform for c in CHIPS if c.name == chip)
    backend = "mosaic_tpu" if platform == "tpu" else "mosaic_gpu"
    call = lambda x, weight: quant_matmul(x, weight, int8_activations=int8_activations, backend=backend, platform=platform)
    return compile_for(chip, call, array("bfloat16", tokens, inputs), weight), weight


@pytest.mark.parametrize("chip", [*TPUS, *HOPPER])
@pytest.mark.parametrize("name", in_short(QUANT, "int8 decode", "w8a8", "int4 32 zeros"))
def test_quant_matmul(chip: str, name: str):
    report, weight = quant_report(chip, *QUANT[name])
    tokens, inputs, outputs, *_ = QUANT[name]
    # x again, by groups or in int8; on GPU sums in f32, in up to 8 parts; scales laid out anew
    allowed = 4 * tokens * inputs + 4 * tokens * outputs * (8 if chip == "sm_90a" and tokens < 128 else 1)
    allowed += 0 if isinstance(weight, Int8Weight) else 10 * weight.scales.size
    assert report.temp_bytes <= allowed + (1 << 20)
    assert tokens > 256 or allowed < 2 * outputs * inputs  # expanded weights would be seen
    assert chip != "sm_90a" or report.spill_bytes == 0


@pytest.mark.parametrize("chip", [*TPUS, *HOPPER])
@pytest.mark.parametrize("name", in_short(GROUPED, "many experts"))
def test_grouped_matmul(chip: str, name: str):
    tokens, inputs, outputs, experts = GROUPED[name]
    platform = "cuda" if chip == "sm_90a" else "tpu"
    backend = "mosaic_gpu" if chip == "sm_90a" else "mosaic_tpu"
    call = lambda *args: grouped_matmul(*args, backend=backend, platform=platform)
    weights = array("bfloat16", experts, outputs, inputs)
    report = compile_for(chip, call, array("bfloat16", tokens, inputs), weights, array("int32", experts))
    assert report.temp_bytes <= 2 * max(64, tokens) * (inputs + outputs) // 8 + (1 << 20)
    assert chip != "sm_90a" or report.spill_bytes == 0
