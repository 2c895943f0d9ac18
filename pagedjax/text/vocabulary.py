"""Builds `tokenizers` tokenizers from bare vocabularies: byte-level BPE from merges, SentencePiece BPE from scores."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from pagedjax.errors import UserError, check

SPACE = "\u2581"  # how SentencePiece writes a space

# kinds of a piece; the numbers of SentencePiece's ModelProto and of GGUF
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

SpacePrefix = Literal["every", "first", "never"]  # before every stretch of plain text, only at the start of a text, not at all


@dataclass(frozen=True)
class Vocabulary:
    """Pieces by id, with their kinds and (SentencePiece) their scores: higher is merged earlier."""

    pieces: list[str]
    kinds: list[int]
    scores: tuple[float, ...] = ()

    def __post_init__(self):
        n = len(self.pieces)
        check(n > 0, "a vocabulary must hold at least one piece; got none")
        check(len(self.kinds) == n, f"a vocabulary must have one kind for each piece; got {len(self.kinds)} for {n}")
        check(len(self.scores) in (0, n), f"a vocabulary must have one score for each piece; got {len(self.scores)} for {n}")

    @cached_property
    def ids(self) -> dict[str, int]:
        """Piece -> id. Of equal pieces the first counts."""
        ids: dict[str, int] = {}
        for i, piece in enumerate(self.pieces):
            ids.setdefault(piece, i)
        return ids


def parse_merges(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Merge rules written as "left right"; the space at index 0, if any, belongs to the left side."""
    merges = []
    for line in lines:
        cut = line.find(" ", 1)
        check(0 < cut < len(line) - 1, f'a merge rule must be two pieces with a space between; got "{line}"')
        merges.append((line[:cut], line[cut + 1 :]))
    return merges


def byte_level_bpe(
    vocabulary: Vocabulary,
    merges: list[tuple[str, str]],
    *,
    patterns: Sequence[str],
    normalizer: normalizers.Normalizer | None,
    whole_words: bool,
) -> tokenizers.Tokenizer:
    """A GPT-2 style tokenizer: text is cut by each pattern in turn, then written in bytes and merged by rank.

    whole_words: a word that is a piece is taken without looking at the merges.
    """
    hf = tokenizers.Tokenizer(_model(vocabulary, merges, ignore_merges=whole_words))
    if normalizer is not None:
        hf.normalizer = normalizer
    cuts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(tokenizers.Regex(p), "isolated") for p in patterns]
    hf.pre_tokenizer = pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    hf.decoder = decoders.ByteLevel()
    _declare(hf, vocabulary, normalized=lambda piece: False)
    return hf


def sentencepiece_bpe(
    vocabulary: Vocabulary,
    *,
    space_prefix: SpacePrefix,
    merges: list[tuple[str, str]] | None = None,
    newline_runs: bool = False,
    unknown: str | None = None,
) -> tokenizers.Tokenizer:
    """A SentencePiece BPE tokenizer with byte fallback. Without `merges` their order comes from the scores.

    newline_runs: runs of newlines are cut from the rest of a text before merging.
    """
    rules = merges_by_score(vocabulary) if merges is None else merges
    hf = tokenizers.Tokenizer(_model(vocabulary, rules, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    escape = normalizers.Replace(" ", SPACE)
    if space_prefix == "every":
        hf.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), escape])
    elif space_prefix == "never":
        hf.normalizer = escape
    else:
        hf.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="first", split=False)
    if newline_runs:
        hf.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"\n+"), "isolated")
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    hf.decoder = decoders.Sequence(steps if space_prefix == "never" else [*steps, decoders.Strip(" ", 1, 0)])
    # where only a normalizer writes spaces as SPACE, a piece like two SPACEs must be looked for after it
    _declare(hf, vocabulary, normalized=lambda piece: space_prefix == "never" and SPACE in piece)
    return hf


def merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All ways to make one piece of two, best score of the result first (ties: lower ids of the parts first).

    SentencePiece merges the neighbours whose union scores best; ranking every pair by the score of its union is the same.
    """
    check(len(vocabulary.scores) > 0, "a SentencePiece vocabulary must have scores; got none")
    ids = {piece: i for piece, i in vocabulary.ids.items() if vocabulary.kinds[i] in (NORMAL, USER_DEFINED, UNUSED)}
    found: list[tuple[float, int, int]] = []
    for piece, i in ids.items():
        for cut in range(1, len(piece)):
            left = ids.get(piece[:cut])
            if left is not None and (right := ids.get(piece[cut:])) is not None:
                found.append((-vocabulary.scores[i], left, right))
    found.sort()
    return [(vocabulary.pieces[left], vocabulary.pieces[right]) for _, left, right in found]


def _model(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocabulary.ids, merges, **options)
    except Exception as error:  # the package raises plain Exception
        raise UserError(f"merge rules must be made of pieces of the vocabulary; got: {error}") from error


def _declare(hf: tokenizers.Tokenizer, vocabulary: Vocabulary, *, normalized: Callable[[str], bool]) -> None:
    """Marks control pieces as special and user-defined ones as added; both keep their ids."""
    special: list[tokenizers.AddedToken] = []
    plain: list[tokenizers.AddedToken] = []
    for piece, kind in zip(vocabulary.pieces, vocabulary.kinds, strict=True):
        if kind in (CONTROL, UNKNOWN) and piece:
            special.append(tokenizers.AddedToken(piece, normalized=False, special=True))
        elif kind == USER_DEFINED and piece:
            plain.append(tokenizers.AddedToken(piece, normalized=normalized(piece), special=False))
    hf.add_special_tokens(special)
    hf.add_tokens(plain)
