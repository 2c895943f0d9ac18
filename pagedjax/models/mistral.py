"""Mistral (Jiang et al. 2023, arXiv 2310.06825): Llama whose layers may all see a sliding window (`cfg.layer_pattern`)."""

from pagedjax.models.llama import forward, logits, param_specs

__all__ = ["forward", "logits", "param_specs"]
