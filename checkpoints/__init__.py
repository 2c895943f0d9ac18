"""Files <-> parameter trees: Hugging Face folders, GGUF files, and Orbax folders written by `checkpoints.convert`."""

from checkpoints.checkpoint import Checkpoint, GenerationDefaults
from checkpoints.load import load_params
from checkpoints.open import open_checkpoint

__all__ = ["Checkpoint", "GenerationDefaults", "load_params", "open_checkpoint"]
