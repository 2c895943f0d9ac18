"""One tiny random model per architecture: configurations as Hugging Face folders hold them, weights from a seed, and texts.

Read by make_model_goldens.py (with torch and transformers) and by the tests (without), so that only configurations and logits are
kept in files. Weights are uniform numbers, which do not depend on a platform's mathematical functions.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

SIZES = {
    "vocab_size": 69,
    "hidden_size": 48,
    "intermediate_size": 45,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 13,
    "query_pre_attn_scalar": 12,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0, "beta_slow": 0.5}

CONFIGS: Mapping[str, dict[str, Any]] = {
    "llama_llama3": SIZES
    | {"model_type": "llama", "rope_scaling": LLAMA3, "num_key_value_heads": 3, "max_position_embeddings": 256},
    "llama_linear": SIZES | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 2.5}, "tie_word_embeddings": True},
    "qwen2": SIZES | {"model_type": "qwen2", "num_key_value_heads": 1, "num_attention_heads": 4, "head_dim": 8},
    "qwen2_yarn": SIZES
    | {"model_type": "qwen2", "rope_scaling": YARN, "num_attention_heads": 4, "rope_theta": 10_000.0}
    | {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 14, "max_window_layers": 1},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True},
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": 11},
    "gemma2": SIZES
    | GEMMA
    | {"model_type": "gemma2", "num_hidden_layers": 3, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0},
    "gemma3": SIZES
    | GEMMA
    | {
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "num_key_value_heads": 1,
        "num_attention_heads": 3,
        "rope_theta": 100_000.0,
        "rope_local_base_freq": 100.0,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "sliding_window_pattern": 3,
    },
}

# Ropes of real models: all that decides them, in the form of Llama's configuration.
ROPES: Mapping[str, dict[str, Any]] = {
    "llama_3.1_8b": {
        "head_dim": 128,
        "rope_theta": 500_000.0,
        "max_position_embeddings": 131_072,
        "rope_scaling": LLAMA3 | {"factor": 8.0, "original_max_position_embeddings": 8192},
    },
    "qwen2.5_7b_yarn": {
        "head_dim": 128,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 32_768,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768},
    },
    "gemma_3_4b_full": {
        "head_dim": 256,
        "rope_theta": 1_000_000.0,
        "max_position_embeddings": 131_072,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
    "yarn_mscale": {
        "head_dim": 64,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 163_840,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.8,
        },
    },
}

LENGTHS = (45, 29)


def texts(name: str) -> list[list[int]]:
    """Random token ids."""
    rng = np.random.default_rng([7, *name.encode()])
    return [(rng.random(length) * SIZES["vocab_size"]).astype(np.int64).tolist() for length in LENGTHS]


def weights(model: str, shapes: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
    """Hugging Face name -> f32 array. Uniform with mean 0, but for norms around 1 (stored less one for Gemma); matrices keep the
    size of their input, so that logits vary by several units."""
    return {name: one_weight(model, name, tuple(shape)) for name, shape in shapes.items()}


def one_weight(model: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    unit = (np.random.default_rng([11, *model.encode(), 0, *name.encode()]).random(shape) - 0.5) * 12**0.5  # variance 1
    if name.endswith("norm.weight"):
        value = 0.3 * unit + (0 if model.startswith("gemma") else 1)
    elif name.endswith(".bias"):
        value = 0.5 * unit
    elif name.endswith(("q_proj.weight", "k_proj.weight")):
        value = 1.5 * unit / shape[1] ** 0.5  # attention that is not close to uniform
    elif "embed_tokens" in name or "lm_head" in name:
        value = 0.5 * unit  # logits: 0.5 * sqrt(width)
    else:
        value = unit / shape[1] ** 0.5
    return value.astype(np.float32)
