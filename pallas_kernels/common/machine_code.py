"""Kernels for CPU as machine code: what they are made from, and those that XLA can call in this process. Imports no compiler."""

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


def targets_in(program: bytes) -> list[Target]:
    """Those that a serialized program calls."""
    return [target for name, target in list(registered.items()) if name.encode() in program]
