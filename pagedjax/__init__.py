"""pagedjax: an LLM inference engine in JAX with a paged KV cache, for TPU, GPU and CPU.

The public names are loaded when they are first asked for (PEP 562): `pagedjax --help` does not wait for JAX. `__init__.pyi` tells
type checkers the same names.
"""

import importlib
from typing import Any

HOME = {
    "LLM": "pagedjax.llm",
    "Delta": "pagedjax.stream",
    "EngineConfig": "pagedjax.config",
    "EngineLoop": "pagedjax.loop",
    "RequestOutput": "pagedjax.llm",
    "SamplingParams": "pagedjax.host.request",
    "Score": "pagedjax.llm",
    "Service": "pagedjax.host.request",
    "Stream": "pagedjax.stream",
    "StructuredOutputsParams": "pagedjax.host.constraint",
    "UserError": "pagedjax.errors",
}


def __dir__() -> list[str]:
    return sorted(HOME)


def __getattr__(name: str) -> Any:
    if name not in HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOME[name]), name)
