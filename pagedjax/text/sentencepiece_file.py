"""Reads a SentencePiece tokenizer.model without the sentencepiece package: the file is one small protobuf message.

Fields: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tokenizers

from pagedjax.errors import UserError, check
from pagedjax.text.vocabulary import NORMAL, Vocabulary, sentencepiece_bpe

BPE_MODEL = 2  # TrainerSpec.ModelType


def read_sentencepiece(path: Path, *, legacy: bool) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The tokenizer of a SentencePiece BPE model, and the names of its special tokens as tokenizer_config.json has them.

    legacy: the space before a text stands after every special token too, as Llama 1 and 2 and Mistral do it.
    """
    try:
        pieces, scores, kinds, trainer, normalizer = _read(path.read_bytes())
    except (IndexError, ValueError, struct.error) as error:
        raise UserError(f"{path} must be a SentencePiece model; it is damaged ({error})") from error
    check(len(pieces) > 0, f"{path} must be a SentencePiece model; it holds no pieces")
    check(
        trainer.get(3, 1) == BPE_MODEL, f"{path} must be of SentencePiece's model type {BPE_MODEL} (BPE); got {trainer.get(3, 1)}"
    )
    check(not normalizer.get(2), f"{path} must not normalize its text (identity); it has a table of replacements")
    check(not normalizer.get(4, 1), f"{path} must keep repeated spaces (remove_extra_whitespaces off); it removes them")
    spaced = bool(normalizer.get(3, 1))
    named = {name: int(trainer.get(field, default)) for name, field, default in _SPECIAL}
    settings: dict[str, Any] = {name: pieces[_signed(i)] for name, i in named.items() if 0 <= _signed(i) < len(pieces)}
    hf = sentencepiece_bpe(
        Vocabulary(pieces, kinds, tuple(scores)),
        space_prefix="never" if not spaced else "every" if legacy else "first",
        unknown=settings.get("unk_token"),
    )
    return hf, {**settings, "add_bos_token": "bos_token" in settings}


# name, field of TrainerSpec, default
_SPECIAL = (("unk_token", 40, 0), ("bos_token", 41, 1), ("eos_token", 42, 2), ("pad_token", 43, -1))


def _signed(value: int) -> int:
    """An int32 of protobuf, which writes negative numbers as 64 bits."""
    return value - 2**64 if value >= 2**63 else value


def _read(data: bytes) -> tuple[list[str], list[float], list[int], dict[int, Any], dict[int, Any]]:
    pieces: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for field, value in _fields(data):
        if field == 1:
            piece = dict(_fields(value))
            pieces.append(piece[1].decode() if 1 in piece else "")
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            kinds.append(piece.get(3, NORMAL))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            normalizer = dict(_fields(value))
    return pieces, scores, kinds, trainer, normalizer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protobuf message: an int, or the bytes of a fixed-width or length-delimited one."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        wire = tag & 7
        if wire == 0:
            value, at = _varint(data, at)
        else:
            if wire == 2:
                size, at = _varint(data, at)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise ValueError(f"unknown wire type {wire}")
            value, at = data[at : at + size], at + size
            if at > len(data):
                raise ValueError("the file ends inside a field")
        yield tag >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
        if shift > 63:
            raise ValueError("a number is too long")
