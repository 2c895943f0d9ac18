"""How the pieces of a vocabulary are spelled: every token is a fixed run of bytes, and a text is those bytes read as UTF-8.

That one rule makes decoding incremental and exact: no token is ever decoded twice, and no context is kept but three bytes of
an unfinished character. The spelling is read from the decoder of a `tokenizers` tokenizer.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

import tokenizers

from pagedjax.errors import UserError, check

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The printable character GPT-2 writes for each of the 256 bytes (character -> byte).

    Bytes that are printable in Latin-1 stand for themselves; the others follow in order from U+0100.
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(own)]
    return {chr(b): b for b in own} | {chr(0x100 + i): b for i, b in enumerate(others)}


ALPHABET = byte_alphabet()


@dataclass(frozen=True)
class Spelling:
    """What turns the string of a piece into bytes. The first piece of a text may lose a space (`strip_first`)."""

    byte_level: bool = False  # pieces are written in GPT-2's byte alphabet
    byte_pieces: bool = False  # "<0x0A>" stands for one byte
    replace: tuple[tuple[str, str], ...] = ()  # in every piece, in order
    join: str = ""  # stands before every piece but the first
    strip_left: int = 0  # most spaces taken from the start of the whole text
    drop_in_first: str = ""  # characters taken out of the first piece, before `replace`

    def spell(self, piece: str, *, first: bool) -> bytes:
        """The bytes of a piece; `first`: no piece stands before it in its text. `strip_left` is left to the caller."""
        if self.byte_level:
            values = [ALPHABET[c] for c in piece if c in ALPHABET]
            # an added token holds characters outside the alphabet: it is plain text
            return bytes(values) if len(values) == len(piece) else piece.encode()
        if first and self.drop_in_first:
            piece = piece.replace(self.drop_in_first, "")
        for old, new in self.replace:
            piece = piece.replace(old, new)
        if self.byte_pieces and (found := BYTE_PIECE.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        return piece.encode() if first else (self.join + piece).encode()


def spelling_of(hf: tokenizers.Tokenizer) -> Spelling:
    """The spelling that a tokenizer's decoder describes. A decoder whose tokens are not fixed bytes is a UserError."""
    if hf.decoder is None:
        return Spelling(join=" ")  # what the package does without a decoder
    described = json.loads(hf.decoder.__getstate__())
    steps = described["decoders"] if described["type"] == "Sequence" else [described]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Spelling(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        return Spelling(replace=((mark, " "),), drop_in_first="" if steps[0]["prepend_scheme"] == "never" else mark)
    return _sentencepiece_spelling(steps, kinds)


def _sentencepiece_spelling(steps: list[dict[str, Any]], kinds: list[str]) -> Spelling:
    """Replace*, ByteFallback?, Fuse, Strip?: how SentencePiece models are written."""
    rest = list(zip(kinds, steps, strict=True))
    replace: list[tuple[str, str]] = []
    byte_pieces, strip_left = False, 0
    while rest and rest[0][0] == "Replace" and "String" in rest[0][1]["pattern"]:
        step = rest.pop(0)[1]
        replace.append((step["pattern"]["String"], step["content"]))
    if rest and rest[0][0] == "ByteFallback":
        byte_pieces = True
        rest.pop(0)
    if rest and rest[0][0] == "Fuse":
        rest.pop(0)
        if rest and rest[0][0] == "Strip" and rest[0][1]["content"] == " " and rest[0][1]["stop"] == 0:
            strip_left = rest.pop(0)[1]["start"]
    if rest:
        known = "ByteLevel, Metaspace, or Replace, ByteFallback, Fuse and Strip in that order"
        raise UserError(f"the tokenizer's decoder must be {known}; got {kinds}")
    check(all(old for old, _ in replace), "the tokenizer's decoder must not replace an empty string")
    return Spelling(byte_pieces=byte_pieces, replace=tuple(replace), strip_left=strip_left)
