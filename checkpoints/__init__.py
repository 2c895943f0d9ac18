"""Files <-> parameter trees: Hugging Face folders, GGUF files, and Orbax folders written by `convert`."""

from pathlib import Path

from checkpoints.checkpoint import Checkpoint, GenerationDefaults
from checkpoints.gguf import open_gguf
from checkpoints.hf import open_hf
from checkpoints.load import load_params
from pagedjax.errors import check

__all__ = ["Checkpoint", "GenerationDefaults", "load_params", "open_checkpoint"]


def open_checkpoint(source: str | Path) -> Checkpoint:
    """Opens what `source` is: a folder with config.json (Hugging Face), or a *.gguf file."""
    path = Path(source).expanduser()
    check(path.exists(), f"a model must be a folder or a file; {source} does not exist")
    if path.is_file():
        check(path.suffix == ".gguf", f"a model file must end in .gguf; got {path.name}")
        return open_gguf(path)
    return open_hf(path)
