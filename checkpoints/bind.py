"""Joins the tensors of a file to the weights a model needs, and checks all names and shapes before anything is read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from checkpoints.names.table import Transform
from pagedjax.config import ModelConfig
from pagedjax.device.params import ParamSpec, map_specs
from pagedjax.errors import check
from pagedjax.models import model_for


@dataclass(frozen=True)
class FileTensor:
    """One tensor of a file: its shape (C order), the file's own word for its type, how to read it, and why it cannot be read."""

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], np.ndarray]
    problem: str = ""  # one sentence; an error only for a tensor that is needed


@dataclass(frozen=True)
class Origin:
    """Where a weight comes from: the tensor's name in the file and what is done to its values."""

    name: str
    transform: Transform


def file_specs(cfg: ModelConfig) -> dict[str, ParamSpec]:
    """path -> spec of every weight, in true shapes (no padding)."""
    specs: dict[str, ParamSpec] = {}
    map_specs(specs.__setitem__, model_for(cfg.architecture).param_specs(cfg, "float32", cfg.vocab_size))
    return specs


def flat_shape(spec: ParamSpec) -> tuple[int, ...]:
    """The shape in a file, where heads and head width are one axis."""
    shape: list[int] = []
    previous = ""
    for size, axis in zip(spec.shape, spec.axes, strict=True):
        if axis == "head_width" and previous in ("heads", "kv_heads"):
            shape[-1] *= size
        else:
            shape.append(size)
        previous = axis
    return tuple(shape)


def apply(transform: Transform, value: np.ndarray) -> np.ndarray:
    """`value` in the weight's own shape, [heads, D, ...] for unpermute."""
    if transform == "plus_one":
        return value.astype(np.float32) + np.float32(1)
    if transform == "unpermute":
        heads, width, *rest = value.shape
        return value.reshape(heads, width // 2, 2, *rest).swapaxes(1, 2).reshape(value.shape)
    return value


def bind(
    where: str,
    specs: Mapping[str, ParamSpec],
    origins: Mapping[str, Origin],
    tensors: Mapping[str, FileTensor],
    harmless: Callable[[str], bool],
) -> Callable[[str], np.ndarray]:
    """The `read` of a Checkpoint. UserError if a weight has no tensor, a tensor no weight, or a shape is not the expected one."""
    for path, spec in specs.items():
        name, expected = origins[path].name, flat_shape(spec)
        check(name in tensors, f"{where} must hold the tensor {name} (for the weight {path}); it does not")
        found = tensors[name].shape
        check(not tensors[name].problem, tensors[name].problem)
        check(found == expected, f"tensor {name} of {where} must have the shape {expected} ({' x '.join(spec.axes)}); got {found}")
    used = {origin.name for origin in origins.values()}
    extra = sorted(name for name in tensors if name not in used and not harmless(name))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        check(False, f"{where} must hold only tensors its configuration asks for; got {extra[0]}{more}")

    def read(path: str) -> np.ndarray:
        check(path in specs, f"a weight to read must be one of the model's; got {path}")
        origin = origins[path]
        return apply(origin.transform, tensors[origin.name].read().reshape(specs[path].shape))

    return read
