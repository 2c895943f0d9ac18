"""Gemma 2. Hugging Face files hold norm weights less one; GGUF files hold the whole factor."""

from dataclasses import replace

from checkpoints.names import qwen2
from checkpoints.names.table import Name

TOP = qwen2.TOP | {"final_norm": replace(qwen2.TOP["final_norm"], hf_transform="plus_one")}


def norm(hf: str, gguf: str) -> Name:
    return Name("model.layers.{n}." + hf, "blk.{n}." + gguf, hf_transform="plus_one")


LAYER = {name: entry for name, entry in qwen2.LAYER.items() if not name.endswith(("_norm", "_bias"))} | {
    "attention_norm": norm("input_layernorm.weight", "attn_norm.weight"),
    "attention_post_norm": norm("post_attention_layernorm.weight", "post_attention_norm.weight"),
    "mlp_norm": norm("pre_feedforward_layernorm.weight", "ffn_norm.weight"),
    "mlp_post_norm": norm("post_feedforward_layernorm.weight", "post_ffw_norm.weight"),
}
