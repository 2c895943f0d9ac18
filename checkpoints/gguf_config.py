"""GGUF metadata -> ModelConfig. Keys and the values that files leave out are those of llama.cpp (gguf-py/gguf/constants.py and
src/llama-model.cpp)."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from checkpoints.hf_config import cap, repeating_unit, stretched
from pagedjax.config import LayerKind, ModelConfig, RopeConfig
from pagedjax.errors import UserError, check

Metadata = Mapping[str, Any]
TEXTS = ("rope.scaling.type",)
LISTS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length", "attention.sliding_window_pattern")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3")


def model_config(metadata: Metadata, where: str, *, vocab_size: int, tied: bool, rope_factors: np.ndarray | None) -> ModelConfig:
    """`rope_factors` f32[D/2] is the tensor rope_freqs.weight, by which Llama 3 files say their rope scaling."""
    architecture = metadata.get("general.architecture")
    check(
        architecture in ARCHITECTURES,
        f"general.architecture of {where} must be one of {', '.join(ARCHITECTURES)}; got {architecture}",
    )

    def get(key: str, default: Any = None) -> Any:
        value = plain(metadata.get(f"{architecture}.{key}", default))
        right = value is None or isinstance(value, str if key in TEXTS else int | float | list)
        what = "a text" if key in TEXTS else "a number"
        check(right, f"{architecture}.{key} of {where} must be {what}; got {value!r:.80}")
        check(not isinstance(value, list) or key in LISTS, f"{architecture}.{key} of {where} must be one number; got a list")
        return value

    try:
        fields = shape(get)
    except (TypeError, ArithmeticError) as error:
        raise UserError(
            f"{where} must name block_count, embedding_length, head_count and feed_forward_length; got {error}"
        ) from error
    for key in ("expert_count", "attention.clamp_kqv"):
        check(not get(key), f"{architecture}.{key} of {where} must be 0 or absent; got {get(key)}")
    fields |= {"vocab_size": vocab_size, "tied_embeddings": tied, "attention_bias": architecture == "qwen2"}
    positions = int(get("context_length", 2048))
    rope = rope_config(get, where, rope_factors, fields["head_width"])
    if architecture in ("gemma2", "gemma3"):
        return gemma(str(architecture), get, fields, positions, rope)
    window = int(get("attention.sliding_window") or 0)
    pattern = window_pattern(get, fields["num_layers"], 0) if window else ("full",)
    return ModelConfig(
        str(architecture),
        **fields,
        max_positions=stretched(positions, rope),
        rope=rope,
        layer_pattern=pattern,
        window=window or None,
    )


def plain(value: Any) -> Any:
    """float32 numbers as short decimals (1e-05, not 9.999999747378752e-06); a list of equal numbers as one."""
    if isinstance(value, float):
        return float(str(np.float32(value)))
    return value


def shape(get: Any) -> dict[str, Any]:
    heads, width, layers = get("attention.head_count"), get("embedding_length"), int(get("block_count"))
    kv_heads = get("attention.head_count_kv", heads)
    numbers = {"num_heads": heads, "num_kv_heads": kv_heads, "ffn_width": get("feed_forward_length")}
    for name, value in numbers.items():
        if isinstance(value, list):
            check(len(set(value)) == 1, f"{name} must be the same in every layer; got {sorted(set(value))}")
            numbers[name] = value[0]
    head_width = int(get("attention.key_length") or width // numbers["num_heads"])
    value_width, turned = get("attention.value_length", head_width), get("rope.dimension_count", head_width)
    check(value_width == head_width, f"attention.value_length must equal the width of a key, {head_width}; got {value_width}")
    check(turned == head_width, f"rope.dimension_count must equal the width of a head, {head_width}; got {turned}")
    return {
        **{name: int(value) for name, value in numbers.items()},
        "model_width": int(width),
        "num_layers": layers,
        "head_width": head_width,
        "norm_eps": float(get("attention.layer_norm_rms_epsilon", 1e-6)),
    }


def rope_config(get: Any, where: str, factors: np.ndarray | None, head_width: int) -> RopeConfig:
    theta, original = float(get("rope.freq_base", 10_000.0)), int(get("rope.scaling.original_context_length") or 0)
    if factors is not None:
        return llama3_rope(theta, np.asarray(factors, np.float64), original, where, head_width)
    factor = float(get("rope.scaling.factor") or get("rope.scale_linear") or 1.0)
    kind = get("rope.scaling.type") or ("linear" if factor != 1 else "none")
    check(kind in ("none", "linear", "yarn"), f"rope.scaling.type of {where} must be none, linear or yarn; got {kind}")
    if kind == "none" or factor == 1:
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original or int(get("context_length")),
        beta_fast=float(get("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(get("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=float(get("rope.scaling.attn_factor", 1.0)) * (0.1 * math.log(factor) + 1),
    )


def llama3_rope(theta: float, factors: np.ndarray, original: int, where: str, head_width: int) -> RopeConfig:
    """The scaling whose wavelength factors these are. Files do not say the parameters: those of Llama 3.1 and 3.2 are tried
    (low 1, high 4, 8192 positions) and taken only if they give the very factors."""
    if np.all(factors == 1):
        return RopeConfig(theta)
    factor = float(np.round(factors.max(), 4))
    for positions in {original, 8192} - {0}:
        turns = positions * theta ** -(np.arange(0, head_width, 2) / head_width) / (2 * np.pi)
        blend = np.clip((turns - 1) / 3, 0, 1)
        expected = 1 / (blend + (1 - blend) / factor)
        if factors.shape == expected.shape and np.allclose(factors, expected, rtol=1e-4, atol=0):
            return RopeConfig(theta, "llama3", factor, positions, low_freq_factor=1.0, high_freq_factor=4.0)
    raise UserError(
        f"rope_freqs.weight of {where} must be the factors of Llama 3 rope scaling; got {factors.size} up to {factors.max():g}"
    )


def window_pattern(get: Any, layers: int, default: int) -> tuple[LayerKind, ...]:
    """Every `period`-th layer is full, the others see a window; with 0 all do. Newer files list it layer by layer."""
    period = get("attention.sliding_window_pattern", default)
    if isinstance(period, list):
        check(
            len(period) == layers,
            f"attention.sliding_window_pattern must have one entry for each of {layers} layers; got {len(period)}",
        )
        return repeating_unit(tuple("window" if flag else "full" for flag in period))
    return repeating_unit(tuple("full" if period and i % period == period - 1 else "window" for i in range(layers)))


def gemma(architecture: str, get: Any, fields: dict[str, Any], positions: int, rope: RopeConfig) -> ModelConfig:
    """The 27B models (46 and 62 layers) scale scores by the model width over the heads, the others by the head width."""
    second = architecture == "gemma2"
    largest = fields["num_layers"] == (46 if second else 62)
    scale = (fields["model_width"] // fields["num_heads"] if largest else fields["head_width"]) ** -0.5
    return ModelConfig(
        architecture,
        **fields,
        max_positions=positions,
        rope=rope,
        local_rope=None if second else RopeConfig(float(get("rope.freq_base_swa", 10_000.0))),
        layer_pattern=window_pattern(get, fields["num_layers"], 2 if second else 6),
        window=int(get("attention.sliding_window") or 4096),
        attention_scale=float(get("attention.scale") or scale),
        attention_soft_cap=cap(get("attn_logit_softcapping", 50.0 if second else None)),
        logit_soft_cap=cap(get("final_logit_softcapping", 30.0 if second else None)),
        embedding_scale=math.sqrt(fields["model_width"]),
        activation="gelu_tanh",
    )
