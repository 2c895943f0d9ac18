"""Gemma 3, the text models (Gemma Team 2025, arXiv 2503.19786): Gemma 2 with a norm on every query and key head in place of the
caps, five window layers for each full one, and a rope of their own for window layers (`cfg.local_rope`)."""

from typing import Any

from pagedjax.config import ModelConfig
from pagedjax.device.layers import decoder_specs, qk_norm_specs
from pagedjax.models.gemma2 import forward, layer_specs, logits

__all__ = ["forward", "logits", "param_specs"]


def param_specs(cfg: ModelConfig, dtype: str, vocab: int) -> dict[str, Any]:
    """The weights as a tree of ParamSpec; `vocab` is the number of embedding rows, padding included."""
    return decoder_specs(cfg, dtype, vocab, {**layer_specs(cfg, dtype), **qk_norm_specs(cfg)})
