"""pagedjax: an LLM inference engine in JAX with a paged KV cache, for TPU, GPU and CPU."""

from pagedjax.config import EngineConfig
from pagedjax.errors import UserError
from pagedjax.host.request import SamplingParams
from pagedjax.llm import LLM, RequestOutput, Score

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "Score", "UserError"]
