"""The incremental decoder shows exactly the text of all tokens, however they come, and stops exactly where it must."""

from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from pagedjax.errors import UserError
from pagedjax.text import IncrementalDecoder, StopHit, Tokenizer, load_tokenizer
from pagedjax.text.pieces import spelling_of

STORIES = load_tokenizer(Path(__file__).parents[1] / "golden" / "stories260K")
SPICE = ["é", "😀", "👩‍👩‍👧", "漢字", "e\u0301", "\ufffd\ufffd", "  two", " .", "</s>", "\x00", "स्ते"]


def byte_level() -> Tokenizer:
    """All single bytes, some words, an added token outside the byte alphabet, and a special one."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["Ġthe", "ing", "ðŁĺ", "Ģ!", "ĠĠ"]
    hf = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    hf.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    hf.decoder = decoders.ByteLevel()
    hf.add_tokens(["a 漢字"])
    hf.add_special_tokens(["<|end|>"])
    end = hf.token_to_id("<|end|>")
    assert end is not None
    return Tokenizer(hf, spelling_of(hf), bos_id=None, eos_id=end, special_ids=frozenset([end]))


def words(decoder: decoders.Decoder | None) -> Tokenizer:
    """A vocabulary of whole words, with SentencePiece's mark for a space."""
    pieces = ["[unk]", "▁", "▁▁", "▁once", "▁upon", "time", "é▁a", "!"]
    hf = tokenizers.Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, unk_token="[unk]"))
    if decoder is not None:
        hf.decoder = decoder
    return Tokenizer(hf, spelling_of(hf), bos_id=None, eos_id=None)


BYTE_LEVEL = byte_level()
KINDS = {
    "byte_level": BYTE_LEVEL,
    "sentencepiece": STORIES,
    "sentencepiece_without_prefix": replace(STORIES, spelling=replace(STORIES.spelling, strip_left=0)),
    "metaspace": words(decoders.Metaspace()),
    "metaspace_without_prefix": words(decoders.Metaspace(prepend_scheme="never")),
    "no_decoder": words(None),
}


@st.composite
def streams(draw, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids, of texts and at random (some outside the vocabulary), and the lengths of the pushes."""
    texts = st.lists(st.one_of(st.sampled_from(SPICE), st.text(max_size=5)), max_size=6).map("".join)
    random_ids = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=25)
    parts = draw(st.lists(st.one_of(texts.map(lambda text: tokenizer.encode(text, add_special=False)), random_ids), max_size=4))
    ids = [i for part in parts for i in part]
    return ids, draw(st.lists(st.integers(0, 5), max_size=len(ids)))


def pushes(ids: list[int], sizes: list[int]) -> list[list[int]]:
    found, at = [], 0
    for size in sizes:
        found.append(ids[at : at + size])
        at += size
    return [*found, ids[at:]]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_pieces_joined_are_the_decoded_text(kind):
    tokenizer = KINDS[kind]

    @settings(max_examples=150, deadline=None)
    @given(streams(tokenizer), st.booleans())
    def run(stream, skip_special):
        ids, sizes = stream
        decoder = IncrementalDecoder(tokenizer, skip_special=skip_special)
        shown = [decoder.push(push) for push in pushes(ids, sizes)] + [decoder.finish()]
        assert "".join(shown) == tokenizer.decode(ids, skip_special=skip_special)
        assert decoder.hit is None

    run()


@pytest.mark.parametrize("kind", ["byte_level", "metaspace", "metaspace_without_prefix", "no_decoder"])
def test_decode_is_that_of_the_tokenizers_package(kind):
    tokenizer = KINDS[kind]

    @settings(max_examples=150, deadline=None)
    @given(streams(tokenizer), st.booleans())
    def run(stream, skip_special):
        ids = stream[0]
        assert tokenizer.decode(ids, skip_special=skip_special) == tokenizer.hf.decode(ids, skip_special_tokens=skip_special)

    run()


@settings(max_examples=200, deadline=None)
@given(streams(STORIES), st.booleans())
@example(([3 + 0xE2, 3 + 0x82, 3 + 0xAC, 3 + 0xFF], []), True)
def test_byte_fallback_decodes_as_the_package_but_in_broken_runs(stream, skip_special):
    """The package turns every byte of a run that is not UTF-8 into U+FFFD, even its good characters; here those stay."""
    ids = stream[0]
    ours = STORIES.decode(ids, skip_special=skip_special)
    theirs = STORIES.hf.decode(ids, skip_special_tokens=skip_special)
    if "\ufffd" not in theirs:
        assert ours == theirs
    assert ours.count("\ufffd") <= theirs.count("\ufffd")


def test_broken_bytes_are_shown_after_at_most_four():
    decoder = IncrementalDecoder(BYTE_LEVEL)
    emoji = BYTE_LEVEL.encode("😀")
    assert [decoder.push([i]) for i in emoji] == ["", "", "", "😀"]
    assert [decoder.push([i]) for i in emoji[:3]] == ["", "", ""]
    assert decoder.push(BYTE_LEVEL.encode("x")) == "\ufffdx"
    lone = BYTE_LEVEL.encode("é")[1]
    assert [decoder.push([lone]) for _ in range(6)] == ["\ufffd"] * 6
    assert decoder.push(emoji[:2]) + decoder.finish() == "\ufffd"


def naive_stop(tokenizer: Tokenizer, ids: list[int], stop: tuple[str, ...], include: bool) -> tuple[str, StopHit | None]:
    """Decodes ever longer prefixes: the first that holds a stop string decides."""
    for n in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:n])
        while text.endswith("\ufffd"):  # perhaps the start of a character that the next token goes on with
            text = text[:-1]
        ends = [(text.find(s) + len(s), -len(s), s) for s in stop if s in text]
        if ends:
            end, _, found = min(ends)
            return text[: end if include else end - len(found)], StopHit(found, n)
    return tokenizer.decode(ids), None


@settings(max_examples=400, deadline=None)
@given(
    st.text(alphabet="ab é漢", max_size=14),
    st.lists(st.text(alphabet="ab é漢", min_size=1, max_size=4), max_size=4).map(tuple),
    st.lists(st.integers(0, 4), max_size=8),
    st.booleans(),
    st.sampled_from([BYTE_LEVEL, STORIES]),
)
@example("aabaab", ("aabaac", "ba"), [], False, BYTE_LEVEL)
@example("abab", ("abab", "b a", "bab"), [1, 1, 1, 1], True, BYTE_LEVEL)
def test_stop_strings_as_in_a_naive_search(text, stop, sizes, include, tokenizer):
    ids = tokenizer.encode(text, add_special=False)
    expected, hit = naive_stop(tokenizer, ids, stop, include)
    decoder = IncrementalDecoder(tokenizer, stop=stop, include_stop=include)
    shown = ""
    for push in pushes(ids, sizes):
        shown += decoder.push(push)
        assert expected.startswith(shown)
    assert shown + decoder.finish() == expected
    assert decoder.hit == hit
    assert decoder.hit is None or (decoder.push(ids), decoder.finish()) == ("", "")


@pytest.mark.parametrize("push", [1, 2, 9])
@pytest.mark.parametrize(
    "min_tokens, shown, hit",
    [
        (2, "", StopHit("aba", 3)),
        (3, "ab", StopHit("aba", 5)),  # the end of the one that does not count is the start of the next
        (5, "ababacabc", None),
    ],
)
def test_a_stop_within_min_tokens_does_not_count(push, min_tokens, shown, hit):
    ids = [BYTE_LEVEL.hf.token_to_id(char) for char in "ababacabc"]
    decoder = IncrementalDecoder(BYTE_LEVEL, stop=("aba",), min_tokens=min_tokens)
    pieces = [decoder.push(ids[i : i + push]) for i in range(0, len(ids), push)]
    assert ("".join(pieces) + decoder.finish(), decoder.hit) == (shown, hit)


def test_only_a_possible_stop_is_held_back():
    decoder = IncrementalDecoder(BYTE_LEVEL, stop=("</s>x", "<b>"))
    shown = [decoder.push(BYTE_LEVEL.encode(c)) for c in "a<b</s</s>y"]
    assert shown == ["a", "", "", "<b", "", "", "</s", "", "", "", "</s>y"]
    assert decoder.finish() == ""


def test_stop_made_by_the_end_of_a_broken_character():
    decoder = IncrementalDecoder(BYTE_LEVEL, stop=("\ufffd",))
    assert decoder.push(BYTE_LEVEL.encode("ok😀")[:-1]) == "ok"
    assert decoder.hit is None
    assert decoder.finish() == ""
    assert decoder.hit == StopHit("\ufffd", 5)


def test_special_tokens_count_but_are_not_shown():
    end = BYTE_LEVEL.eos_id
    assert end is not None
    ids = [*BYTE_LEVEL.encode("a"), end, *BYTE_LEVEL.encode("b")]
    decoder = IncrementalDecoder(BYTE_LEVEL, stop=("b",))
    assert decoder.push(ids) == "a"
    assert decoder.hit == StopHit("b", 3)
    shown = IncrementalDecoder(BYTE_LEVEL, skip_special=False)
    assert shown.push(ids) == "a<|end|>b"


@pytest.mark.parametrize("stop", ["abc", ("",)])
def test_bad_stop_is_refused(stop):
    with pytest.raises(UserError, match="stop must be a tuple of non-empty strings; got"):
        IncrementalDecoder(BYTE_LEVEL, stop=stop)


def test_decoder_with_unknown_steps_is_refused():
    hf = tokenizers.Tokenizer(models.BPE())
    hf.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match=r"decoder must be ByteLevel, Metaspace, or Replace.*; got \['WordPiece'\]"):
        spelling_of(hf)


def test_text_after_a_prompt_keeps_its_first_space():
    prompt, ids = STORIES.encode("Once"), STORIES.encode(" upon", add_special=False)
    assert STORIES.decode(prompt + ids).startswith("Once ")
    for after, shown in ((prompt, "  upon"), ([1], " upon"), ([], " upon")):
        decoder = IncrementalDecoder(STORIES, after=after)
        assert decoder.push(ids) + decoder.finish() == shown
    metaspace = KINDS["metaspace"]
    assert IncrementalDecoder(metaspace, after=[5]).push([3]) == " once"
    assert IncrementalDecoder(metaspace).push([3]) == "once"
