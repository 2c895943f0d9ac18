"""The tensors of safetensors files, read lazily from mapped memory. Format: 8 bytes with the length of a JSON header (little
endian), the header {name: {dtype, shape, data_offsets}}, then the data (github.com/huggingface/safetensors)."""

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from checkpoints.bind import FileTensor
from pagedjax.errors import UserError, check

DTYPES: dict[str, Any] = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
MAX_HEADER = 100 << 20  # the format's own limit


def header(path: Path) -> tuple[dict[str, Any], int]:
    """(the entries but `__metadata__`, where the data begins in bytes)."""
    size = path.stat().st_size
    check(size >= 8, f"{path} must be a safetensors file of at least 8 bytes; got {size}")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        check(
            length <= min(size - 8, MAX_HEADER),
            f"{path} is truncated or corrupt: its header must fit into {size - 8} bytes; got {length}",
        )
        try:
            entries = json.loads(file.read(length))
        except ValueError as error:
            raise UserError(f"{path} is corrupt: its header must be JSON; got {error}") from error
    check(isinstance(entries, dict), f"{path} is corrupt: its header must be a JSON object; got {type(entries).__name__}")
    entries.pop("__metadata__", None)
    return entries, 8 + length


def safetensors_tensors(path: Path) -> dict[str, FileTensor]:
    """Every tensor of one file. UserError where the header and the file do not agree."""
    entries, start = header(path)
    data = np.memmap(path, np.uint8, "r", offset=start) if path.stat().st_size > start else np.zeros(0, np.uint8)
    return {name: tensor(path, name, entry, data) for name, entry in entries.items()}


def tensor(path: Path, name: str, entry: Any, data: np.ndarray) -> FileTensor:
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
        sound = isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end and all(n >= 0 for n in shape)
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} is corrupt: the entry of tensor {name} must have dtype, shape and data_offsets; got {entry}"
        ) from None
    check(sound, f"{path} is corrupt: the offsets of tensor {name} must be ascending and not negative; got {begin} to {end}")
    check(end <= data.size, f"{path} is truncated: tensor {name} must end within {data.size} bytes of data; got {end}")

    dtype = np.dtype(DTYPES.get(kind, np.uint8))
    need = math.prod(shape) * dtype.itemsize
    problem = ""
    if kind not in DTYPES:
        problem = f"tensor {name} of {path} must be of type {', '.join(DTYPES)}; got {kind}"
    elif end - begin != need:
        problem = f"{path} is corrupt: tensor {name} of shape {shape} must have {need} bytes; got {end - begin}"
    return FileTensor(shape, kind, lambda: data[begin:end].view(dtype).reshape(shape), problem)
