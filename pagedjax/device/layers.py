"""The parts that models are made of, as pure functions. Activations are float32; a dot takes its operands in the dtype of the
weight and accumulates in float32. Weights are [out, in]."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint

from pagedjax.config import LayerKind, ModelConfig, RopeConfig
from pagedjax.device.attention import Place, Rows, attend
from pagedjax.device.params import Axis, ParamSpec, Stacked
from pagedjax.state import Pool

FEW_ROWS = 64  # up to so many, a product on CPU is faster with the weight as its left operand (docs/benchmarks.md)
ROW_MAJOR = Layout((0, 1))


def linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x f32[T, in], weight [out..., in] -> f32[T, out...]."""
    out = weight.shape[:-1]
    flat = weight.reshape(math.prod(out), weight.shape[-1])
    few = x.shape[0] <= FEW_ROWS
    y = jax.lax.platform_dependent(x.astype(weight.dtype), flat, cpu=_weight_first if few else _matmul, default=_matmul)
    y = y.reshape(x.shape[0], *out)
    return y if bias is None else y + bias


def _matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def _weight_first(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same product for XLA:CPU, whose library packs the right operand in every call: that is now the few rows, and the weight
    is streamed. The two layouts keep XLA from turning the product around again."""
    packed = with_layout_constraint(x.T, ROW_MAJOR)
    return with_layout_constraint(jnp.matmul(weight, packed, preferred_element_type=jnp.float32), ROW_MAJOR).T


def join_heads(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x f32[T, H, D], weight [M, H, D] -> f32[T, M]."""
    return linear(x.reshape(x.shape[0], -1), weight.reshape(weight.shape[0], -1))


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * weight over the last axis. Weights hold the whole factor (Gemma's 1 + w is added at load)."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rope_frequencies(cfg: RopeConfig, head_width: int) -> tuple[np.ndarray, float]:
    """(inverse wavelengths f32[D/2] in radians per position, factor on cos and sin).

    linear: position / factor. llama3: wavelengths longer than original / low_freq_factor are divided by factor, shorter than
    original / high_freq_factor kept, between them interpolated. yarn (Peng et al. 2023, arXiv 2309.00071): a ramp over the
    pair index between the dimensions that turn beta_fast and beta_slow times within the original context.
    """
    half = np.arange(0, head_width, 2, dtype=np.float64) / head_width
    freq = cfg.theta**-half
    if cfg.scaling == "linear":
        freq = freq / cfg.factor
    elif cfg.scaling == "llama3":
        turns = cfg.original_max_positions * freq / (2 * np.pi)
        blend = np.clip((turns - cfg.low_freq_factor) / (cfg.high_freq_factor - cfg.low_freq_factor), 0, 1)
        freq = freq * (blend + (1 - blend) / cfg.factor)
    elif cfg.scaling == "yarn":

        def pair_of(turns: float) -> float:
            return head_width * math.log(cfg.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(cfg.theta))

        low = max(math.floor(pair_of(cfg.beta_fast)), 0)
        high = min(math.ceil(pair_of(cfg.beta_slow)), head_width - 1)
        ramp = np.clip((np.arange(head_width // 2) - low) / max(high - low, 0.001), 0, 1)
        freq = freq * (1 - ramp) + freq / cfg.factor * ramp
    return freq.astype(np.float32), cfg.attention_factor


def rope_tables(positions: jax.Array, cfg: RopeConfig, head_width: int) -> tuple[jax.Array, jax.Array]:
    """cos and sin, f32[T, D/2]."""
    freq, factor = rope_frequencies(cfg, head_width)
    angle = positions.astype(jnp.float32)[:, None] * freq
    # Kept apart from what follows, or every layer computes them again for every head.
    return jax.lax.optimization_barrier((jnp.cos(angle) * factor, jnp.sin(angle) * factor))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x f32[T, heads, D], rotated in pairs (i, i + D/2)."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


Ropes = dict[LayerKind, tuple[jax.Array, jax.Array]]


def layer_ropes(positions: jax.Array, cfg: ModelConfig) -> Ropes:
    """cos and sin for each kind of layer: window layers may have a rope of their own. Made once a pass, read by every layer."""
    full = rope_tables(positions, cfg.rope, cfg.head_width)
    return {"full": full, "window": full if cfg.local_rope is None else rope_tables(positions, cfg.local_rope, cfg.head_width)}


def self_attention(
    x: jax.Array,
    w: dict[str, jax.Array],
    kv: Pool,
    place: Place,
    kind: LayerKind,
    rows: Rows,
    ropes: Ropes,
    cfg: ModelConfig,
) -> tuple[jax.Array, Pool]:
    """x f32[T, M] -> (f32[T, M], the pool with this layer's keys and values). Biases and norms of q and k (each head by itself,
    before the rotation) apply where the layer has such weights."""
    q, k, v = (linear(x, w[name], w.get(f"{name}_bias")) for name in ("q", "k", "v"))
    if "q_norm" in w:
        q, k = rms_norm(q, w["q_norm"], cfg.norm_eps), rms_norm(k, w["k_norm"], cfg.norm_eps)
    cos, sin = ropes[kind]
    window = cfg.window if kind == "window" else None
    out, kv = attend(
        rotate(q, cos, sin),
        rotate(k, cos, sin),
        v,
        kv,
        place,
        rows,
        scale=cfg.score_scale,
        window=window,
        soft_cap=cfg.attention_soft_cap,
    )
    return join_heads(out, w["o"]), kv


def activate(x: jax.Array, kind: str) -> jax.Array:
    return jax.nn.silu(x) if kind == "silu" else jax.nn.gelu(x, approximate=True)


def gated_mlp(x: jax.Array, w: dict[str, jax.Array], cfg: ModelConfig) -> jax.Array:
    """down(activation(gate(x)) * up(x)), f32[T, M]."""
    return linear(activate(linear(x, w["gate"]), cfg.activation) * linear(x, w["up"]), w["down"])


def embed(tokens: jax.Array, table: jax.Array, cfg: ModelConfig) -> jax.Array:
    """i32[T] -> f32[T, M]."""
    return table[tokens].astype(jnp.float32) * cfg.embedding_scale


def unembed(hidden: jax.Array, table: jax.Array, cfg: ModelConfig) -> jax.Array:
    """f32[S, M] -> logits f32[S, V]; columns that only pad the vocabulary are -inf."""
    scores = with_layout_constraint(linear(hidden, table), ROW_MAJOR)  # once: XLA:CPU would in each branch of the sampler
    if cfg.logit_soft_cap is not None:
        scores = jnp.tanh(scores / cfg.logit_soft_cap) * cfg.logit_soft_cap
    if table.shape[0] > cfg.vocab_size:
        scores = jnp.where(jnp.arange(table.shape[0]) < cfg.vocab_size, scores, -jnp.inf)
    return scores


def attention_specs(cfg: ModelConfig, dtype: str) -> dict[str, ParamSpec]:
    """q, k, v, o and, where the model has them, the biases of the first three."""
    heads, kv, width, model = cfg.num_heads, cfg.num_kv_heads, cfg.head_width, cfg.model_width
    specs = {
        "q": ParamSpec((heads, width, model), dtype, ("heads", "head_width", "embed")),
        "k": ParamSpec((kv, width, model), dtype, ("kv_heads", "head_width", "embed")),
        "v": ParamSpec((kv, width, model), dtype, ("kv_heads", "head_width", "embed")),
        "o": ParamSpec((model, heads, width), dtype, ("embed", "heads", "head_width")),
    }
    if cfg.attention_bias:
        specs["q_bias"] = ParamSpec((heads, width), "float32", ("heads", "head_width"), init="zeros")
        specs["k_bias"] = ParamSpec((kv, width), "float32", ("kv_heads", "head_width"), init="zeros")
        specs["v_bias"] = ParamSpec((kv, width), "float32", ("kv_heads", "head_width"), init="zeros")
    return specs


def mlp_specs(cfg: ModelConfig, dtype: str) -> dict[str, ParamSpec]:
    return {
        "gate": ParamSpec((cfg.ffn_width, cfg.model_width), dtype, ("ffn", "embed")),
        "up": ParamSpec((cfg.ffn_width, cfg.model_width), dtype, ("ffn", "embed")),
        "down": ParamSpec((cfg.model_width, cfg.ffn_width), dtype, ("embed", "ffn")),
    }


def norm_spec(width: int, axis: Axis = "embed") -> ParamSpec:
    return ParamSpec((width,), "float32", (axis,), init="ones")


def qk_norm_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """Norms over the width of each query and each key head."""
    return {name: norm_spec(cfg.head_width, "head_width") for name in ("q_norm", "k_norm")}


def decoder_specs(cfg: ModelConfig, dtype: str, vocab: int, layer: dict[str, ParamSpec]) -> dict[str, Any]:
    """The tree around the layers: embedding, final norm, and a head where it is not tied. `vocab` counts padding rows."""
    specs: dict[str, Any] = {
        "embed": ParamSpec((vocab, cfg.model_width), dtype, ("vocab", "embed")),
        "layers": [dict(layer) for _ in range(cfg.num_layers)],
        "final_norm": norm_spec(cfg.model_width),
    }
    if not cfg.tied_embeddings:
        specs["head"] = ParamSpec((vocab, cfg.model_width), dtype, ("vocab", "embed"))
    return specs


Carry = Any
LayerFn = Callable[[Carry, dict[str, jax.Array], Place, LayerKind], Carry]


def fold_layers(layer_fn: LayerFn, carry: Carry, layers: list[dict[str, jax.Array]] | Stacked, cfg: ModelConfig) -> Carry:
    """carry = layer_fn(carry, weights, place in the pool, kind) for every layer in order.

    The type of `layers` chooses the loop: a list is unrolled; `Stacked` runs a scan with one repeating unit per iteration.
    """
    kinds, places = cfg.layer_pattern, cfg.layer_groups.places
    if not isinstance(layers, Stacked):
        # Traced once for each kind and called L times: a third of the time to lower. XLA inlines the calls.
        traced = jax.jit(layer_fn, static_argnums=3)
        for i, weights in enumerate(layers):
            carry = traced(carry, weights, places[i], cfg.layer_kinds[i])
        return carry
    size = len(kinds)
    units = (cfg.num_layers // size) if layers.unit else 0

    def one_unit(carry: Carry, xs: tuple[Any, jax.Array]) -> tuple[Carry, None]:
        unit, place = xs
        for u in range(size):
            carry = layer_fn(carry, unit[u], (place[u, 0], place[u, 1]), kinds[u])
        return carry, None

    if units:
        stacked = jnp.asarray(places[: units * size], jnp.int32).reshape(units, size, 2)
        carry, _ = jax.lax.scan(one_unit, carry, (layers.unit, stacked))
    for r, weights in enumerate(layers.rest):
        carry = layer_fn(carry, weights, places[units * size + r], kinds[r])
    return carry
