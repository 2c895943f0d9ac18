"""One file per architecture, three functions each: `param_specs`, `forward`, `logits`."""

from types import ModuleType

from pagedjax.errors import check
from pagedjax.models import llama

ARCHITECTURES: dict[str, ModuleType] = {"llama": llama}


def model_for(architecture: str) -> ModuleType:
    check(architecture in ARCHITECTURES, f"architecture must be one of {', '.join(ARCHITECTURES)}; got {architecture}")
    return ARCHITECTURES[architecture]
