"""Which backend of an op runs where. The ops dispatch by these tables, and reports read the same ones."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax

from pallas_kernels.common.layout import check
from pallas_kernels.common.targets import DEFAULT, Chip, chip_for

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")  # as the lowering of JAX names them


class Later:
    """A module that is imported when something of it is asked for: kernels of other platforms cost a start nothing (those of Mosaic
    GPU take a second to import)."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def always(spec: Any, chip: Chip | None) -> None:
    """`supports` of a backend that takes everything."""


def no_choice(spec: Any, chip: Chip | None) -> Sequence[Any]:
    """`candidates` of a backend without sizes to choose."""
    return ()


@dataclass(frozen=True)
class Backend:
    """One implementation of an op. `why` says in a few words where it is the one to use.

    supports(spec, chip) says in one sentence why a call cannot be made, or None; it sees shapes, dtypes and options alone.
    candidates(spec, chip): configs for the tuner to try, the backend's own first; all of them must compile.
    """

    name: str
    platforms: tuple[str, ...]  # of PLATFORMS; empty: every one
    why: str
    supports: Callable[[Any, Chip | None], str | None] = always
    candidates: Callable[[Any, Chip | None], Sequence[Any]] = no_choice
    module: Any = None  # of a kernel: where its entry function is

    def refuses(self, spec: Any, platform: str, chip: Chip | None = None) -> str | None:
        """Why it does not run a call on a platform, or None."""
        if self.platforms and platform not in self.platforms:
            return f"is for {' and '.join(self.platforms)}"
        chip = chip or chip_for(platform)
        if platform in DEFAULT and self.platforms and chip is None:
            return f"has no code for this {platform} device"
        return self.supports(spec, chip)


def kernel(package: str, name: str, platforms: tuple[str, ...], why: str) -> Backend:
    """The backend whose `supports`, whose `candidates`, if it has some, and whose entry function are in the module of this name in
    the op's package."""
    module = Later(f"{package}.{name}")

    def supports(spec: Any, chip: Chip | None) -> str | None:
        return module.supports(spec, chip)

    def candidates(spec: Any, chip: Chip | None) -> Sequence[Any]:
        return getattr(module, "candidates", no_choice)(spec, chip)

    return Backend(name, platforms, why, supports, candidates, module)


@dataclass(frozen=True)
class Op:
    """An operation: its backends, the one to prefer first, and the last takes every call. `typical` is a call to speak of when
    none is at hand."""

    name: str
    backends: tuple[Backend, ...]
    typical: Any

    def entries(self, name: str, call: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
        """For `run`: of each kernel by name, `call` with the kernel's entry function (`name`, in its module) as first argument."""

        def one(module: Any) -> Callable[..., Any]:
            return lambda *args, chip: call(getattr(module, name), *args, chip=chip)

        return {backend.name: one(backend.module) for backend in self.backends if backend.module is not None}


def choose(op: Op, spec: Any, platform: str, chip: Chip | None = None) -> Backend:
    """The backend that an op uses on a platform when its caller names none: the first that takes the call."""
    return next(backend for backend in op.backends if backend.refuses(spec, platform, chip) is None)


def run(
    op: Op,
    functions: Mapping[str, Callable[..., Any]],
    spec: Any,
    args: Sequence[Any],
    *,
    backend: str | None,
    platform: str | None,
) -> Any:
    """Calls the function of the backend of this name, or (None) of the one that is chosen for the platform that the program is
    compiled for. ValueError, before anything is traced, for an unknown name and for a backend that refuses the call.

    platform: of PLATFORMS, if the caller knows it; nothing is then traced for others. Each function is called as f(*args, chip=…),
    with the chip of the platform.
    """
    check(platform is None or platform in PLATFORMS, f"platform must be one of {', '.join(PLATFORMS)}; got {platform}")
    only = None
    if backend is not None:
        names = [b.name for b in op.backends]
        check(backend in names, f"backend of {op.name} must be {' or '.join(names)}; got {backend}")
        only = op.backends[names.index(backend)]
        reason = only.refuses(spec, platform or (only.platforms or PLATFORMS)[0])
        check(reason is None, f"{op.name} cannot run as {backend}: it {reason}")

    def call(name: str, chip: Chip | None) -> Callable[..., Any]:
        return lambda *args: functions[name](*args, chip=chip)

    places = (platform,) if platform is not None else (only.platforms if only is not None else ()) or PLATFORMS
    plans = {p: ((only or choose(op, spec, p)).name, chip_for(p)) for p in places}
    first = plans[places[0]]
    others = {p: call(*plans[p]) for p in places if plans[p] != first}
    return lax.platform_dependent(*args, default=call(*first), **others) if others else call(*first)(*args)
