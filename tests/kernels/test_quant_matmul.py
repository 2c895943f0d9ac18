"""quant_matmul: the quantizers' error bounds, the XLA path against the reference, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quant_matmul, quantize_int4, quantize_int8
from pallas_kernels.quant_matmul import xla
from pallas_kernels.quant_matmul.cases import CASES, Case, make
from pallas_kernels.quant_matmul.reference import dequantize, error_bound, reference
from pallas_kernels.quant_matmul.weights import Int4Weight, Int8Weight, quantize_rows

RNG = np.random.default_rng(0)
W = (RNG.standard_normal((24, 200)) * np.exp(RNG.standard_normal((24, 1)) * 3)).astype(np.float32)
W[3] = 0
W[4, :128] = np.abs(W[4, :128])  # groups of one sign
W[5, :128] = -np.abs(W[5, :128])


def column_scales(weight: Int4Weight, inputs: int) -> np.ndarray:
    scales = np.repeat(np.asarray(weight.scales)[..., None], weight.group, -1)  # [2, pairs, out, group]
    return scales.transpose(2, 1, 0, 3).reshape(scales.shape[2], -1)[:, :inputs]


def test_int8_rounds_by_half_a_scale():
    weight = quantize_int8(W)
    error, scale = np.abs(dequantize(weight, 200) - W), np.asarray(weight.scales)[:, None]
    assert (error <= scale * (0.5 + 1e-4)).all()
    assert error.max() > 0.4 * scale.min()
    assert np.abs(weight.values).max() == 127 and weight.scales[3] == 1 and not weight.values[3].any()


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("zeros", [False, True])
def test_int4_rounds_by_half_a_scale(group: int, zeros: bool):
    weight = quantize_int4(W, group=group, zeros=zeros)
    assert weight.group == group and (weight.zeros is not None) == zeros
    scale = column_scales(weight, 200)
    error = np.abs(dequantize(weight, 200) - W)
    assert (error <= scale * (0.5 + 1e-4)).all()
    assert (error > 0.4 * scale).any() and not dequantize(weight, 200)[3].any()
    assert scale.max() <= np.abs(W).max() / 7 * 1.0001


def test_quantizers_are_the_same_in_jax():
    ours, theirs = quantize_int4(W, group=32, zeros=True), jax.jit(lambda w: quantize_int4(w, group=32, zeros=True))(W)
    assert isinstance(ours.values, np.ndarray) and isinstance(theirs.values, jax.Array)
    assert (np.abs(dequantize(ours, 200) - dequantize(theirs, 200)) <= 1.0001 * column_scales(ours, 200)).all()
    assert np.mean(ours.values != theirs.values) < 0.01 and np.allclose(ours.scales, theirs.scales, rtol=1e-6)


def test_zero_points_halve_the_scale_of_groups_of_one_sign():
    plain, shifted = (column_scales(quantize_int4(W, group=64, zeros=z), 200) for z in (False, True))
    assert np.allclose(shifted[4, :128], plain[4, :128] * 7 / 15, rtol=1e-6)


def test_rows_round_by_half_a_scale():
    x = jnp.asarray(W, jnp.bfloat16)
    q, scale = quantize_rows(x)
    assert (np.abs(np.asarray(q) * np.asarray(scale, np.float64) - np.asarray(x, np.float64)) <= np.asarray(scale) * 0.5001).all()
    assert scale[3] == 0 and not q[3].any()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_xla(case: Case):
    x, weight = make(case)
    options = {"int8_activations": case.int8_activations, "out_dtype": case.out_dtype}
    run = jax.jit(lambda x, weight: quant_matmul(x, weight, backend="xla", **options))
    got = run(x, weight)
    assert got.dtype == case.out_dtype
    error = np.abs(np.asarray(got, np.float64) - reference(x, weight, int8_activations=case.int8_activations))
    bound = error_bound(x, weight, **options)
    assert (error <= bound).all()
    assert (np.asarray(run(x, weight)) == np.asarray(got)).all()


def test_the_bound_is_tight_enough_to_see_a_wrong_scale():
    """The control: one scale that is off by 1 % (int8), one value off by one (int4)."""
    x, weight = make(Case("int8"))
    wrong = weight._replace(scales=weight.scales.at[0].multiply(1.01))
    assert (np.abs(reference(x, wrong) - reference(x, weight)) > error_bound(x, weight)).any()
    x, weight = make(Case("int4 f32", group=64, dtype="float32"))
    wrong = weight._replace(values=weight.values.at[0, 7].add(16))
    assert (np.abs(reference(x, wrong) - reference(x, weight)) > error_bound(x, weight)).any()


def test_each_platform_gets_its_backend():
    """One trace serves all; on CPU it is what `xla` gives."""
    x, weight = make(Case("int4", group=64))
    call = lambda x, weight, **options: quant_matmul(x, weight, **options)
    traced = jax.jit(call).trace(x, weight)
    texts = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("cpu", "tpu", "cuda")}
    assert {p: ("tpu_custom_call" in text, "mosaic_gpu" in text) for p, text in texts.items()} == {
        "cpu": (False, False),
        "tpu": (True, False),
        "cuda": (False, True),
    }
    assert (np.asarray(jax.jit(call)(x, weight)) == np.asarray(call(x, weight, backend="xla"))).all()


@pytest.mark.parametrize("rows", [2, 32])
@pytest.mark.parametrize("group", [0, 128])
def test_weights_are_not_expanded_in_memory(rows: int, group: int):
    """On CPU: the temporaries of the loop, and, as a control, those of expanding all at once."""
    w, x = np.ones((2048, 2048), np.float32), jnp.ones((rows, 2048))
    weight = quantize_int4(w, group=group) if group else quantize_int8(w)

    def temporaries(f) -> int:
        memory = jax.jit(f).lower(x, weight).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporaries(lambda x, weight: quant_matmul(x, weight)) < 4 * xla.DEFAULT.kib * 1024 + 3 * 4 * rows * 2048
    if group:
        naive = lambda x, weight: x @ xla.expand_int4(weight, lambda array, axis=0: array).T
        assert temporaries(naive) >= 4 * 2048 * 2048


X = jnp.ones((3, 64))
INT8, INT4 = quantize_int8(jnp.ones((4, 64))), quantize_int4(jnp.ones((4, 64)), group=32, zeros=True)


@pytest.mark.parametrize(
    ("args", "options", "match"),
    [
        ((X[0], INT8), {}, r"x must be \[tokens, in\], none of them 0; got \(64,\)"),
        ((X[:0], INT8), {}, r"x must be \[tokens, in\], none of them 0; got \(0, 64\)"),
        ((X.astype(jnp.float16), INT8), {}, "x must be float32 or bfloat16; got float16"),
        ((X, INT8.values), {}, "weight must be an Int8Weight or an Int4Weight; got ArrayImpl"),
        ((X, INT8), {"out_dtype": "int8"}, "out_dtype must be float32 or bfloat16; got int8"),
        ((X[:, :63], INT8), {}, r"values of the weight must be int8\[out, 63\] for 63 inputs; got int8\[4, 64\]"),
        ((X, INT8._replace(scales=INT8.scales[:2])), {}, r"scales of the weight must be f32\[4\]; got float32\[2\]"),
        ((X, INT4), {"int8_activations": True}, "int8_activations must be False with int4 weights; got True"),
        (
            (X, INT4._replace(scales=INT4.scales[..., :2])),
            {},
            r"scales of the weight must be f32\[2, 1, 4\]; got float32\[2, 1, 2\]",
        ),
        ((X, INT4._replace(zeros=INT8.values)), {}, r"zeros of the weight must be int8\[2, 1, 4\]; got int8\[4, 64\]"),
        ((jnp.ones((3, 32)), Int4Weight(jnp.ones((4, 16), jnp.int8), jnp.ones((2, 1, 4)), None)), {}, "got 16"),
        ((X, INT8._replace(values=[1])), {}, r"values of the weight must be \[out, in\], none of them 0; got \(1,\)"),
        ((X, INT8._replace(values=jnp.int8(1))), {}, r"values of the weight must be \[out, in\], none of them 0; got \(\)"),
        (
            (X, Int8Weight(np.ones((1, 64), np.int32), INT8.scales)),
            {},
            r"values of the weight must be int8\[out, 64\] .*; got int32\[1, 64\]",
        ),
        ((X, INT4._replace(scales=INT8.scales)), {}, r"scales of the weight must have 3 axes, none of them 0; got \(4,\)"),
        ((X, INT4._replace(scales=INT4.scales[:, :0])), {}, r"scales of the weight must have 3 axes, none .*; got \(2, 0, 4\)"),
        ((X[:, :0], INT8), {}, r"x must be \[tokens, in\], none of them 0; got \(3, 0\)"),
        (
            (jnp.ones((1, 133145)), Int8Weight(jnp.ones((1, 133145), jnp.int8), jnp.ones(1))),
            {"int8_activations": True},
            "x must have at most 133144 inputs with int8_activations, whose sums are i32; got 133145",
        ),
        ((X, INT8), {"backend": "none"}, "backend of quant_matmul must be .*xla; got none"),
    ],
)
def test_what_is_refused(args, options, match):
    with pytest.raises(ValueError, match=match):
        quant_matmul(*args, **options)


def test_as_many_inputs_as_there_may_be_do_not_overflow():
    x, weight = jnp.ones((1, 133144)), Int8Weight(jnp.full((1, 133144), 127, jnp.int8), jnp.ones(1) / 127)
    np.testing.assert_allclose(quant_matmul(x, weight, int8_activations=True), [[133144.0]], rtol=1e-6)


@pytest.mark.parametrize(
    ("w", "options", "match"),
    [
        (jnp.ones((4, 64)), {"group": 16}, "group must be 32, 64 or 128; got 16"),
        (jnp.ones((4, 64), jnp.int8), {}, r"w must be floats \[out, in\], none of them 0; got int8\[4, 64\]"),
        (jnp.ones(4), {}, r"w must be floats \[out, in\], none of them 0; got float32\[4\]"),
        (np.ones((4, 0), np.float32), {}, r"w must be floats \[out, in\], none of them 0; got float32\[4, 0\]"),
    ],
)
def test_what_the_quantizers_refuse(w, options, match):
    with pytest.raises(ValueError, match=match):
        quantize_int4(w, **options)


def test_quantizers_take_lists():
    weight = quantize_int8([[1.0, -2.0], [0.0, 0.5]])
    assert weight.values.tolist() == [[64, -127], [0, 127]]
