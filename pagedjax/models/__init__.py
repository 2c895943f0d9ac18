"""One file per architecture, three functions each: `param_specs`, `forward`, `logits`."""

from types import ModuleType

from pagedjax.errors import check
from pagedjax.models import gemma2, gemma3, llama, mistral, qwen2, qwen3

ARCHITECTURES: dict[str, ModuleType] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
}


def model_for(architecture: str) -> ModuleType:
    check(architecture in ARCHITECTURES, f"architecture must be one of {', '.join(ARCHITECTURES)}; got {architecture}")
    return ARCHITECTURES[architecture]
