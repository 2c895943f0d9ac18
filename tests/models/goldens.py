"""The tiny models of tests/golden as parameters, through a Hugging Face folder and the loader; and transformers' logits."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from checkpoints import Checkpoint, load_params, open_checkpoint
from pagedjax.config import ModelConfig
from pagedjax.device.params import Stacked
from tests.golden.tiny_models import texts, weights

FOLDER = Path(__file__).parent.parent / "golden"
TOLERANCE = 1e-4  # absolute, on logits that vary by 3 to 4 units

GOLDENS: Mapping[str, Any] = json.loads((FOLDER / "models.json").read_text(encoding="utf-8"))
NAMES = tuple(GOLDENS["models"])


def write_folder(name: str, folder: Path) -> Path:
    """config.json as transformers saved it, and model.safetensors."""
    golden = GOLDENS["models"][name]
    values = weights(name, golden["shapes"])
    total = sum(float(np.abs(value.astype(np.float64)).sum()) for value in values.values())
    assert abs(total - golden["sum"]) < 1e-6 * total, "the seeded weights must be those the logits were made with"
    (folder / "config.json").write_text(json.dumps(golden["config"]), encoding="utf-8")
    save_file(values, folder / "model.safetensors")
    return folder


def open_golden(name: str, folder: Path) -> Checkpoint:
    return open_checkpoint(write_folder(name, folder))


def load(checkpoint: Checkpoint, mesh: Mesh, *, stacked: bool) -> tuple[Any, ModelConfig]:
    """(float32 parameters, the configuration they are padded to)."""
    params, layout = load_params(checkpoint, dtype="float32", mesh=mesh, stacked=stacked)
    assert isinstance(params["layers"], Stacked) == stacked
    return jax.block_until_ready(params), layout.cfg


@cache
def expected(name: str) -> list[np.ndarray]:
    """transformers' logits of each text, f32[length, V]."""
    with np.load(FOLDER / "models_logits.npz") as arrays:
        return [arrays[f"{name}.{i}"] for i in range(len(texts(name)))]


def distance(got: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest absolute difference."""
    assert [x.shape for x in got] == [x.shape for x in wanted]
    return max(float(np.abs(a - b).max()) for a, b in zip(got, wanted, strict=True))
