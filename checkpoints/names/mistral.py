"""Mistral: Llama's names in both formats (a GGUF file even calls the architecture llama)."""

from checkpoints.names.llama import LAYER, TOP

__all__ = ["LAYER", "TOP"]
