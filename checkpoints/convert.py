"""Any checkpoint -> an Orbax folder, which loads straight into shards."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from checkpoints.checkpoint import Checkpoint
from checkpoints.load import total_size
from checkpoints.open import open_checkpoint
from checkpoints.store import check_destination, save_store
from pagedjax.config import Dtype
from pagedjax.device.params import ParamSpec, map_specs
from pagedjax.models import model_for


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Checkpoint:
    """Writes `source` as an Orbax folder and opens it. `dtype` is that of the matrices (auto: the file's; bfloat16 for quantized
    files); norms and biases stay float32. `progress(done, total)` counts bytes read. Holds the whole model in host memory.

    UserError if the destination exists; whatever fails, nothing is left behind.
    """
    target = check_destination(Path(destination))
    checkpoint = open_checkpoint(source)
    weights_dtype: Dtype = checkpoint.weights_dtype if dtype == "auto" else dtype
    cfg = checkpoint.config
    specs = model_for(cfg.architecture).param_specs(cfg, weights_dtype, cfg.vocab_size)
    weights: dict[str, np.ndarray] = {}
    total, done = total_size(specs), 0

    def read(path: str, spec: ParamSpec) -> None:
        nonlocal done
        numbers = ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else np.dtype(spec.dtype)
        weights[path] = np.array(checkpoint.read(path), dtype=numbers, order="C")
        done += weights[path].nbytes
        if progress is not None:
            progress(done, total)

    map_specs(read, specs)
    save_store(target, replace(checkpoint, weights_dtype=weights_dtype), weights)
    return open_checkpoint(target)
