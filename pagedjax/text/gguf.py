"""The tokenizer of a GGUF file, rebuilt from its metadata. Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import normalizers

from pagedjax.errors import UserError, check
from pagedjax.text.pieces import spelling_of
from pagedjax.text.pre_tokenizers import pre_tokenizer
from pagedjax.text.tokenizer import Tokenizer
from pagedjax.text.vocabulary import CONTROL, NORMAL, Vocabulary, byte_level_bpe, parse_merges, sentencepiece_bpe

SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Builds a tokenizer from GGUF metadata (keys to plain Python values or NumPy arrays).

    tokenizer.ggml.model is gpt2 (byte-level BPE, cut by the rule tokenizer.ggml.pre names), llama (SentencePiece BPE by scores)
    or gemma4 (SentencePiece BPE by merges). Anything else, or a missing key, is a UserError.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        hf, add_bos = _byte_level(metadata)
    elif model == "llama":
        prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
        unknown = _special(metadata, "unknown_token_id")
        hf = sentencepiece_bpe(
            _vocabulary(metadata), space_prefix="every" if prefix else "never", unknown=None if unknown is None else unknown[1]
        )
        add_bos = True
    elif model == "gemma4":
        merges = parse_merges(_required(metadata, "merges"))
        hf = sentencepiece_bpe(_vocabulary(metadata), space_prefix="never", merges=merges, newline_runs=True)
        add_bos = True
    else:
        raise UserError(f"tokenizer.ggml.model must be gpt2, llama or gemma4; got {model!r}")
    named = {name: found for name, key in SPECIAL_KEYS.items() if (found := _special(metadata, key)) is not None}
    bos, eos = named.get("bos_token"), named.get("eos_token")
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    check(not add_bos or bos is not None, "tokenizer.ggml.bos_token_id must be set where a BOS is added; got none")
    check(not add_eos or eos is not None, "tokenizer.ggml.eos_token_id must be set where an EOS is added; got none")
    return Tokenizer(
        hf=hf,
        spelling=spelling_of(hf),
        bos_id=bos[0] if bos else None,
        eos_id=eos[0] if eos else None,
        prefix=(bos[0],) if add_bos and bos else (),
        suffix=(eos[0],) if add_eos and eos else (),
        special_ids=frozenset(i for i, token in hf.get_added_tokens_decoder().items() if token.special),
        special_tokens={name: piece for name, (_, piece) in named.items()},
        templates=_templates(metadata),
    )


def _byte_level(metadata: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, bool]:
    rule = pre_tokenizer(metadata.get("tokenizer.ggml.pre"))
    hf = byte_level_bpe(
        _vocabulary(metadata),
        parse_merges(_required(metadata, "merges")),
        patterns=rule.patterns,
        normalizer=normalizers.NFC() if rule.nfc else None,
        whole_words=rule.whole_words,
    )
    return hf, rule.add_bos


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    value = metadata.get(f"tokenizer.ggml.{key}")
    check(value is not None, f"a GGUF tokenizer must have the key tokenizer.ggml.{key}; it is missing")
    return value


def _vocabulary(metadata: Mapping[str, Any]) -> Vocabulary:
    pieces = list(_required(metadata, "tokens"))
    kinds = metadata.get("tokenizer.ggml.token_type")
    kinds = [NORMAL] * len(pieces) if kinds is None else [int(k) for k in kinds]
    scores = tuple(float(s) for s in metadata.get("tokenizer.ggml.scores", ()))
    if len(kinds) == len(pieces):
        for key in ("bos_token_id", "eos_token_id"):  # special even where the file calls them normal
            found = _special(metadata, key)
            if found is not None and kinds[found[0]] == NORMAL:
                kinds[found[0]] = CONTROL
    return Vocabulary(pieces, kinds, scores)


def _special(metadata: Mapping[str, Any], key: str) -> tuple[int, str] | None:
    """Id and piece of a special token, or None where the file names none."""
    token_id = metadata.get(f"tokenizer.ggml.{key}")
    if token_id is None:
        return None
    pieces = _required(metadata, "tokens")
    check(0 <= int(token_id) < len(pieces), f"tokenizer.ggml.{key} must be below the {len(pieces)} tokens; got {token_id}")
    return int(token_id), pieces[int(token_id)]


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """tokenizer.chat_template is the default; tokenizer.chat_template.NAME are others."""
    start = "tokenizer.chat_template"
    templates = {key[len(start) + 1 :]: value for key, value in metadata.items() if key.startswith(start + ".")}
    return {"default": metadata[start], **templates} if metadata.get(start) else templates
