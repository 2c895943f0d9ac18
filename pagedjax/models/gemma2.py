"""Gemma 2 (Gemma Team 2024, arXiv 2408.00118): window and full layers in turn, norms before and after each part, caps on the
attention scores and the logits, embeddings scaled by sqrt(M) (in float32; transformers rounds the factor to the weights' dtype)."""

from typing import Any

import jax

from pagedjax.config import LayerKind, ModelConfig
from pagedjax.device.attention import Place, Pool, Rows
from pagedjax.device.layers import (
    attention_specs,
    decoder_specs,
    embed,
    fold_layers,
    gated_mlp,
    layer_ropes,
    mlp_specs,
    norm_spec,
    rms_norm,
    self_attention,
)
from pagedjax.device.params import ParamSpec
from pagedjax.models.llama import logits

__all__ = ["forward", "layer_specs", "logits", "param_specs"]


def layer_specs(cfg: ModelConfig, dtype: str) -> dict[str, ParamSpec]:
    return {
        "attention_norm": norm_spec(cfg.model_width),
        **attention_specs(cfg, dtype),
        "attention_post_norm": norm_spec(cfg.model_width),
        "mlp_norm": norm_spec(cfg.model_width),
        **mlp_specs(cfg, dtype),
        "mlp_post_norm": norm_spec(cfg.model_width),
    }


def param_specs(cfg: ModelConfig, dtype: str, vocab: int) -> dict[str, Any]:
    """The weights as a tree of ParamSpec; `vocab` is the number of embedding rows, padding included."""
    return decoder_specs(cfg, dtype, vocab, layer_specs(cfg, dtype))


def forward(params: dict[str, Any], tokens: jax.Array, kv: Pool, rows: Rows, cfg: ModelConfig) -> tuple[jax.Array, Pool]:
    """tokens i32[T], the pool -> (hidden f32[T, M] after the final norm, the pool)."""
    ropes = layer_ropes(rows.positions, cfg)

    def layer(carry, w: dict[str, jax.Array], place: Place, kind: LayerKind):
        x, kv = carry
        norm = lambda x, name: rms_norm(x, w[name], cfg.norm_eps)
        out, kv = self_attention(norm(x, "attention_norm"), w, kv, place, kind, rows, ropes, cfg)
        x = x + norm(out, "attention_post_norm")
        return x + norm(gated_mlp(norm(x, "mlp_norm"), w, cfg), "mlp_post_norm"), kv

    x, kv = fold_layers(layer, (embed(tokens, params["embed"], cfg), kv), params["layers"], cfg)
    return rms_norm(x, params["final_norm"], cfg.norm_eps), kv
