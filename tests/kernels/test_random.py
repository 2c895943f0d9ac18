"""Attention by every backend on calls that nobody thought of, against float64: a seed makes the call. A backend may refuse it, and
is then asked about the next; what it takes must be right. NaN wherever nothing was written; table entries that no query sees name
no block.

RANDOM_CALLS=N python -m pytest tests/kernels/test_random.py -m '' has N calls of each backend.
"""

import os
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import paged_attention, paged_decode
from pallas_kernels.common.mosaic_tpu import round_up
from pallas_kernels.common.spec import spec_of
from pallas_kernels.common.targets import chip
from pallas_kernels.paged_attention import OP as ATTENTION
from pallas_kernels.paged_attention import reference as attention_reference
from pallas_kernels.paged_attention.cases import Case as AttentionCase
from pallas_kernels.paged_decode import OP as DECODE
from pallas_kernels.paged_decode import reference as decode_reference
from pallas_kernels.paged_decode.cases import Case as DecodeCase
from tests.kernels.test_gpu_portable import inputs
from tests.kernels.tpu_interpreter import FAST, PLAIN

GPU = plgpu.InterpretGPUParams()
WHERE = {  # the chip, and how the kernel is interpreted there
    "mosaic_tpu": ("v6e", PLAIN),
    "mosaic_gpu": ("sm_90a", GPU),
    "mosaic_gpu_sm80": ("sm_100", GPU),
    "triton": ("sm_80", True),
}
CALLS = int(os.environ.get("RANDOM_CALLS", "4"))
OFTEN = {"xla": CALLS, "numba_cpu": 2}  # of the calls, in all runs; the rest of them is for make kernels
CALLS_OF = [
    pytest.param(op, backend.name, seed, marks=[pytest.mark.kernels_full][: seed >= OFTEN.get(backend.name, 0)])
    for op in (DECODE, ATTENTION)
    for backend in op.backends
    for seed in range(CALLS)
]


@pytest.fixture(autouse=True)
def fresh_interpreter() -> Iterator[None]:
    """It must be reset after an error."""
    yield
    gpu_callbacks.reset_gpu_interpret_mode_state()


def shape(rng: np.random.Generator, lanes: int) -> dict:
    """What both ops have to be told. lanes: what the stored width must be a multiple of."""
    dtype = str(rng.choice(["float32", "bfloat16", "float16", "int8", "float8_e4m3fn"]))
    width = int(rng.choice([8, 16, 64, 72, 80, 96, 128, 192, 256]))
    quantized = {"int8": ["tensor", "token"], "float8_e4m3fn": ["none", "tensor", "token"]}
    return {
        "kv_heads": int(rng.integers(1, 4)),
        "group": int(rng.integers(1, 9)),
        "width": width,
        "stored_width": round_up(width, lanes) + lanes * int(rng.integers(0, 2)) * (lanes < 128),
        "block_size": int(rng.choice([8, 16, 32, 64, 128])),
        "dtype": dtype,
        "window": int(rng.integers(1, 200)) if rng.random() < 0.4 else None,
        "soft_cap": float(rng.uniform(1, 5)) if rng.random() < 0.3 else None,
        "sinks": bool(rng.random() < 0.3),
        "scales": str(rng.choice(quantized.get(dtype, ["none"]))),
    }


def lengths(rng: np.random.Generator, rows: int, block_size: int) -> list[int]:
    """Of contexts: empty, about whole blocks, or any."""
    near = lambda: int(block_size * rng.integers(1, 4) + rng.integers(-1, 2))
    return [[0, near(), int(rng.integers(1, 300))][rng.choice(3, p=[0.15, 0.35, 0.5])] for _ in range(rows)]


def draw(op, rng: np.random.Generator, lanes: int) -> DecodeCase | AttentionCase:
    common = shape(rng, lanes)
    lens = lengths(rng, int(rng.integers(1, 7)), common["block_size"])
    if op is DECODE:
        return DecodeCase(str(rng.integers(1 << 30)), tuple(lens), **common)
    decodes = int(rng.integers(0, len(lens) + 1))
    rows = [(max(1, n), 1) for n in lens[:decodes]] + [(n, min(n, int(rng.integers(1, 100)))) for n in lens[decodes:]]
    tokens = max(1, sum(count for _, count in rows)) + int(rng.integers(0, 9))
    return AttentionCase(str(rng.integers(1 << 30)), tuple(rows), tokens, num_decode=decodes, **common)


def call_of(op, case: DecodeCase | AttentionCase):
    """(arguments, options, the largest error allowed), as the op takes them."""
    if isinstance(case, DecodeCase):
        return inputs(case, case.lens, (1,) * len(case.lens), len(case.lens))
    lens, counts = (tuple(x) for x in zip(*case.rows, strict=True))
    args, options, near = inputs(case, lens, counts, case.tokens)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    return (*args, starts, np.array([case.num_decode], np.int32)), options, near


@pytest.mark.parametrize(("op", "name", "seed"), CALLS_OF, ids=lambda x: getattr(x, "name", str(x)))
def test_agrees_with_float64(op, name: str, seed: int):
    rng = np.random.default_rng([seed, *name.encode(), *op.name.encode()])
    backend = next(b for b in op.backends if b.name == name)
    where, interpret = WHERE.get(name, (None, None))
    target = where and chip(where)
    for _ in range(100):
        case = draw(op, rng, 128 if name == "mosaic_tpu" else 8)
        args, options, near = call_of(op, case)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), args)
        scales = options["kv_scales"]
        spec = spec_of(shapes[0], shapes[1], shapes[3], scales)
        spec = spec.__class__(**vars(spec) | {k: case._asdict()[k] for k in ("window", "soft_cap", "sinks")})
        if backend.supports(spec, target) is None:
            break
    else:
        pytest.fail("it refused a hundred calls")
    print(case)
    if target is None:
        f = paged_decode if op is DECODE else paged_attention
        fixed = {"backend": name} | ({"return_lse": True} if op is DECODE else {})
    else:
        f = getattr(backend.module, "decode" if op is DECODE else "attend")
        fixed = {"chip": target, "interpret": interpret}
    got = jax.tree.map(np.asarray, jax.jit(lambda *args: f(*args, **options, **fixed), compiler_options=FAST)(*args))
    if op is DECODE:
        want, want_lse = decode_reference(*args, **options)
        got, lse = got
        np.testing.assert_allclose(lse, want_lse, rtol=1e-5, atol=2e-4)
    else:
        want = attention_reference(*args[:-1], **options)
        assert not got[args[-2][-1] :].any()
    np.testing.assert_allclose(got, want, rtol=0, atol=near)
