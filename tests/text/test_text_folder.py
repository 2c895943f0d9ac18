"""Tokenizers of Hugging Face folders: every file that may say something is read, and what is wrong is said."""

import json
import shutil
import struct
from pathlib import Path

import pytest
import tokenizers

from pagedjax.errors import UserError
from pagedjax.text import load_tokenizer

FOLDER = Path(__file__).parents[1] / "golden" / "stories260K"
STORIES = load_tokenizer(FOLDER)
TEXTS = ["", "Once upon a time, there was a dog.", " two  spaces ", "é漢字😀\n\t", "<s>Once</s> upon", "▁a"]


@pytest.fixture
def folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(FOLDER / name, tmp_path / name)
    return tmp_path


def change_settings(folder: Path, **settings) -> None:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_stories_is_read_as_it_says():
    assert (STORIES.bos_id, STORIES.eos_id, STORIES.vocab_size) == (1, 2, 512)
    assert (STORIES.prefix, STORIES.suffix, STORIES.special_ids) == ((1,), (), frozenset({0, 1, 2}))
    assert STORIES.chat_template is None
    for text in TEXTS:
        assert STORIES.encode(text, add_special=False) == STORIES.hf.encode(text, add_special_tokens=False).ids
    assert STORIES.decode(STORIES.encode("Once upon a time")) == "Once upon a time"
    assert STORIES.decode(STORIES.encode("Once"), skip_special=False) == "<s> Once"


def test_tokens_are_bytes():
    once = STORIES.encode("Once", add_special=False)
    assert b"".join(STORIES.token_bytes(i) or b"" for i in once) == b" Once"
    assert STORIES.token_bytes(3 + 0xFF) == b"\xff"
    assert STORIES.token_bytes(1) == b"<s>"
    assert [STORIES.token_bytes(i) for i in (512, -1, 2**40)] == [None, None, None]
    assert STORIES.decode([512, *once, -1]) == "Once"


def test_bad_words_stand_after_a_space_and_without_one():
    found = STORIES.bad_word_ids(["cat", " dog"])
    texts = [b"".join(STORIES.token_bytes(i) or b"" for i in ids) for ids in found]
    assert texts == [b" cat", b"cat", b" dog", b"dog"]
    with pytest.raises(UserError, match="bad_words must hold more than spaces; got '  '"):
        STORIES.bad_word_ids(["  "])


@pytest.mark.parametrize(
    "text, message", [(b"x", "a prompt must be a string; got bytes"), ("a\ud800", "valid Unicode.*character 1")]
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        STORIES.encode(text)


@pytest.mark.parametrize(
    "bos, eos, prefix, suffix",
    [(None, None, (1,), ()), (False, None, (), ()), (True, True, (1,), (2,)), (False, True, (), (2,)), (None, False, (1,), ())],
)
def test_settings_decide_who_stands_around_a_text(folder, bos, eos, prefix, suffix):
    change_settings(folder, add_bos_token=bos, add_eos_token=eos)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.prefix, tokenizer.suffix) == (prefix, suffix)
    assert tokenizer.encode("Once") == [*prefix, *STORIES.encode("Once", add_special=False), *suffix]


def test_bos_may_be_an_object_and_none(folder):
    change_settings(folder, bos_token={"content": "</s>"}, eos_token=None, add_bos_token=None)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.prefix) == (2, None, (1,))
    assert tokenizer.special_tokens == {"bos_token": "</s>", "unk_token": "<unk>"}


def test_special_tokens_map_fills_in(folder):
    (folder / "tokenizer_config.json").unlink()
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    assert (load_tokenizer(folder).bos_id, load_tokenizer(folder).eos_id) == (1, 2)


def test_added_tokens_of_the_settings(folder):
    change_settings(folder, added_tokens_decoder={"512": {"content": "<|im_end|>", "special": True, "normalized": False}})
    (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 513}))
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("<|im_end|><tool>", add_special=False)
    assert ids == [512, 513] and tokenizer.vocab_size == 514
    assert (tokenizer.decode(ids), tokenizer.decode(ids, skip_special=False)) == ("<tool>", "<|im_end|><tool>")
    change_settings(folder, added_tokens_decoder={"600": {"content": "<far>"}})
    with pytest.raises(UserError, match="added token '<far>' must have the next free id 513 in .*; got 600"):
        (folder / "added_tokens.json").write_text(json.dumps({"<tool>": 512}))
        load_tokenizer(folder)


def test_templates_come_from_files_first(folder):
    change_settings(folder, chat_template=[{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}])
    assert load_tokenizer(folder).templates == {"default": "A", "tool_use": "B"}
    (folder / "chat_template.jinja").write_text("C")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("D")
    assert load_tokenizer(folder).templates == {"default": "C", "tool_use": "B", "rag": "D"}
    change_settings(folder, chat_template="E")
    (folder / "chat_template.jinja").unlink()
    assert load_tokenizer(folder).chat_template == "E"


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("tokenizer.json", "{", r"tokenizer\.json must be a file of the `tokenizers` package; got"),
        ("tokenizer_config.json", "{", r"tokenizer_config\.json must be a readable JSON file"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json must hold a JSON object; got list"),
        ("tokenizer_config.json", '{"bos_token": 3}', "a special token must be a string or an object with a content; got 3"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "eos_token must be a token of the vocabulary in .*; got '<none>'"),
        ("tokenizer_config.json", '{"add_eos_token": true}', "add_eos_token needs eos_token to be set; got none"),
        ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', r"added_tokens_decoder of .* must be an object; got \[1\]"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"512": "x"}}', "an added token of .* must be an object; got 'x'"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"512": {}}}',
            r"must be a string or an object with a content; got \{\}",
        ),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"512": {"content": "x", "special": 1}}}',
            "the flags of an added token of .* must be true or false; got .*'special': 1",
        ),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"five": {"content": "x"}}}',
            "the id of an added token of .* must be a whole number; got 'five'",
        ),
        ("added_tokens.json", '{"x": 512.5}', "the id of an added token of .* must be a whole number; got 512.5"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template of .* must be a string, a list or an object; got 3"),
        ("tokenizer_config.json", '{"chat_template": ["a"]}', "must be an object with a name and a template; got 'a'"),
        ("tokenizer_config.json", '{"chat_template": {"a": 1}}', "text of a chat_template of .* must be strings; got 'a': 1"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja must be readable UTF-8 text; got"),
    ],
)
def test_bad_files_are_refused(folder, name, text, message):
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"must hold tokenizer\.json or a SentencePiece tokenizer\.model; .* has neither"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match="a tokenizer is read from a folder; got .*, which is none"):
        load_tokenizer(tmp_path / "nothing")


# --- SentencePiece's own file -------------------------------------------------------------------------------------------------


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def message(fields: dict[int, int | float | bytes]) -> bytes:
    """A protobuf message of these fields."""
    out = b""
    for number, value in fields.items():
        if isinstance(value, bytes):
            out += varint(number << 3 | 2) + varint(len(value)) + value
        elif isinstance(value, float):
            out += varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            out += varint(number << 3) + varint(value % 2**64)
    return out


def write_model(folder: Path, trainer: dict[int, int], normalizer: dict[int, int | bytes]) -> None:
    """stories260K's vocabulary as a tokenizer.model, instead of its tokenizer.json."""
    path = folder / "tokenizer.json"
    model = json.loads(path.read_text())["model"]
    scores = dict.fromkeys(model["vocab"], -1e9)
    for rank, (left, right) in enumerate(model["merges"]):
        scores[left + right] = max(scores[left + right], -float(rank))
    data = b""
    for i, piece in enumerate(sorted(model["vocab"], key=model["vocab"].get)):
        kind = 2 if i == 0 else 3 if i < 3 else 6 if i < 259 else 1
        data += message({1: message({1: piece.encode(), 2: scores[piece], 3: kind})})
    data += message({2: message({3: 2, 43: -1, **trainer}), 3: message({1: b"identity", 4: 0, **normalizer})})
    (folder / "tokenizer.model").write_bytes(data)
    path.unlink()


def test_sentencepiece_file_has_the_ids_of_tokenizer_json(folder):
    write_model(folder, {}, {})
    (folder / "tokenizer_config.json").unlink()
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == STORIES.encode(text)
        assert tokenizer.decode(STORIES.encode(text)) == STORIES.decode(STORIES.encode(text))
    for name in ("bos_id", "eos_id", "prefix", "suffix", "special_ids", "special_tokens", "vocab_size"):
        assert getattr(tokenizer, name) == getattr(STORIES, name), name


def test_space_before_a_text_follows_the_file_and_legacy(folder):
    shutil.copyfile(folder / "tokenizer.json", folder / "kept")
    once, bare = STORIES.encode("Once", add_special=False), STORIES.encode("\nOnce", add_special=False)[2:]
    assert once != bare
    write_model(folder, {}, {})
    change_settings(folder, legacy=False)
    assert load_tokenizer(folder).encode("Once</s>Once") == [1, *once, 2, *bare]
    change_settings(folder, legacy=True)
    assert load_tokenizer(folder).encode("Once</s>Once") == [1, *once, 2, *once]
    (folder / "kept").rename(folder / "tokenizer.json")
    write_model(folder, {}, {3: 0})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("Once") == [1, *bare]
    assert tokenizer.decode(once) == " Once"


@pytest.mark.parametrize(
    "trainer, normalizer, message",
    [
        ({3: 1}, {}, r"model type 2 \(BPE\); got 1"),
        ({}, {2: b"table"}, "must not normalize its text"),
        ({}, {4: 1}, "must keep repeated spaces"),
    ],
)
def test_other_sentencepiece_models_are_refused(folder, trainer, normalizer, message):
    write_model(folder, trainer, normalizer)
    with pytest.raises(UserError, match=message):
        load_tokenizer(folder)


@pytest.mark.parametrize("data, message", [(b"\x0a\xff", "it is damaged"), (b"", "it holds no pieces"), (b"\x0f", "it is damaged")])
def test_damaged_sentencepiece_file_is_refused(tmp_path, data, message):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)


def test_truncated_sentencepiece_file_is_refused(folder):
    write_model(folder, {}, {})
    path = folder / "tokenizer.model"
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match="it is damaged"):
        load_tokenizer(folder)


def test_post_processor_that_rewrites_is_refused(folder):
    hf = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    hf.post_processor = tokenizers.processors.TemplateProcessing(single="$A <s> $A", special_tokens=[("<s>", 1)])
    hf.save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match="post-processor must only add tokens around a text"):
        load_tokenizer(folder)
