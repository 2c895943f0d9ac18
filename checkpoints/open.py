"""Opens a checkpoint of any kind. Some kinds are loaded by name: their libraries take longer to import than a model to load."""

import importlib
import re
from pathlib import Path

from checkpoints.checkpoint import CARD, Checkpoint
from checkpoints.hf import open_hf
from pagedjax.errors import check

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Opens what `source` is: a folder written by `convert` (pagedjax.json), a Hugging Face folder (config.json), a GGUF file, or
    the hub id "organisation/name" of a model. Reads headers only. UserError says what is wrong with it."""
    path = Path(source).expanduser()
    if path.is_dir():
        if (path / CARD).is_file():
            return importlib.import_module("checkpoints.store").open_store(path)
        check((path / "config.json").is_file(), f"a model folder must hold config.json or {CARD}; {path} does not")
        return open_hf(path)
    if path.is_file():
        check(path.suffix == ".gguf", f"a model file must end in .gguf; got {path}")
        return importlib.import_module("checkpoints.gguf").open_gguf(path)
    check(
        isinstance(source, str) and HUB_ID.fullmatch(source) is not None and path.suffix != ".gguf",
        f"a model must be a folder, a .gguf file or a hub id (organisation/name); {source} does not exist",
    )
    return open_hf(importlib.import_module("checkpoints.hub").fetch(str(source)))
