"""A Hugging Face folder: config.json, generation_config.json, and weights in one or many safetensors files."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints.bind import FileTensor, Origin, bind, file_specs
from checkpoints.checkpoint import SAMPLING_NAMES, Checkpoint, GenerationDefaults
from checkpoints.hf_config import model_config
from checkpoints.names import NAMES
from checkpoints.safetensors_file import safetensors_tensors
from pagedjax.config import Dtype, ModelConfig
from pagedjax.errors import UserError, check

# What stands before "embed_tokens.weight": of a text model, and of a multimodal one in its older and newer form.
PREFIXES = ("model.", "language_model.model.", "model.language_model.", "")
# Buffers that old versions of transformers saved, and parts of a multimodal model that a text model does not use.
HARMLESS = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")
OTHER_PARTS = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def open_hf(folder: Path) -> Checkpoint:
    """UserError for a file that is missing, truncated or corrupt, and for a model the engine does not have."""
    raw = read_json(folder / "config.json")
    cfg = model_config(raw, str(folder / "config.json"))
    tensors = folder_tensors(folder)
    specs = file_specs(cfg)
    origins = {path: origin(path, cfg, tensors) for path in specs}
    read = bind(str(folder), specs, origins, tensors, lambda name: harmless(name, cfg, raw))
    kinds = [tensors[source.name].kind for source in origins.values()]
    return Checkpoint(folder, cfg, generation_defaults(folder, raw), nearest_dtype(kinds), folder, read)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. UserError where there is none."""
    check(path.is_file(), f"{path} must be a file; it does not exist")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} must be JSON; got {error}") from error
    check(isinstance(value, dict), f"{path} must hold a JSON object; got {type(value).__name__}")
    return value


def folder_tensors(folder: Path) -> dict[str, FileTensor]:
    """Every tensor of model.safetensors, or of the files that model.safetensors.index.json names."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        places = read_json(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise UserError(f"{index} must hold a weight_map; it does not")
        tensors: dict[str, FileTensor] = {}
        for name in sorted(set(places.values())):
            check((folder / name).is_file(), f"{folder / name} must be a file (the index names it); it does not exist")
            tensors.update(safetensors_tensors(folder / name))
        lost = sorted(set(places) - set(tensors))
        check(not lost, f"the files of {index} must hold every tensor it names; {lost[0] if lost else ''} is missing")
        return tensors
    if not single.is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        found = f"only pickled weights ({pickled[0]})" if pickled else "none"
        check(False, f"{folder} must hold model.safetensors, or model.safetensors.index.json with its files; got {found}")
    return safetensors_tensors(single)


def origin(path: str, cfg: ModelConfig, tensors: Mapping[str, FileTensor]) -> Origin:
    names = NAMES[cfg.architecture]
    prefix = next((p for p in PREFIXES if f"{p}embed_tokens.weight" in tensors), "model.")
    if path.startswith("layers."):
        _, number, weight = path.split(".")
        name = names.LAYER[weight]
        hf = name.hf.format(n=number)
    else:
        name = names.TOP[path]
        hf = name.hf
    if hf.startswith("model."):
        hf = prefix + hf.removeprefix("model.")
    elif prefix == "language_model.model.":
        hf = "language_model." + hf
    return Origin(hf, name.hf_transform)


def harmless(name: str, cfg: ModelConfig, raw: Mapping[str, Any]) -> bool:
    if name.endswith("lm_head.weight"):
        return cfg.tied_embeddings  # some tools write the tied weight twice
    return name.endswith(HARMLESS) or ("text_config" in raw and name.startswith(OTHER_PARTS))


def nearest_dtype(kinds: list[str]) -> Dtype:
    """float32 where most tensors are; else bfloat16, which every accelerator has (also for float16 and quantized files)."""
    return "float32" if Counter(kinds).most_common(1)[0][0] in ("F32", "F64") else "bfloat16"


def as_ids(value: Any, where: str) -> set[int]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    check(all(isinstance(i, int) for i in ids), f"eos_token_id of {where} must be an integer or a list of them; got {value}")
    return set(ids)


def generation_defaults(folder: Path, raw: Mapping[str, Any]) -> GenerationDefaults:
    """Stop ids from config.json and generation_config.json; sampling from the latter, which is greedy where it says
    do_sample false (as transformers takes it)."""
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    text = raw.get("text_config") or {}
    stop = as_ids(raw.get("eos_token_id"), "config.json") | as_ids(text.get("eos_token_id"), "config.json")
    stop |= as_ids(generation.get("eos_token_id"), "generation_config.json")
    theirs = {name: "max_new_tokens" if name == "max_tokens" else name for name in SAMPLING_NAMES}
    sampling = {name: generation[key] for name, key in theirs.items() if generation.get(key) is not None}
    for name, value in sampling.items():
        check(isinstance(value, int | float), f"{theirs[name]} of {path} must be a number; got {value!r}")
    if generation.get("do_sample") is False:  # what only sampling uses is not read then
        greedy = {name: sampling[name] for name in ("repetition_penalty", "max_tokens") if name in sampling}
        sampling = {"temperature": 0.0, **greedy}
    return GenerationDefaults(stop_ids=tuple(sorted(stop)), **sampling)
