"""config.json of a Hugging Face folder -> ModelConfig. Formulas and defaults are those of transformers' configuration classes."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from pagedjax.config import LayerKind, ModelConfig, RopeConfig
from pagedjax.errors import UserError, check

Json = Mapping[str, Any]

ACTIVATIONS: Mapping[str, Any] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
KINDS: Mapping[str, LayerKind] = {"full_attention": "full", "sliding_attention": "window"}


def model_config(raw: Json, where: str) -> ModelConfig:
    """The configuration of a model. UserError where it asks for something the engine does not have."""
    kind = raw.get("model_type")
    check(kind in PARSERS, f"model_type of {where} must be one of {', '.join(PARSERS)}; got {kind}")
    quantized = raw.get("quantization_config")
    method = quantized.get("quant_method", quantized) if isinstance(quantized, dict) else quantized
    check(not quantized, f"weights of {where} must not be quantized; got {method}")
    try:
        return PARSERS[str(kind)](raw, where)
    except KeyError as error:
        raise UserError(f"{where} must name {error.args[0]}; it does not") from error
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"{where} holds a value of the wrong type; got {error}") from error


# --- rope ---------------------------------------------------------------------------------------------------------------


def rope_config(theta: float, scaling: Json | None, max_positions: int, where: str) -> RopeConfig:
    """A rope_scaling entry, or one of transformers 5's rope_parameters, of types default, linear, llama3 and yarn."""
    scaling = scaling or {}
    theta = float(scaling.get("rope_theta", theta))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    check(
        kind in ("default", "linear", "llama3", "yarn"),
        f"rope scaling of {where} must be of type default, linear, llama3 or yarn; got {kind}",
    )
    partial = scaling.get("partial_rotary_factor", 1.0)
    check(partial == 1, f"partial_rotary_factor of {where} must be 1 (every pair is rotated); got {partial}")
    if kind == "default":
        return RopeConfig(theta)
    original = int(scaling.get("original_max_position_embeddings") or max_positions)
    factor = float(scaling["factor"] or max_positions / original)
    if kind == "linear":
        return RopeConfig(theta, "linear", factor)
    if kind == "llama3":
        low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
        return RopeConfig(theta, "llama3", factor, original, low_freq_factor=low, high_freq_factor=high)
    check(scaling.get("truncate", True), f"truncate of the yarn scaling of {where} must be true; got {scaling.get('truncate')}")
    beta_fast, beta_slow = float(scaling.get("beta_fast") or 32), float(scaling.get("beta_slow") or 1)
    return RopeConfig(
        theta, "yarn", factor, original, beta_fast=beta_fast, beta_slow=beta_slow, attention_factor=yarn_factor(scaling, factor)
    )


def yarn_factor(scaling: Json, factor: float) -> float:
    """What cos and sin are multiplied by: given, or 0.1 m ln(factor) + 1 with m = 1 (as a ratio where both mscales are given)."""

    def grown(m: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return grown(scaling["mscale"]) / grown(scaling["mscale_all_dim"])
    return grown(1.0)


def ropes(raw: Json, where: str, theta: float, max_positions: int) -> RopeConfig:
    """The one rope of a model whose layers all share it."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling")
    return rope_config(float(raw.get("rope_theta", theta)), scaling, max_positions, where)


def stretched(max_positions: int, rope: RopeConfig) -> int:
    """The longest context: linear and yarn scaling multiply what the file says, llama3 files already say the product."""
    if rope.scaling == "linear":
        return int(max_positions * rope.factor)
    if rope.scaling == "yarn":
        return max(max_positions, int(rope.original_max_positions * rope.factor))
    return max_positions


# --- layers -------------------------------------------------------------------------------------------------------------


def repeating_unit(kinds: tuple[LayerKind, ...]) -> tuple[LayerKind, ...]:
    """The shortest unit whose repetition gives these layer kinds."""
    sizes = range(1, len(kinds) + 1)
    size = next(n for n in sizes if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return kinds[:size]


def pattern_of(raw: Json, where: str, layers: int, default: Callable[[int], bool]) -> tuple[LayerKind, ...]:
    """The layer kinds from layer_types, or from `default(i)`: whether layer i sees a window only."""
    types = raw.get("layer_types")
    if types is None:
        return repeating_unit(tuple("window" if default(i) else "full" for i in range(layers)))
    for kind in types:
        check(kind in KINDS, f"layer_types of {where} must be among {', '.join(KINDS)}; got {kind}")
    check(len(types) == layers, f"layer_types of {where} must have one entry for each of {layers} layers; got {len(types)}")
    return repeating_unit(tuple(KINDS[kind] for kind in types))


def shape(raw: Json, where: str, *, head_width: int | None = None, activation: str = "silu", tied: bool = False) -> dict[str, Any]:
    """The fields of ModelConfig that every architecture names alike. The options are the architecture's defaults."""
    heads, width = int(raw["num_attention_heads"]), int(raw["hidden_size"])
    name = raw.get("hidden_activation") or raw.get("hidden_act") or activation
    check(name in ACTIVATIONS, f"hidden_act of {where} must be one of {', '.join(ACTIVATIONS)}; got {name}")
    return {
        "vocab_size": int(raw["vocab_size"]),
        "model_width": width,
        "num_layers": int(raw["num_hidden_layers"]),
        "num_heads": heads,
        "num_kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_width": int(raw.get("head_dim") or head_width or width // heads),
        "ffn_width": int(raw["intermediate_size"]),
        "norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "activation": ACTIVATIONS[name],
        "tied_embeddings": bool(raw.get("tie_word_embeddings", tied)),
    }


def no_bias(raw: Json, where: str) -> None:
    for name in ("attention_bias", "mlp_bias"):
        check(not raw.get(name), f"{name} of {where} must be false for {raw['model_type']}; got {raw.get(name)}")


# --- architectures ------------------------------------------------------------------------------------------------------


def llama(raw: Json, where: str) -> ModelConfig:
    no_bias(raw, where)
    positions = int(raw.get("max_position_embeddings", 2048))
    rope = ropes(raw, where, 10_000.0, positions)
    return ModelConfig("llama", **shape(raw, where), max_positions=stretched(positions, rope), rope=rope)


def mistral(raw: Json, where: str) -> ModelConfig:
    positions = int(raw.get("max_position_embeddings", 131_072))
    rope = ropes(raw, where, 10_000.0, positions)
    window = raw.get("sliding_window", 4096)
    fields = shape(raw, where)
    pattern = pattern_of(raw, where, fields["num_layers"], lambda i: window is not None)
    return ModelConfig(
        "mistral",
        **fields,
        max_positions=stretched(positions, rope),
        rope=rope,
        layer_pattern=pattern,
        window=int(window) if "window" in pattern else None,
    )


def qwen(raw: Json, where: str) -> ModelConfig:
    """Qwen2 (always with q, k and v biases) and Qwen3 (never). Layers from max_window_layers on see a window, if at all."""
    kind = raw["model_type"]
    if kind == "qwen3":
        no_bias(raw, where)
    positions = int(raw.get("max_position_embeddings", 32_768))
    rope = ropes(raw, where, 10_000.0, positions)
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window") else None
    first = int(raw.get("max_window_layers", 28))
    fields = shape(raw, where, head_width=128 if kind == "qwen3" else None)
    pattern = pattern_of(raw, where, fields["num_layers"], lambda i: window is not None and i >= first)
    check(
        "window" not in pattern or window is not None, f"{where} has window layers, so use_sliding_window must be true; got false"
    )
    return ModelConfig(
        kind,
        **fields,
        max_positions=stretched(positions, rope),
        rope=rope,
        attention_bias=kind == "qwen2",
        layer_pattern=pattern,
        window=int(window) if window is not None and "window" in pattern else None,
    )


def gemma_fields(raw: Json, where: str) -> dict[str, Any]:
    no_bias(raw, where)
    fields = shape(raw, where, head_width=256, activation="gelu_pytorch_tanh", tied=True)
    fields["attention_scale"] = float(raw.get("query_pre_attn_scalar", 256)) ** -0.5
    fields["embedding_scale"] = math.sqrt(fields["model_width"])
    fields["window"] = int(raw.get("sliding_window") or 4096)
    return fields


def gemma2(raw: Json, where: str) -> ModelConfig:
    fields = gemma_fields(raw, where)
    positions = int(raw.get("max_position_embeddings", 8192))
    return ModelConfig(
        "gemma2",
        **fields,
        max_positions=positions,
        rope=ropes(raw, where, 10_000.0, positions),
        layer_pattern=pattern_of(raw, where, fields["num_layers"], lambda i: i % 2 == 0),
        attention_soft_cap=cap(raw.get("attn_logit_softcapping", 50.0)),
        logit_soft_cap=cap(raw.get("final_logit_softcapping", 30.0)),
    )


# Files of the multimodal models leave out what equals the defaults of transformers' Gemma3TextConfig.
GEMMA3_DEFAULTS = {"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26}
GEMMA3_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def gemma3(raw: Json, where: str) -> ModelConfig:
    """Gemma 3; of a multimodal model the text part."""
    raw = {"model_type": "gemma3_text", **GEMMA3_DEFAULTS, **GEMMA3_HEADS, **raw.get("text_config", raw)}
    check(not raw.get("use_bidirectional_attention"), f"use_bidirectional_attention of {where} must be false; got true")
    fields = gemma_fields(raw, where)
    positions = int(raw.get("max_position_embeddings", 131_072))
    both = raw.get("rope_parameters") or {}
    if "full_attention" in both:
        full, local = both["full_attention"], both.get("sliding_attention")
    else:
        full, local = both or raw.get("rope_scaling"), None
    period = int(raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6)
    return ModelConfig(
        "gemma3",
        **fields,
        max_positions=positions,
        rope=rope_config(float(raw.get("rope_theta", 1_000_000.0)), full, positions, where),
        local_rope=rope_config(float(raw.get("rope_local_base_freq", 10_000.0)), local, positions, where),
        layer_pattern=pattern_of(raw, where, fields["num_layers"], lambda i: (i + 1) % period != 0),
        attention_soft_cap=cap(raw.get("attn_logit_softcapping")),
        logit_soft_cap=cap(raw.get("final_logit_softcapping")),
    )


def cap(value: Any) -> float | None:
    return float(value) if value else None


PARSERS: Mapping[str, Callable[[Json, str], ModelConfig]] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen,
    "qwen3": qwen,
    "gemma2": gemma2,
    "gemma3_text": gemma3,
    "gemma3": gemma3,
}
