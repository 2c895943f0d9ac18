"""Gemma 3 (text): Gemma 2's names with norms on q and k."""

from checkpoints.names import gemma2

TOP = gemma2.TOP

LAYER = gemma2.LAYER | {
    "q_norm": gemma2.norm("self_attn.q_norm.weight", "attn_q_norm.weight"),
    "k_norm": gemma2.norm("self_attn.k_norm.weight", "attn_k_norm.weight"),
}
