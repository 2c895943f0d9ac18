"""pagedjax: an LLM inference engine in JAX with a paged KV cache, for TPU, GPU and CPU."""
