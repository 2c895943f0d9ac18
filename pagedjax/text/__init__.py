"""Text in and out: tokenizers, chat templates and incremental decoding. Stands alone: plain Python, never jax."""

from pagedjax.text.decoder import IncrementalDecoder, StopHit
from pagedjax.text.folder import load_tokenizer
from pagedjax.text.gguf import tokenizer_from_gguf
from pagedjax.text.grammar import Grammars
from pagedjax.text.tokenizer import Tokenizer

__all__ = ["Grammars", "IncrementalDecoder", "StopHit", "Tokenizer", "load_tokenizer", "tokenizer_from_gguf"]
