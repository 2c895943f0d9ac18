"""Llama. In GGUF files q and k are permuted for a rotation of adjacent pairs."""

from checkpoints.names.table import Name

TOP = {
    "embed": Name("model.embed_tokens.weight", "token_embd.weight"),
    "final_norm": Name("model.norm.weight", "output_norm.weight"),
    "head": Name("lm_head.weight", "output.weight"),
}

LAYER = {
    "attention_norm": Name("model.layers.{n}.input_layernorm.weight", "blk.{n}.attn_norm.weight"),
    "q": Name("model.layers.{n}.self_attn.q_proj.weight", "blk.{n}.attn_q.weight", gguf_transform="unpermute"),
    "k": Name("model.layers.{n}.self_attn.k_proj.weight", "blk.{n}.attn_k.weight", gguf_transform="unpermute"),
    "v": Name("model.layers.{n}.self_attn.v_proj.weight", "blk.{n}.attn_v.weight"),
    "o": Name("model.layers.{n}.self_attn.o_proj.weight", "blk.{n}.attn_output.weight"),
    "mlp_norm": Name("model.layers.{n}.post_attention_layernorm.weight", "blk.{n}.ffn_norm.weight"),
    "gate": Name("model.layers.{n}.mlp.gate_proj.weight", "blk.{n}.ffn_gate.weight"),
    "up": Name("model.layers.{n}.mlp.up_proj.weight", "blk.{n}.ffn_up.weight"),
    "down": Name("model.layers.{n}.mlp.down_proj.weight", "blk.{n}.ffn_down.weight"),
}
