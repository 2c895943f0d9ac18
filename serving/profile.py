"""Traces of the device and the host, for xprof and Perfetto."""

import threading
from pathlib import Path

import jax

from serving.errors import Refusal

_running = threading.Lock()  # JAX has one trace at a time for the whole process


def folder(allowed: str, asked: str) -> str:
    """Where a trace is written: the configured folder, or one in it. Refusal for any other place."""
    if not allowed:
        raise Refusal("unsupported", "profiling needs a folder: start the server with --profile-folder")
    root = Path(allowed).expanduser().resolve()
    target = (root / asked).resolve()
    if not target.is_relative_to(root):
        raise Refusal("permission_denied", f"a trace must be written below {root}; got {asked}", param="output_dir")
    return str(target)


def start(target: str) -> None:
    """Refusal where a trace is running already."""
    if not _running.acquire(blocking=False):
        raise Refusal("invalid_argument", "a trace is running already")
    try:
        jax.profiler.start_trace(target)
    except BaseException:
        _running.release()
        raise


def stop() -> None:
    if not _running.locked():
        raise Refusal("invalid_argument", "no trace is running")
    try:
        jax.profiler.stop_trace()
    finally:
        _running.release()
