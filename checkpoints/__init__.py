"""Files <-> parameter trees: Hugging Face folders, GGUF files, and Orbax folders written by `convert`."""

from pathlib import Path

from checkpoints.checkpoint import Checkpoint, GenerationDefaults
from checkpoints.hf import open_hf
from checkpoints.load import load_params
from pagedjax.errors import check

__all__ = ["Checkpoint", "GenerationDefaults", "load_params", "open_checkpoint"]


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Opens what `source` is: a folder with config.json (Hugging Face)."""
    path = Path(source).expanduser()
    check(path.exists(), f"a model must be a folder or a file; {source} does not exist")
    return open_hf(path)
