"""Tokenizers rebuilt from GGUF metadata give the ids of the tokenizers they were written from."""

import json
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from gguf import GGUFReader
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from pagedjax.errors import UserError
from pagedjax.text import load_tokenizer, tokenizer_from_gguf
from pagedjax.text.pre_tokenizers import TABLE

GOLDEN = Path(__file__).parents[1] / "golden"
VOCABS = Path(__file__).parents[2] / ".models" / "vocab"
FAMILIES = sorted(path.name[len("ggml-vocab-") : -len(".gguf.inp")] for path in (GOLDEN / "vocab").glob("*.inp"))
STORIES = load_tokenizer(GOLDEN / "stories260K")


def vectors(family: str) -> list[tuple[str, list[int]]]:
    path = GOLDEN / "vocab" / f"ggml-vocab-{family}.gguf.inp"
    texts = path.read_bytes().decode().split("\n__ggml_vocab_test__\n")
    ids = [[int(word) for word in line.split()] for line in path.with_suffix(".out").read_text().splitlines()]
    assert len(texts) in (len(ids), len(ids) + 1) and len(ids) >= 46
    return list(zip(texts[: len(ids)], ids, strict=True))


TEXTS = [text for text, _ in vectors("gpt-2")]


def stories_metadata() -> dict[str, object]:
    """The tokenizer.json of stories260K in the words of a GGUF file. A score is the best rank at which a piece is merged."""
    model = json.loads((GOLDEN / "stories260K" / "tokenizer.json").read_text())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    scores = dict.fromkeys(pieces, -1e9)
    for rank, (left, right) in enumerate(model["merges"]):
        scores[left + right] = max(scores[left + right], -float(rank))
    kinds = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 259)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [scores[piece] for piece in pieces],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


FROM_GGUF = tokenizer_from_gguf(stories_metadata())


@settings(max_examples=300, deadline=None)
@given(
    st.one_of(st.text(max_size=40), st.lists(st.sampled_from(["Once", " upon", "<s>", "</s>", "\n", "  ", "é", "😀"])).map("".join))
)
def test_stories_as_gguf_has_the_ids_of_its_folder(text):
    assert FROM_GGUF.encode(text) == STORIES.encode(text)
    assert FROM_GGUF.decode(STORIES.encode(text)) == STORIES.decode(STORIES.encode(text))


def test_stories_as_gguf_has_the_special_tokens_of_its_folder():
    assert [FROM_GGUF.encode(text) for text in TEXTS] == [STORIES.encode(text) for text in TEXTS]
    for name in ("bos_id", "eos_id", "prefix", "suffix", "special_ids", "vocab_size"):
        assert getattr(FROM_GGUF, name) == getattr(STORIES, name), name


def test_add_space_prefix_and_add_bos_and_eos_are_read():
    metadata = stories_metadata() | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    tokenizer = tokenizer_from_gguf(metadata | {"tokenizer.ggml.add_eos_token": True})
    assert tokenizer.encode(" Once") == [*STORIES.encode("Once")[1:], 2]
    assert tokenizer.decode(tokenizer.encode(" Once")) == " Once"
    assert tokenizer.encode("Once", add_special=False) != STORIES.encode("Once", add_special=False)


def trained_reference() -> tokenizers.Tokenizer:
    """A small GPT-2 style tokenizer that `tokenizers` trained itself, with its own pre-tokenizer."""
    hf = tokenizers.Tokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|end|>"], show_progress=False)
    hf.train_from_iterator(TEXTS, trainer)
    return hf


REFERENCE = trained_reference()


def byte_level_metadata(pre: str) -> dict[str, object]:
    model = json.loads(REFERENCE.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": [3, *[1] * (len(pieces) - 1)],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.eos_token_id": 0,
    }


GPT2 = tokenizer_from_gguf(byte_level_metadata("gpt-2"))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_gpt2_rule_has_the_ids_of_the_packages_own_byte_level(text):
    assert GPT2.encode(text) == REFERENCE.encode(text).ids
    assert GPT2.decode(GPT2.encode(text)) == text


@pytest.mark.parametrize("name", sorted(TABLE))
def test_every_rule_compiles_and_loses_no_byte(name):
    metadata = byte_level_metadata(name)
    metadata["tokenizer.ggml.add_bos_token"] = False
    tokenizer = tokenizer_from_gguf(metadata)
    for text in TEXTS:
        composed = unicodedata.normalize("NFC", text) if TABLE[name].nfc else text
        assert tokenizer.decode(tokenizer.encode(text)) == composed


# what the words of one line are, by the models' own tokenizer.json rules
WORDS = {
    "gpt-2": ["I", "'ve", " 1234", " THINGS", "'", "LL", "\n\n", " ok", "?!"],
    "llama-bpe": ["I", "'ve", " ", "123", "4", " THINGS", "'LL", "\n\n", " ok", "?!"],
    "qwen2": ["I", "'ve", " ", "1", "2", "3", "4", " THINGS", "'LL", "\n\n", " ok", "?!"],
    "smollm": ["I", "'ve", " ", "1", "2", "3", "4", " THINGS", "'", "LL", "\n\n", " ok", "?!"],
    "gpt-4o": ["I've", " ", "123", "4", " THINGS'LL", "\n\n", " ok", "?!"],
    "tekken": ["I", "'ve", " ", "1", "2", "3", "4", " THINGS", "'LL", "\n\n", " ok", "?!"],
}


@pytest.mark.parametrize("name", sorted(WORDS))
def test_rule_cuts_words_as_its_models_do(name):
    text = "I've 1234 THINGS'LL\n\n ok?!"
    metadata = byte_level_metadata(name) | {"tokenizer.ggml.add_bos_token": False}
    cut = tokenizer_from_gguf(metadata).hf.pre_tokenizer
    assert cut is not None
    assert [text[a:b] for _, (a, b) in cut.pre_tokenize_str(text)] == WORDS[name]


def test_chat_templates_are_read():
    named = {"tokenizer.chat_template": "A", "tokenizer.chat_template.tool_use": "B", "tokenizer.chat_templates": ["tool_use"]}
    tokenizer = tokenizer_from_gguf(stories_metadata() | named)
    assert tokenizer.templates == {"default": "A", "tool_use": "B"}
    assert tokenizer.chat_template == "A"


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model must be gpt2, llama or gemma4; got 'bert'"),
        ({"model": None}, "must be gpt2, llama or gemma4; got None"),
        ({"tokens": None}, r"must have the key tokenizer\.ggml\.tokens"),
        ({"tokens": []}, r"tokenizer\.ggml\.unknown_token_id must be below the 0 tokens; got 0"),
        ({"token_type": [1]}, "one kind for each piece; got 1 for 512"),
        ({"scores": [0.0]}, "one score for each piece; got 1 for 512"),
        ({"scores": None}, "SentencePiece vocabulary must have scores"),
        ({"bos_token_id": 512}, r"tokenizer\.ggml\.bos_token_id must be below the 512 tokens; got 512"),
        ({"bos_token_id": None}, r"tokenizer\.ggml\.bos_token_id must be set"),
    ],
)
def test_bad_sentencepiece_metadata_is_refused(change, message):
    metadata = {k: v for k, v in (stories_metadata() | _keys(change)).items() if v is not None}
    with pytest.raises(UserError, match=message):
        tokenizer_from_gguf(metadata)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"pre": "no-such-rule"}, r"tokenizer\.ggml\.pre must be one of .*qwen2.*; got 'no-such-rule'"),
        ({"pre": None}, r"tokenizer\.ggml\.pre must be one of .*; got None"),
        ({"merges": None}, r"must have the key tokenizer\.ggml\.merges"),
        ({"merges": ["ab"]}, 'a merge rule must be two pieces with a space between; got "ab"'),
        ({"merges": ["zq qz"]}, "merge rules must be made of pieces of the vocabulary"),
        ({"add_bos_token": True}, r"tokenizer\.ggml\.bos_token_id must be set"),
        ({"add_eos_token": True, "eos_token_id": None}, r"tokenizer\.ggml\.eos_token_id must be set"),
    ],
)
def test_bad_byte_level_metadata_is_refused(change, message):
    metadata = {k: v for k, v in (byte_level_metadata("gpt-2") | _keys(change)).items() if v is not None}
    with pytest.raises(UserError, match=message):
        tokenizer_from_gguf(metadata)


def _keys(change: dict[str, object]) -> dict[str, object]:
    return {f"tokenizer.ggml.{key}": value for key, value in change.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_vectors(family):
    path = VOCABS / f"ggml-vocab-{family}.gguf"
    if not path.is_file():
        pytest.skip(f"needs {path.name}: python tests/golden/fetch_vocabs.py")
    fields = GGUFReader(path).fields
    tokenizer = tokenizer_from_gguf({key: field.contents() for key, field in fields.items() if key.startswith("tokenizer.")})
    for text, ids in vectors(family):
        composed = unicodedata.normalize("NFC", text)
        if family == "qwen35" and composed != text:
            # llama.cpp leaves the text as it is; the model's own tokenizer composes it first
            assert tokenizer.encode(text, add_special=False) == tokenizer.encode(composed, add_special=False)
            continue
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.decode(ids, skip_special=False) == text
