"""Tiny models as files. Names and shapes are written out here, apart from the tables that are tested."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from safetensors.numpy import save_file

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 44,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000.0,
    "eos_token_id": 2,
}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "sliding_window": 5, "num_hidden_layers": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": SIZES | {"model_type": "llama", "hidden_act": "silu"},
    "mistral": SIZES | {"model_type": "mistral", "sliding_window": 9},
    "qwen2": SIZES | {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": SIZES | {"model_type": "qwen3", "head_dim": 12},
    "gemma2": SIZES | GEMMA | {"model_type": "gemma2"},
    "gemma3": SIZES | GEMMA | {"model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
}


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor of a model."""
    kind, width, ffn, head = config["model_type"], config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config.get("tie_word_embeddings", kind.startswith("gemma")):
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for n in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (q, width),
            "self_attn.k_proj.weight": (kv, width),
            "self_attn.v_proj.weight": (kv, width),
            "self_attn.o_proj.weight": (width, q),
            "post_attention_layernorm.weight": (width,),
            "mlp.gate_proj.weight": (ffn, width),
            "mlp.up_proj.weight": (ffn, width),
            "mlp.down_proj.weight": (width, ffn),
        }
        if kind == "qwen2":
            layer |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
        if kind in ("qwen3", "gemma3_text"):
            layer |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        if kind.startswith("gemma"):
            layer |= {"pre_feedforward_layernorm.weight": (width,), "post_feedforward_layernorm.weight": (width,)}
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}
    return shapes


def random_tensors(config: dict[str, Any]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in hf_shapes(config).items()}


def write_hf(
    folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray], generation: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def configs() -> dict[str, dict[str, Any]]:
    return CONFIGS


@pytest.fixture
def hf_folder(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """(architecture, generation=…, edit=…, **config changes) -> (folder, its tensors by Hugging Face name)."""

    def make(
        architecture: str,
        *,
        generation: dict[str, Any] | None = None,
        edit: Callable[[dict[str, np.ndarray]], None] | None = None,
        **changes: Any,
    ) -> tuple[Path, dict[str, np.ndarray]]:
        config = CONFIGS[architecture] | changes
        tensors = random_tensors(config)
        if edit is not None:
            edit(tensors)
        return write_hf(tmp_path / f"hf-{len(list(tmp_path.iterdir()))}", config, tensors, generation), tensors

    return make


@pytest.fixture
def mesh_of() -> Callable[[int], Mesh]:
    """A mesh of the first n simulated devices along `model`."""
    return lambda n: jax.make_mesh((1, n), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:n])


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to q and k of Llama: halves of a head become adjacent pairs."""
    rows, *rest = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, *rest).swapaxes(1, 2).reshape(weight.shape)


@pytest.fixture
def gguf_file(tmp_path: Path) -> Callable[..., tuple[Path, dict[str, np.ndarray]]]:
    """(architecture, edit=…, metadata=…, **config changes) -> (file, the tensors by Hugging Face name).

    Written as llama.cpp's converter does: its own name map, q and k of Llama permuted, Gemma's norms plus one, norms in f32.
    `store(name, array)` gives (array, type or None) to choose how a matrix is stored."""

    def make(
        architecture: str,
        *,
        metadata: dict[str, Any] | None = None,
        extra: dict[str, np.ndarray] | None = None,
        store: Callable[[str, np.ndarray], tuple[np.ndarray, Any]] = lambda name, array: (array, None),
        **changes: Any,
    ) -> tuple[Path, dict[str, np.ndarray]]:
        config = CONFIGS[architecture] | changes
        tensors = random_tensors(config)
        path = tmp_path / f"model-{len(list(tmp_path.iterdir()))}.gguf"
        writer = gguf.GGUFWriter(path, "llama" if architecture == "mistral" else architecture)
        writer.add_block_count(config["num_hidden_layers"])
        writer.add_context_length(config["max_position_embeddings"])
        writer.add_embedding_length(config["hidden_size"])
        writer.add_feed_forward_length(config["intermediate_size"])
        writer.add_head_count(config["num_attention_heads"])
        writer.add_head_count_kv(config["num_key_value_heads"])
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
        writer.add_rope_freq_base(config["rope_theta"])
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
        if "sliding_window" in config:
            writer.add_sliding_window(config["sliding_window"])
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{i}é" for i in range(config["vocab_size"])])
        writer.add_token_types([1] * config["vocab_size"])
        writer.add_eos_token_id(2)
        for key, value in (metadata or {}).items():
            add = {
                str: writer.add_string,
                bool: writer.add_bool,
                int: writer.add_uint32,
                float: writer.add_float32,
                list: writer.add_array,
            }
            add[type(value)](key, value)
        names = gguf.get_tensor_name_map(writer_arch(architecture), config["num_hidden_layers"])
        for name, array in tensors.items():
            if name.endswith(("q_proj.weight", "k_proj.weight")) and architecture in ("llama", "mistral"):
                heads = config["num_attention_heads"] if "q_proj" in name else config["num_key_value_heads"]
                array = permuted(array, heads)
            if name.endswith("norm.weight") and architecture.startswith("gemma"):
                array = array + 1
            data, kind = store(name, array) if array.ndim > 1 else (array, None)
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), np.ascontiguousarray(data), raw_dtype=kind)
        for name, array in (extra or {}).items():
            writer.add_tensor(name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, tensors

    return make


def writer_arch(architecture: str) -> Any:
    return gguf.MODEL_ARCH["LLAMA" if architecture == "mistral" else architecture.upper()]


@pytest.fixture
def check_weights() -> Callable[..., None]:
    """(read, hugging face tensors, architecture, **tolerance): every weight is the tensor it should be, in its own shape."""
    return assert_weights


PARTS = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
GEMMA_PARTS = PARTS | {
    "attention_post_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_post_norm": "post_feedforward_layernorm.weight",
}


def assert_weights(read: Callable[[str], np.ndarray], tensors: dict[str, np.ndarray], architecture: str, rtol: float = 0) -> None:
    config, gemma = CONFIGS[architecture], architecture.startswith("gemma")
    ours = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
    parts = GEMMA_PARTS if gemma else PARTS
    for n in range(config["num_hidden_layers"]):
        ours |= {f"layers.{n}.{part}": f"model.layers.{n}.{name}" for part, name in parts.items()}
    present = {path: name for path, name in ours.items() if name in tensors}
    assert len(present) == len(tensors)
    for path, name in present.items():
        part, expected = path.split(".")[-1], tensors[name].astype(np.float32)
        if part in ("q", "k", "v", "q_bias", "k_bias", "v_bias"):
            expected = expected.reshape(-1, config["head_dim"], *expected.shape[1:])
        if part == "o":
            expected = expected.reshape(expected.shape[0], -1, config["head_dim"])
        if gemma and part.endswith("norm"):
            expected = expected + 1
        value = read(path)
        assert value.shape == expected.shape, path
        np.testing.assert_allclose(value.astype(np.float32), expected, rtol=rtol, atol=rtol, err_msg=path)


@pytest.fixture
def bfloat16() -> Any:
    return ml_dtypes.bfloat16
