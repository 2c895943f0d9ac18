"""Qwen3, the dense models (Yang et al. 2025, arXiv 2505.09388): Llama with a norm on every query and key head."""

from typing import Any

from pagedjax.config import ModelConfig
from pagedjax.device.layers import attention_specs, decoder_specs, mlp_specs, norm_spec, qk_norm_specs
from pagedjax.models.llama import forward, logits

__all__ = ["forward", "logits", "param_specs"]


def param_specs(cfg: ModelConfig, dtype: str, vocab: int) -> dict[str, Any]:
    """The weights as a tree of ParamSpec; `vocab` is the number of embedding rows, padding included."""
    layer = {
        "attention_norm": norm_spec(cfg.model_width),
        **attention_specs(cfg, dtype),
        **qk_norm_specs(cfg),
        "mlp_norm": norm_spec(cfg.model_width),
        **mlp_specs(cfg, dtype),
    }
    return decoder_specs(cfg, dtype, vocab, layer)
