"""Qwen3: Qwen2's names with norms on q and k."""

from checkpoints.names import qwen2
from checkpoints.names.table import Name

TOP = qwen2.TOP

LAYER = qwen2.LAYER | {
    "q_norm": Name("model.layers.{n}.self_attn.q_norm.weight", "blk.{n}.attn_q_norm.weight"),
    "k_norm": Name("model.layers.{n}.self_attn.k_norm.weight", "blk.{n}.attn_k_norm.weight"),
}
