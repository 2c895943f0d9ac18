"""Grammars over a vocabulary: which tokens may come next. Written on `llguidance`, which compiles JSON schemas, regular expressions
and context-free grammars."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from pagedjax.errors import UserError, check
from pagedjax.text.structural_tag import structural_tag_to_lark
from pagedjax.text.tokenizer import Tokenizer

SPACES = r"( |\n {0,20})?"  # between the parts of JSON, unless a schema says otherwise: weak models never stop writing them
Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]


class Grammars:
    """Compiles grammars for one tokenizer. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Iterable[int]):
        """stop_ids: those of the model; a text ends with any of them where its grammar lets it end."""
        self._stop_ids = sorted(set(stop_ids))
        self._words = -(-tokenizer.vocab_size // 32)  # of a mask
        self._specials = {name: i for i in sorted(tokenizer.special_ids) if (name := tokenizer.hf.id_to_token(i))}
        self._vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Vocabulary(tokenizer, self._stop_ids)))

    def compile(self, kind: Kind, form: Any, allowed: Sequence[int] | None = None) -> "Grammar":
        """Of a JSON schema (text or object), a regular expression, one of several texts, a grammar in Lark's notation or GBNF, or a
        structural tag (text or object). allowed: token ids besides which none may come. UserError where it cannot be compiled, or
        where nothing satisfies it."""
        rule = f"structured_outputs.{kind} must be one that compiles"
        try:
            matcher = llguidance.LLMatcher(self._vocabulary, _source(kind, form, self._specials), log_level=0)
        except UserError:
            raise
        except ValueError as error:  # of a schema that is no JSON to llguidance: with NaN, or half of a surrogate pair
            raise UserError(f"{rule}; got: {_reason(str(error))}") from None
        check(not matcher.is_error(), f"{rule}; got: {_reason(matcher.get_error())}")
        made = Grammar(matcher, self._stop_ids, None if allowed is None else _bits(allowed, self._words))
        check(
            bool(made.mask().any()),
            f"structured_outputs.{kind} must allow at least one token at the start; got one that allows none",
        )
        return made


class Grammar:
    """Where one text stands in its grammar: a `host.constraint.Constraint`."""

    def __init__(self, matcher: llguidance.LLMatcher, stop_ids: Sequence[int], allowed: np.ndarray | None):
        self._matcher, self._stop_ids, self._allowed = matcher, stop_ids, allowed

    def copy(self) -> "Grammar":
        return Grammar(self._matcher.deep_copy(), self._stop_ids, self._allowed)

    def accept(self, token: int) -> bool:
        """Takes the next token; False where it is not allowed."""
        if token in self._stop_ids:  # not the end of this request, which ignores them: a grammar has no place for it
            return False
        return self._matcher.consume_token(token)

    @property
    def done(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def mask(self) -> np.ndarray:
        """u32[words]: a bit for each token that may be next; none where the text is done or cannot go on."""
        if self._matcher.is_stopped():
            return np.zeros(1, np.uint32)
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        if self._allowed is None:
            return bits
        words = min(len(bits), len(self._allowed))
        return bits[:words] & self._allowed[:words]


class _Vocabulary:
    """The tokenizer as llguidance reads one: the bytes of every token, by our own spelling, whatever the checkpoint."""

    def __init__(self, tokenizer: Tokenizer, stop_ids: Sequence[int]):
        self._tokenizer = tokenizer
        self.special_token_ids = sorted({*tokenizer.special_ids, *stop_ids})
        special = set(self.special_token_ids)
        spelled = [b"" if i in special else tokenizer.token_bytes(i) or b"" for i in range(tokenizer.vocab_size)]
        self.tokens = [_marked(i) if i in special else piece for i, piece in enumerate(spelled)]
        self.bos_token_id = tokenizer.bos_id
        self.eos_token_id = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)

        self._ids = {piece: i for i, piece in reversed(list(enumerate(self.tokens))) if piece}
        self._longest = max(map(len, self._ids), default=1)
        self._newline = tokenizer.encode("\n", add_special=False)

    def __call__(self, text: str) -> list[int]:
        """Ids that spell the text, byte for byte, as the model would write it in the middle of a text: behind a newline, since some
        vocabularies put a space before every text."""
        ids = self._tokenizer.encode("\n" + text, add_special=False)
        ids = (
            ids[len(self._newline) :]
            if ids[: len(self._newline)] == self._newline
            else self._tokenizer.encode(text, add_special=False)
        )
        whole = text.encode()
        return ids if b"".join(self.tokens[i] for i in ids) == whole else self._greedy(whole)

    def _greedy(self, whole: bytes) -> list[int]:
        """The longest token at each place."""
        ids, at = [], 0
        while at < len(whole):
            sizes = range(min(self._longest, len(whole) - at), 0, -1)
            size = next((n for n in sizes if whole[at : at + n] in self._ids), 0)
            if not size:
                break  # a vocabulary without this byte
            ids.append(self._ids[whole[at : at + size]])
            at += size
        return ids


def _marked(token: int) -> bytes:
    """The name of a special token, which no text can write: llguidance reads a leading 0xFF so."""
    return b"\xff<%d>" % token


def _source(kind: Kind, form: Any, specials: Mapping[str, int]) -> str:
    match kind:
        case "json":
            return llguidance.LLMatcher.grammar_from_json_schema(_schema(form), {"whitespace_pattern": SPACES})
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(form)
        case "choice":
            return llguidance.LLMatcher.grammar_from_lark(f"start: {' | '.join(json.dumps(text) for text in form)}")
        case "grammar":
            try:
                return llguidance.LLMatcher.grammar_from_lark(any_to_lark(form))
            except Exception as error:  # of its own kinds, for what it cannot read
                check(False, f"structured_outputs.grammar must be in Lark's notation or in GBNF; got: {_reason(str(error))}")
                raise
        case "structural_tag":
            return llguidance.LLMatcher.grammar_from_lark(structural_tag_to_lark(form, specials, SPACES))


def _schema(form: str | Mapping[str, Any]) -> str:
    if not isinstance(form, str):
        return json.dumps(dict(form))
    try:
        parsed = json.loads(form)
    except ValueError as error:
        check(False, f"structured_outputs.json must be a JSON schema; got text that is no JSON ({error})")
        raise
    check(isinstance(parsed, dict), f"structured_outputs.json must be a JSON object; got {form!r:.80}")
    return json.dumps(parsed)


def _reason(text: str) -> str:
    """The first line of llguidance's message."""
    return " ".join(text.strip().splitlines()[:1])[:300] or "no reason"


def _bits(tokens: Sequence[int], size: int) -> np.ndarray:
    """u32[size]: a bit for each token; those that it has no bit for spell nothing."""
    ids = np.asarray([token for token in tokens if 0 <= token < 32 * size], np.uint32)
    words = np.zeros(size, np.uint32)
    np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % np.uint32(32)))
    return words
