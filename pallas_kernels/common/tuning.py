"""Sizes that were measured: what a backend's `tuned.json`, beside its op, says of a call, or else the backend's own rule.

    config = tuned("paged_decode", "xla", chip, attention_key(spec), default_config(spec))

An entry is for one backend, chip and shape, and for sizes up to a power of two:

    {"backend": "xla", "chip": "cpu avx512f", "shape": {"block_size": 16, "dtype": "float32", …}, "bucket": 14,
     "config": {"pairs": 32, "long": 4}, "provenance": {"device": …, "gb_s": …, "jax": …, "command": …, "date": …}}

A provenance of "heuristic" means that nobody measured it.
"""

import contextlib
import dataclasses
import functools
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pallas_kernels.common.layout import check
from pallas_kernels.common.spec import AttentionSpec, WriteSpec
from pallas_kernels.common.targets import Chip

ROOT = Path(__file__).parents[1]
MEASURED = {"device": str, "gb_s": float, "jax": str, "command": str, "date": str}  # of a provenance
TRIED: dict[tuple[str, str], Any] = {}
ASKED: set[tuple[str, str]] = set()  # of those in TRIED

Entry = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """What a call is looked up by: `shape` must be equal, `size` is rounded up."""

    shape: tuple[tuple[str, int | str], ...]
    size: int  # what the work grows with

    @property
    def bucket(self) -> int:
        """log2 of the size, rounded up."""
        return max(0, self.size - 1).bit_length()


def attention_key(spec: AttentionSpec) -> Key:
    """Of paged_decode and paged_attention: the size is rows times the longest context."""
    pool = spec.pool
    shape = (
        ("block_size", pool.block_size),
        ("dtype", spec.dtype),
        ("group", spec.group),
        ("kv_heads", pool.kv_heads),
        ("scales", spec.scales),
        ("width", pool.width),
    )
    return Key(shape, spec.rows * spec.blocks * pool.block_size)


def write_key(spec: WriteSpec) -> Key:
    """Of kv_write: the size is the number of tokens."""
    pool = spec.pool
    shape = (
        ("block_size", pool.block_size),
        ("dtype", spec.dtype),
        ("kv_heads", pool.kv_heads),
        ("scales", spec.scales),
        ("width", pool.width),
    )
    return Key(shape, spec.tokens)


def chip_name(chip: Chip | None) -> str:
    """As entries have it; "other" is every platform without kernels of its own."""
    return "other" if chip is None else chip.name


def tuned[C](op: str, backend: str, chip: Chip | None, key: Key, default: C) -> C:
    """The config for a call, of the type of `default` (a dataclass of numbers): that of the entry with the smallest bucket that
    holds the call, of the largest one where it is larger than all, or `default` where no entry fits. Never an error."""
    tried = TRIED.get((op, backend))
    if tried is not None:
        ASKED.add((op, backend))
        return tried
    return look_up(load(ROOT / op / "tuned.json"), backend, chip_name(chip), key, default)


def look_up[C](entries: Sequence[Entry], backend: str, chip: str, key: Key, default: C) -> C:
    """`tuned` in these entries; those that make no config are passed over."""
    found = []
    for entry in entries:
        if (entry.get("backend"), entry.get("chip"), entry.get("shape")) == (backend, chip, dict(key.shape)):
            config = config_of(entry, default)
            if config is not None:
                found.append((entry["bucket"], config))
    larger = [item for item in found if item[0] >= key.bucket]
    best = min(larger, key=lambda item: item[0], default=None) or max(found, key=lambda item: item[0], default=None)
    return default if best is None else best[1]


def config_of[C](entry: Entry, default: C) -> C | None:
    """The entry's config, or None where it is not one of the type of `default`."""
    values, bucket = entry.get("config"), entry.get("bucket")
    fields = dataclasses.fields(default)  # pyright: ignore[reportArgumentType]
    if not isinstance(values, dict) or values.keys() != {field.name for field in fields} or type(bucket) is not int:
        return None
    for field in fields:
        like = getattr(default, field.name)
        if type(values[field.name]) is not type(like) or (type(like) is int and values[field.name] < 1):
            return None
    return type(default)(**values)


@functools.cache
def load(path: Path) -> tuple[Entry, ...]:
    """The entries of a file, without what is none; () where it cannot be read."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ()
    return tuple(entry for entry in entries if isinstance(entry, dict)) if isinstance(entries, list) else ()


def complaints(entry: Entry) -> list[str]:
    """What is wrong with an entry, whatever its backend: for the tests of what is shipped, and before one is written."""
    wrong = []
    for name, kind in {"backend": str, "chip": str, "shape": dict, "bucket": int, "config": dict}.items():
        if type(entry.get(name)) is not kind:
            wrong.append(f"{name} must be {kind.__name__}; got {entry.get(name)!r}")
    said = entry.get("provenance")
    if said != "heuristic":
        if not isinstance(said, dict) or said.keys() != MEASURED.keys():
            wrong.append(f"provenance must be heuristic or have {', '.join(MEASURED)}; got {said!r}")
        else:
            wrong += [
                f"{name} must be {kind.__name__}; got {said[name]!r}"
                for name, kind in MEASURED.items()
                if type(said[name]) is not kind
            ]
    return wrong


def place_of(entry: Entry) -> tuple[Any, ...]:
    """What two entries may not have in common; entries stand in its order."""
    return entry["backend"], entry["chip"], sorted((k, str(v)) for k, v in entry["shape"].items()), entry["bucket"]


def check_file(option: str, path: Path | None) -> None:
    """ValueError where no file can be written at the path that a command's option names: for commands to ask before the work whose
    result goes there. None: the option was not given."""
    if path is not None:
        check(os.path.isdir(path.parent), f"{option} must be in a folder that exists; got {path}")
        check(not os.path.isdir(path), f"{option} must be a file and no folder; got {path}")
        check(
            os.access(path if path.exists() else path.parent, os.W_OK), f"{option} must be a file that may be written; got {path}"
        )


def save(path: Path, entries: Sequence[Entry]) -> None:
    """Writes the entries beside those that are there, in place of those for the same calls (of the new ones the last); all or
    nothing. ValueError for one that is not complete."""
    for entry in entries:
        wrong = complaints(entry)
        if wrong:
            raise ValueError(wrong[0])
    kept = [entry for entry in load.__wrapped__(path) if not complaints(entry)]
    by_place = {str(place_of(entry)): entry for entry in (*kept, *entries)}
    lines = [json.dumps(entry, sort_keys=True) for entry in sorted(by_place.values(), key=place_of)]
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False, encoding="utf-8") as file:
        file.write("[\n" + ",\n".join(lines) + "\n]\n" if lines else "[]\n")
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)
    load.cache_clear()


@contextlib.contextmanager
def trying(op: str, backend: str, config: Any) -> Iterator[None]:
    """Lets `tuned` answer with this config for what is traced meanwhile: how the tuner tries one. Only new functions are traced
    anew. LookupError where nobody asked, so that a backend without a look-up is not measured again and again for nothing."""
    TRIED[op, backend] = config
    try:
        yield
        if (op, backend) not in ASKED:
            raise LookupError(f"{backend} of {op} did not ask for its sizes")
    finally:
        del TRIED[op, backend]
        ASKED.discard((op, backend))
