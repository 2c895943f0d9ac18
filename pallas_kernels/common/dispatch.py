"""Which backend of an op runs on which platform. The ops dispatch by these tables, and reports read the same ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jax import lax


@dataclass(frozen=True)
class Backend:
    """One implementation of an op, and where it is the one to use. `why` says it in a few words."""

    name: str
    platforms: tuple[str, ...]  # as JAX names them: "cpu", "cuda", "rocm", "tpu"; empty: every other platform
    why: str


def choose(backends: Sequence[Backend], platform: str) -> Backend:
    """The backend an op uses on a platform when its caller names none."""
    named = [backend for backend in backends if platform in backend.platforms]
    return (named or [backend for backend in backends if not backend.platforms])[0]


def run(backends: Sequence[Backend], functions: dict[str, Callable[..., Any]], args: Sequence[Any], name: str | None) -> Any:
    """Calls the function of the backend `name`, or (None) of the one for the platform the program is compiled for."""
    if name is not None:
        return functions[name](*args)
    branches = {platform: functions[b.name] for b in backends for platform in b.platforms}
    default = next(functions[backend.name] for backend in backends if not backend.platforms)
    return lax.platform_dependent(*args, default=default, **branches) if branches else default(*args)
