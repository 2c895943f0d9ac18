"""A GGUF file of llama.cpp: one file with the weights, the configuration and the tokenizer."""

from pathlib import Path
from typing import Any

from checkpoints.bind import Origin, bind, file_specs
from checkpoints.checkpoint import Checkpoint, GenerationDefaults
from checkpoints.gguf_config import model_config
from checkpoints.gguf_file import read_gguf
from checkpoints.names import NAMES
from pagedjax.config import Dtype, ModelConfig
from pagedjax.errors import check

STOP_KEYS = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
SAMPLING = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def open_gguf(path: Path) -> Checkpoint:
    """UserError for a file that is truncated or corrupt, a model the engine does not have, and a type that cannot be read."""
    metadata, tensors = read_gguf(path)
    parts = metadata.get("split.count", 0)
    check(isinstance(parts, int) and parts <= 1, f"{path} must hold the whole model; got one of {parts} parts")
    check("token_embd.weight" in tensors, f"{path} must hold the tensor token_embd.weight; it does not")
    factors = tensors.get("rope_freqs.weight")
    cfg = model_config(
        metadata,
        str(path),
        vocab_size=tensors["token_embd.weight"].shape[0],
        tied="output.weight" not in tensors,
        rope_factors=None if factors is None else factors.read(),
    )
    specs = file_specs(cfg)
    origins = {name: origin(name, cfg) for name in specs}
    read = bind(str(path), specs, origins, tensors, lambda name: name.startswith("rope_freqs"))
    matrices = {tensors[source.name].kind for name, source in origins.items() if len(specs[name].shape) > 1}
    dtype: Dtype = "float32" if matrices == {"F32"} else "bfloat16"
    return Checkpoint(path, cfg, generation_defaults(metadata), dtype, metadata, read)


def origin(path: str, cfg: ModelConfig) -> Origin:
    names = NAMES[cfg.architecture]
    if path.startswith("layers."):
        _, number, weight = path.split(".")
        name = names.LAYER[weight]
        return Origin(name.gguf.format(n=number), name.gguf_transform)
    return Origin(names.TOP[path].gguf, names.TOP[path].gguf_transform)


def generation_defaults(metadata: dict[str, Any]) -> GenerationDefaults:
    for key in (*STOP_KEYS, *SAMPLING.values()):
        value = metadata.get(key, 0)
        right = isinstance(value, int if key in STOP_KEYS else int | float)
        check(right, f"{key} must be a {'token id' if key in STOP_KEYS else 'number'}; got {value!r:.80}")
    stop = {int(metadata[key]) for key in STOP_KEYS if key in metadata}
    sampling = {name: metadata[key] for name, key in SAMPLING.items() if key in metadata}
    return GenerationDefaults(stop_ids=tuple(sorted(stop)), **sampling)
