"""Our own folder: `weights/` (Orbax, one array per weight and layer, no padding), pagedjax.json, and the tokenizer's files.

pagedjax.json: {format, config, defaults, weights_dtype, tokenizer: "folder" | "gguf", files: {path in weights/: bytes}}.
The tokenizer is in `tokenizer/` as it was in the Hugging Face folder, or in tokenizer/gguf.json as the metadata of the GGUF file.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from checkpoints.bind import file_specs
from checkpoints.checkpoint import CARD, Checkpoint, GenerationDefaults
from checkpoints.hf import read_json
from pagedjax.config import ModelConfig, RopeConfig
from pagedjax.errors import UserError, check

FORMAT = 1
TOKENIZER_FILES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "sentencepiece.bpe.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
TEMPLATES = "additional_chat_templates"  # a folder with more of them


def check_destination(folder: Path) -> Path:
    """The absolute path. UserError if it exists or has no folder to be in; asked before a long conversion begins."""
    folder = folder.expanduser().resolve()
    check(not folder.exists(), f"the folder to write must not exist; {folder} does")
    check(folder.parent.is_dir(), f"the folder to write must be in an existing folder; {folder.parent} does not exist")
    return folder


def save_store(folder: Path, checkpoint: Checkpoint, weights: Mapping[str, np.ndarray]) -> None:
    """Writes `weights` (path -> array in true shape) and what else `checkpoint` holds.

    Everything goes to a folder beside it, which is renamed when it is complete. UserError if `folder` exists.
    """
    folder = check_destination(folder)
    partial = folder.with_name(f".{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / "weights", dict(weights))
            checkpointer.wait_until_finished()
        kind = save_tokenizer(partial / "tokenizer", checkpoint.tokenizer_source)
        card = {
            "format": FORMAT,
            "config": dataclasses.asdict(checkpoint.config),
            "defaults": dataclasses.asdict(checkpoint.defaults),
            "weights_dtype": checkpoint.weights_dtype,
            "tokenizer": kind,
            "files": file_sizes(partial / "weights"),
        }
        (partial / CARD).write_text(json.dumps(card, indent=1) + "\n", encoding="utf-8")
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def save_tokenizer(folder: Path, source: Path | dict[str, Any]) -> str:
    folder.mkdir()
    if isinstance(source, dict):
        kept = {key: value for key, value in source.items() if key.startswith(("general.", "tokenizer."))}
        (folder / "gguf.json").write_text(json.dumps(kept, ensure_ascii=False), encoding="utf-8")
        return "gguf"
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if (source / TEMPLATES).is_dir():
        shutil.copytree(source / TEMPLATES, folder / TEMPLATES)
    return "folder"


def open_store(folder: Path) -> Checkpoint:
    """UserError where the folder is not one that `save_store` wrote, or is damaged."""
    folder = folder.resolve()
    card = read_json(folder / CARD)
    check(card.get("format") == FORMAT, f"format of {folder / CARD} must be {FORMAT}; got {card.get('format')}")
    try:
        cfg = config_from(card["config"])
        defaults = GenerationDefaults(**{**card["defaults"], "stop_ids": tuple(card["defaults"]["stop_ids"])})
        dtype, kind, files = card["weights_dtype"], card["tokenizer"], dict(card["files"])
    except (KeyError, TypeError) as error:
        raise UserError(f"{folder / CARD} must hold what pagedjax writes there; got {error}") from error
    check_files(folder / "weights", files)
    check_arrays(folder / "weights", cfg)
    tokenizer = read_json(folder / "tokenizer" / "gguf.json") if kind == "gguf" else folder / "tokenizer"

    def read(path: str) -> np.ndarray:
        as_numpy = {path: ocp.RestoreArgs(restore_type=np.ndarray)}
        request = ocp.args.PyTreeRestore(item={path: 0}, restore_args=as_numpy, partial_restore=True)
        return restored(folder / "weights", ocp.PyTreeCheckpointHandler(), request)[path]

    def restore(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        return restored(folder / "weights", ocp.StandardCheckpointHandler(), ocp.args.StandardRestore(dict(abstract)))

    return Checkpoint(folder, cfg, defaults, dtype, tokenizer, read, restore)


def config_from(raw: Mapping[str, Any]) -> ModelConfig:
    """The inverse of dataclasses.asdict."""
    fields = dict(raw)
    fields["rope"] = RopeConfig(**fields["rope"])
    if fields.get("local_rope") is not None:
        fields["local_rope"] = RopeConfig(**fields["local_rope"])
    fields["layer_pattern"] = tuple(fields["layer_pattern"])
    return ModelConfig(**fields)


def restored(folder: Path, handler: Any, request: Any) -> Any:
    with ocp.Checkpointer(handler) as checkpointer:
        try:
            return checkpointer.restore(folder, args=request)
        except (ValueError, OSError, KeyError) as error:
            raise UserError(f"{folder} must be a complete Orbax folder; got {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def file_sizes(folder: Path) -> dict[str, int]:
    """path below `folder` -> bytes, of every file."""
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}


def check_files(folder: Path, sizes: Mapping[str, int]) -> None:
    """UserError for a file that is missing or cut. Looked at before Orbax does, whose readers fail in many places at once."""
    check(folder.is_dir(), f"{folder} must be a folder; it does not exist")
    found = file_sizes(folder)
    for name, size in sizes.items():
        check(name in found, f"{folder / name} must be a file; it does not exist")
        check(found[name] == size, f"{folder / name} is truncated or changed: it must have {size} bytes; got {found[name]}")


def check_arrays(folder: Path, cfg: ModelConfig) -> None:
    """UserError unless the folder's arrays are those the model needs."""
    with ocp.StandardCheckpointer() as checkpointer:
        try:
            metadata = checkpointer.metadata(folder).item_metadata
        except (ValueError, OSError, KeyError) as error:
            raise UserError(f"{folder} must be a complete Orbax folder; got {first_line(error)}") from error
    if metadata is None:
        raise UserError(f"{folder} must be a complete Orbax folder; its metadata cannot be read")
    found = metadata.tree
    specs = file_specs(cfg)
    for path, spec in specs.items():
        check(path in found, f"{folder} must hold the weight {path}; it does not")
        shape = tuple(found[path].shape)
        check(
            shape == spec.shape,
            f"weight {path} of {folder} must have the shape {spec.shape} ({' x '.join(spec.axes)}); got {shape}",
        )
    extra = sorted(set(found) - set(specs))
    check(not extra, f"{folder} must hold only weights its configuration asks for; got {extra[0] if extra else ''}")
