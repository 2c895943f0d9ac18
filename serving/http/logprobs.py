"""Logprobs in OpenAI's two shapes."""

from collections.abc import Iterable, Sequence
from typing import Any

from pagedjax.host.request import Logprobs
from pagedjax.text import IncrementalDecoder, Tokenizer

LEAST = -9999.0  # of a token that the model rules out: JSON has no infinity


def spelled(tokenizer: Tokenizer, token: int) -> bytes:
    """The bytes of a token, special or not; b"" for an id without text."""
    return tokenizer.token_bytes(token) or b""


def label(tokenizer: Tokenizer, token: int) -> str:
    """A token as a string. One that is no UTF-8 of its own reads bytes:\\xf0\\x9f, as OpenAI's do, so that no two are mixed up."""
    piece = spelled(tokenizer, token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[Logprobs]) -> dict[str, Any]:
    """Of chat: each token with its bytes and its best rivals. `entries` in the order of the tokens."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": label(tokenizer, token), "logprob": max(logprob, LEAST), "bytes": list(spelled(tokenizer, token))}

    content = [{**entry(e.token, e.logprob), "top_logprobs": [entry(*best) for best in e.top]} for e in entries]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Of completions: parallel lists. One for each choice; it knows how far the text has come, for the offsets."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], *, skip_special: bool, echoed: str | None):
        """`echoed`: the text of the prompt where it is part of the answer."""
        self._tokenizer, self._prompt, self._skip_special = tokenizer, prompt, skip_special
        self._start = len(echoed or "")
        self._decoder = IncrementalDecoder(tokenizer, skip_special=skip_special, after=prompt)

    def prompt(self, scored: Sequence[Logprobs]) -> dict[str, Any]:
        """Of the prompt: `scored` has an entry for each token but the first, which has no logprob."""
        decoder = IncrementalDecoder(self._tokenizer, skip_special=self._skip_special)
        entries = [None, *scored]
        offsets, end = [], 0
        for token in self._prompt:
            offsets.append(min(end, self._start))
            end += len(decoder.push([token]))
        return self._lists(self._prompt, entries, offsets)

    def output(self, entries: Sequence[Logprobs]) -> dict[str, Any]:
        """Of the next tokens of the answer."""
        offsets = []
        for entry in entries:
            offsets.append(self._start)
            self._start += len(self._decoder.push([entry.token]))
        return self._lists([entry.token for entry in entries], entries, offsets)

    def _lists(self, tokens: Sequence[int], entries: Sequence[Logprobs | None], offsets: list[int]) -> dict[str, Any]:
        return {
            "tokens": [label(self._tokenizer, token) for token in tokens],
            "token_logprobs": [None if entry is None else max(entry.logprob, LEAST) for entry in entries],
            "top_logprobs": [None if entry is None else self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: Logprobs) -> dict[str, float]:
        """The best tokens and, if it is not among them, the one that stands there. Of tokens that read alike the best counts."""
        top: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            top.setdefault(label(self._tokenizer, token), max(logprob, LEAST))
        return top


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of one of the shapes as one; what is no list (the refusal of a chat) is as in the first."""
    return {
        name: [value for part in parts for value in part[name]] if isinstance(first, list) else first
        for name, first in parts[0].items()
    }
