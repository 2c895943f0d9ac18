"""Qwen2 and 2.5 (Yang et al. 2024, arXiv 2407.10671): Llama with biases on q, k and v (`cfg.attention_bias`); upper layers may
see a window (`cfg.layer_pattern`)."""

from pagedjax.models.llama import forward, logits, param_specs

__all__ = ["forward", "logits", "param_specs"]
