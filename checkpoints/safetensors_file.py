"""The tensors of safetensors files, read one at a time, and not mapped: mapped pages count as this process's memory.

Format: 8 bytes with the length of a JSON header (little endian), the header {name: {dtype, shape, data_offsets}}, then the data
(github.com/huggingface/safetensors).
"""

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
    size = path.stat().st_size - start
    return {name: tensor(path, name, entry, start, size) for name, entry in entries.items()}


def tensor(path: Path, name: str, entry: Any, start: int, size: int) -> FileTensor:
    """`start`: where the file's data begins; `size`: its bytes."""
    try:
        kind, shape, (begin, end) = entry["dtype"], tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
        sound = isinstance(begin, int) and isinstance(end, int) and 0 <= begin <= end and all(n >= 0 for n in shape)
    except (KeyError, TypeError, ValueError):
        raise UserError(
            f"{path} is corrupt: the entry of tensor {name} must have dtype, shape and data_offsets; got {entry}"
        ) from None
    check(sound, f"{path} is corrupt: the offsets of tensor {name} must be ascending and not negative; got {begin} to {end}")
    check(end <= size, f"{path} is truncated: tensor {name} must end within {size} bytes of data; got {end}")

    dtype = np.dtype(DTYPES.get(kind, np.uint8))
    need = math.prod(shape) * dtype.itemsize
    problem = ""
    if kind not in DTYPES:
        problem = f"tensor {name} of {path} must be of type {', '.join(DTYPES)}; got {kind}"
    elif end - begin != need:
        problem = f"{path} is corrupt: tensor {name} of shape {shape} must have {need} bytes; got {end - begin}"

    def read() -> np.ndarray:
        return np.fromfile(path, dtype, math.prod(shape), offset=start + begin).reshape(shape)

    return FileTensor(shape, kind, read, problem)
