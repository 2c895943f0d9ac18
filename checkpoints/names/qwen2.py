"""Qwen2 and 2.5: Llama's names with biases on q, k and v; nothing is permuted in GGUF files."""

from dataclasses import replace

from checkpoints.names import llama
from checkpoints.names.table import Name

TOP = llama.TOP

LAYER = {name: replace(entry, gguf_transform="same") for name, entry in llama.LAYER.items()} | {
    "q_bias": Name("model.layers.{n}.self_attn.q_proj.bias", "blk.{n}.attn_q.bias"),
    "k_bias": Name("model.layers.{n}.self_attn.k_proj.bias", "blk.{n}.attn_k.bias"),
    "v_bias": Name("model.layers.{n}.self_attn.v_proj.bias", "blk.{n}.attn_v.bias"),
}
