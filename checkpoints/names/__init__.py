"""What each architecture's weights are called in files. One module per architecture, two tables each: TOP and LAYER, from our
name to the names in Hugging Face folders and in GGUF files."""

from types import ModuleType

from checkpoints.names import gemma2, gemma3, llama, mistral, qwen2, qwen3

NAMES: dict[str, ModuleType] = {
    "llama": llama,
    "mistral": mistral,
    "qwen2": qwen2,
    "qwen3": qwen3,
    "gemma2": gemma2,
    "gemma3": gemma3,
}
