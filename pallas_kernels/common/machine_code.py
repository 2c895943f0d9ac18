"""Kernels for CPU as machine code: what they are made from, and those that XLA can call in this process. Imports no compiler."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """What a kernel is made from, so that another process can make it: functions of a module, by name.

    count(frame) is how many items a call has; make(*args) gives the kernel."""

    module: str
    count: str
    make: str
    args: tuple[int | bool | str, ...]


@dataclass(frozen=True)
class Target:
    """What XLA calls by a name. Each is the name of a function in machine code for this processor, and that code."""

    name: str
    joining: tuple[str, bytes]  # what XLA's other threads call, to take part
    calling: tuple[str, bytes]  # what XLA calls


registered: dict[str, Target] = {}  # by name; see numba_targets.py
_deferred: ContextVar[list[Callable[[], None]] | None] = ContextVar("deferred", default=None)


@contextlib.contextmanager
def deferring() -> Iterator[list[Callable[[], None]]]:
    """What is lowered in here does not wait for its kernels, which XLA asks for when it compiles: whoever compiles calls all that
    is in the list first, of whatever was lowered before, since a function is traced once for many programs."""
    waits: list[Callable[[], None]] = []
    token = _deferred.set(waits)
    try:
        yield waits
    finally:
        _deferred.reset(token)


def wait(until: Callable[[], None]) -> None:
    """Now, or by whoever compiles."""
    waits = _deferred.get()
    if waits is None:
        until()
    else:
        waits.append(until)


def targets_in(program: bytes) -> list[Target]:
    """Those that a serialized program calls."""
    return [target for name, target in list(registered.items()) if name.encode() in program]
