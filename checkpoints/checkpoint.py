"""What every kind of checkpoint looks like once it is open: a configuration, defaults, and one function that reads a weight."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pagedjax.config import Dtype, ModelConfig

CARD = "pagedjax.json"  # the file by which a folder that `convert` wrote is known


@dataclass(frozen=True)
class GenerationDefaults:
    """What the makers of a model recommend. None: they say nothing."""

    stop_ids: tuple[int, ...] = ()  # ascending; the union of every file that names some
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None  # of an answer

    def sampling(self) -> dict[str, Any]:
        """What they do say of how tokens are chosen, by the names of SamplingParams."""
        return {name: value for name in SAMPLING_NAMES if (value := getattr(self, name)) is not None}


SAMPLING_NAMES = tuple(f.name for f in fields(GenerationDefaults) if f.name != "stop_ids")


@dataclass(frozen=True)
class Checkpoint:
    """An open checkpoint. Opening reads headers only and has checked the name and shape of every tensor.

    `read(path)` gives one weight by its path in the parameter tree ("layers.3.q"), in its true shape (no padding) and in the
    dtype the file holds (float32 where the file is quantized). `restore`, where the format can, reads all weights at once
    straight into sharded arrays: path -> abstract array with a sharding in, path -> array out.
    """

    source: Path
    config: ModelConfig
    defaults: GenerationDefaults
    weights_dtype: Dtype  # the one of the engine's dtypes that is nearest to the file's
    tokenizer_source: Path | dict[str, Any]  # a folder with tokenizer files, or the metadata of a GGUF file
    read: Callable[[str], np.ndarray]
    restore: Callable[[Mapping[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]] | None = None
