"""Llama in NumPy float64, straight from a Hugging Face folder: no cache, no blocks, no batching. The engine must agree with it."""

import json
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

STORIES = Path(__file__).parent / "golden" / "stories260K"


class ReferenceLlama:
    """`logits(tokens)` is the whole computation for one sequence, f64[T, V]. `cached`: what becomes of keys and values
    f64[T, K, D] in the cache; a token reads its own from there, too."""

    def __init__(self, folder: Path = STORIES, cached: Callable[[np.ndarray], np.ndarray] = lambda x: x):
        self.cached = cached
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {k: v.astype(np.float64) for k, v in load_file(folder / "model.safetensors").items()}

    @cached_property
    def frequencies(self) -> np.ndarray:
        width = self.config["head_dim"]
        return self.config["rope_theta"] ** -(np.arange(0, width, 2) / width)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def rotate(self, x: np.ndarray) -> np.ndarray:
        angle = np.arange(x.shape[0])[:, None, None] * self.frequencies
        a, b = np.split(x, 2, -1)
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1)

    def logits(self, tokens: list[int]) -> np.ndarray:
        c, w, count = self.config, self.weights, len(tokens)
        heads, kv, width = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        x = w["model.embed_tokens.weight"][np.asarray(tokens)]
        hidden = np.triu(np.ones((count, count), bool), 1)
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = self.norm(x, p + "input_layernorm.weight")
            q = self.rotate((h @ w[p + "self_attn.q_proj.weight"].T).reshape(count, heads, width))
            k = self.rotate((h @ w[p + "self_attn.k_proj.weight"].T).reshape(count, kv, width))
            v = (h @ w[p + "self_attn.v_proj.weight"].T).reshape(count, kv, width)
            k, v = (np.repeat(self.cached(a), heads // kv, axis=1) for a in (k, v))
            scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(width)
            scores[:, hidden] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            scores /= scores.sum(-1, keepdims=True)
            out = np.einsum("hts,shd->thd", scores, v).reshape(count, -1)
            x = x + out @ w[p + "self_attn.o_proj.weight"].T
            h = self.norm(x, p + "post_attention_layernorm.weight")
            gate = h @ w[p + "mlp.gate_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
        return self.norm(x, "model.norm.weight") @ w["model.embed_tokens.weight"].T

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]
