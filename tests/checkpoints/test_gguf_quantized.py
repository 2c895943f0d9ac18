"""Every quantization of GGUF that is read, against dequantizers written from the format's description (ggml/src/ggml-quants.c and
ggml-common.h), one number at a time."""

import struct

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from checkpoints import open_checkpoint
from pagedjax.errors import UserError

WIDE = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": 6,
}


def half(raw: bytes) -> float:
    return struct.unpack("<e", raw)[0]


def q4_0(b: bytes) -> list[float]:
    d, q = half(b[:2]), b[2:]
    return [d * ((x & 15) - 8) for x in q] + [d * ((x >> 4) - 8) for x in q]


def q4_1(b: bytes) -> list[float]:
    d, m, q = half(b[:2]), half(b[2:4]), b[4:]
    return [d * (x & 15) + m for x in q] + [d * (x >> 4) + m for x in q]


def fives(high: bytes, q: bytes) -> list[int]:
    bits = int.from_bytes(high, "little")
    nibbles = [x & 15 for x in q] + [x >> 4 for x in q]
    return [n + 16 * (bits >> i & 1) for i, n in enumerate(nibbles)]


def q5_0(b: bytes) -> list[float]:
    return [half(b[:2]) * (n - 16) for n in fives(b[2:6], b[6:])]


def q5_1(b: bytes) -> list[float]:
    return [half(b[:2]) * n + half(b[2:4]) for n in fives(b[4:8], b[8:])]


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * n for n in struct.unpack("32b", b[2:])]


def scale_and_min(s: bytes, j: int) -> tuple[int, int]:
    """6-bit scale and minimum of sub-block j from the 12 bytes of a K block."""
    if j < 4:
        return s[j] & 63, s[j + 4] & 63
    return (s[j + 4] & 15) | (s[j - 4] >> 6) << 4, (s[j + 4] >> 4) | (s[j] >> 6) << 4


def q4_k(b: bytes, high: bytes = bytes(32), at: int = 16) -> list[float]:
    d, dmin, scales, q = half(b[:2]), half(b[2:4]), b[4:16], b[at:]
    out = []
    for j in range(8):
        scale, minimum = scale_and_min(scales, j)
        for i in range(32):
            byte = q[32 * (j // 2) + i]
            n = (byte >> 4 if j % 2 else byte & 15) + 16 * (high[i] >> j & 1)
            out.append(d * scale * n - dmin * minimum)
    return out


def q5_k(b: bytes) -> list[float]:
    return q4_k(b, high=b[16:48], at=48)


def q6_k(b: bytes) -> list[float]:
    low, high, scales, d = b[:128], b[128:192], struct.unpack("16b", b[192:208]), half(b[208:])
    out = []
    for i in range(256):
        part, row, column = i // 128, i % 128 // 32, i % 32
        nibble = low[64 * part + 32 * (row % 2) + column]
        n = (nibble >> 4 if row >= 2 else nibble & 15) | (high[32 * part + column] >> 2 * row & 3) << 4
        out.append(d * scales[i // 16] * (n - 32))
    return out


READ = {
    Kind.Q4_0: q4_0,
    Kind.Q4_1: q4_1,
    Kind.Q5_0: q5_0,
    Kind.Q5_1: q5_1,
    Kind.Q8_0: q8_0,
    Kind.Q4_K: q4_k,
    Kind.Q5_K: q5_k,
    Kind.Q6_K: q6_k,
}
SCALES_AT = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}  # byte offsets of f16 scales in a block


def random_blocks(kind: Kind, shape: tuple[int, ...]) -> np.ndarray:
    """Raw blocks of any bits, with scales that are ordinary numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng([int(kind), *shape])
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        scale = rng.uniform(0.001, 0.01, raw.shape[:-1]).astype(np.float16)
        raw[..., at : at + 2] = scale[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


@pytest.mark.parametrize("kind", list(READ), ids=lambda kind: kind.name)
def test_quantized_matrices(kind, gguf_file, configs):
    stored = {}

    def store(name, array):
        raw = random_blocks(kind, array.shape) if kind in SCALES_AT else gguf.quantize(array, kind)
        stored[name] = raw
        return raw, kind

    path, tensors = gguf_file("qwen2", store=store, **WIDE)
    checkpoint = open_checkpoint(path)
    assert checkpoint.weights_dtype == "bfloat16"
    block, size = gguf.GGML_QUANT_SIZES[kind]
    for weight, name in [("embed", "model.embed_tokens.weight"), ("layers.0.down", "model.layers.0.mlp.down_proj.weight")]:
        raw = stored[name].reshape(-1, size)
        expected = np.array([READ[kind](bytes(b)) for b in raw], np.float32).reshape(tensors[name].shape)
        value = checkpoint.read(weight)
        assert value.dtype == np.float32
        np.testing.assert_allclose(value, expected, rtol=2e-6, atol=2e-6 * np.abs(expected).max())
        if kind not in SCALES_AT:  # and near the numbers that were quantized: half a step of the largest of a block
            levels = {Kind.Q8_0: 255, Kind.Q5_0: 31, Kind.Q5_1: 31}.get(kind, 15)
            np.testing.assert_allclose(value, tensors[name], atol=2.2 * np.abs(tensors[name]).max() / levels)
    k = checkpoint.read("layers.0.k")
    assert k.shape == (2, 64, 256)
    raw = stored["model.layers.0.self_attn.k_proj.weight"]
    first = np.array([READ[kind](bytes(b)) for b in raw[64].reshape(-1, size)], np.float32).reshape(-1)
    np.testing.assert_allclose(k[1, 0], first, rtol=2e-6, atol=1e-6 * np.abs(first).max())


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16], ids=lambda kind: kind.name)
def test_half_precision_matrices(kind, gguf_file, bfloat16, check_weights):
    halves = {}

    def store(name, array):
        halves[name] = array.astype(np.float16) if kind == Kind.F16 else array.astype(bfloat16)
        return (halves[name], None) if kind == Kind.F16 else (halves[name].view(np.uint8), kind)

    path, tensors = gguf_file("qwen3", store=store)
    checkpoint = open_checkpoint(path)
    assert checkpoint.weights_dtype == "bfloat16"
    assert checkpoint.read("layers.0.q").dtype == (np.float16 if kind == Kind.F16 else bfloat16)
    check_weights(checkpoint.read, tensors | halves, "qwen3")


def test_large_tensors_are_dequantized_in_pieces(gguf_file):
    """More than one piece of 256 KiB, and rows that do not divide evenly."""
    stored = {}

    def store(name, array):
        stored[name] = gguf.quantize(array, Kind.Q8_0)
        return stored[name], Kind.Q8_0

    path, _ = gguf_file("qwen2", store=store, **WIDE | {"vocab_size": 4001})
    expected = gguf.dequantize(stored["model.embed_tokens.weight"], Kind.Q8_0)
    np.testing.assert_array_equal(open_checkpoint(path).read("embed"), expected)


def test_other_types_are_refused_by_name(gguf_file):
    def store(name, array):
        if "up_proj" not in name:
            return array, None
        return gguf.quantize(array, Kind.TQ1_0), Kind.TQ1_0

    path, _ = gguf_file("qwen2", store=store, **WIDE)
    with pytest.raises(UserError, match="tensor blk.0.ffn_up.weight of .* must be of type F32, .*, Q6_K; got TQ1_0"):
        open_checkpoint(path)


def test_damaged_tensor_entries(gguf_file):
    path, _ = gguf_file("llama")
    whole = bytearray(path.read_bytes())
    at = whole.index(b"blk.0.attn_q.weight") + len(b"blk.0.attn_q.weight")
    axes, kind = at, at + 4 + 16
    for where, value, rule in [
        (axes, 99, "tensor blk.0.attn_q.weight must have at most 8 axes; got 99"),
        (kind, 77, "tensor blk.0.attn_q.weight of .* must be of type F32, .*; got number 77"),
        (kind, int(Kind.Q4_K), r"rows of tensor blk.0.attn_q.weight \(Q4_K\) must be multiples of 256; got 32"),
    ]:
        edited = bytearray(whole)
        edited[where] = value
        path.write_bytes(edited)
        with pytest.raises(UserError, match=rule):
            open_checkpoint(path)
