"""Llama 1 to 3.x (Touvron et al. 2023, arXiv 2302.13971), and models of the same shape such as SmolLM2."""

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
    unembed,
)


def param_specs(cfg: ModelConfig, dtype: str, vocab: int) -> dict[str, Any]:
    """The weights as a tree of ParamSpec; `vocab` is the number of embedding rows, padding included."""
    layer = {
        "attention_norm": norm_spec(cfg.model_width),
        **attention_specs(cfg, dtype),
        "mlp_norm": norm_spec(cfg.model_width),
        **mlp_specs(cfg, dtype),
    }
    return decoder_specs(cfg, dtype, vocab, layer)


def forward(params: dict[str, Any], tokens: jax.Array, kv: Pool, rows: Rows, cfg: ModelConfig) -> tuple[jax.Array, Pool]:
    """tokens i32[T], the pool -> (hidden f32[T, M] after the final norm, the pool)."""
    ropes = layer_ropes(rows.positions, cfg)

    def layer(carry, w: dict[str, jax.Array], place: Place, kind: LayerKind):
        x, kv = carry
        out, kv = self_attention(rms_norm(x, w["attention_norm"], cfg.norm_eps), w, kv, place, kind, rows, ropes, cfg)
        x = x + out
        return x + gated_mlp(rms_norm(x, w["mlp_norm"], cfg.norm_eps), w, cfg), kv

    x, kv = fold_layers(layer, (embed(tokens, params["embed"], cfg), kv), params["layers"], cfg)
    return rms_norm(x, params["final_norm"], cfg.norm_eps), kv


def logits(params: dict[str, Any], hidden: jax.Array, cfg: ModelConfig) -> jax.Array:
    """hidden f32[S, M] -> f32[S, V]."""
    return unembed(hidden, params.get("head", params["embed"]), cfg)
