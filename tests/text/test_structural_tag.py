"""Structural tags over a real vocabulary: which texts are of a form, which are not, and where the form is complete."""

from pathlib import Path
from typing import Any

import pytest

from pagedjax.errors import UserError
from pagedjax.text import Grammars, Tokenizer, load_tokenizer

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
JSON = {"type": "json_schema", "json_schema": SCHEMA}
TEXT = {"type": "any_text"}
CALLS = {"type": "triggered_tags", "triggers": ["<f="], "tags": [{"begin": "<f=x>", "content": JSON, "end": "</f>"}]}


def const(text: str) -> dict:
    return {"type": "const_string", "value": text}


def sequence(*elements: dict) -> dict:
    return {"type": "sequence", "elements": list(elements)}


def tag(begin: Any, content: dict, end: Any) -> dict:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """SentencePiece, 512 tokens, of which 0, 1 and 2 are special: <unk>, <s>, </s>."""
    return load_tokenizer(Path(__file__).parents[1] / "golden" / "stories260K")


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, [2])


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    newline = tokenizer.encode("\n", add_special=False)
    return tokenizer.encode("\n" + text, add_special=False)[len(newline) :]


def verdict(grammars: Grammars, form: Any, ids: list[int]) -> str:
    """What becomes of a text: it is refused, or ends too late, or may end here, or must go on."""
    grammar = grammars.compile("structural_tag", form)
    for token in ids:
        if grammar.done:
            return "late"
        if not grammar.accept(token):
            return "refused"
    return "whole" if grammar.done or grammar.mask()[0] >> 2 & 1 else "part"


OLDER = {
    "structures": [
        {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=y>", "schema": {"type": "string"}, "end": "!"},
    ],
    "triggers": ["<f="],
}


@pytest.mark.parametrize(
    ("form", "texts"),
    [
        (OLDER, {"hi": "whole", 'a <f=x>{"a": 1}</f> b <f=y>"q"! c': "whole", "a <f=z": "refused", 'a <f=x>{"a":1}': "part"}),
        (const("Hi"), {"Hi": "whole", "Ho": "refused", "H": "part"}),
        ({"type": "regex", "pattern": r"a/b\/c[/]?"}, {"a/b/c": "whole", "a/b/c/": "whole", "a/b": "part"}),
        ({"type": "grammar", "grammar": 'root ::= "x" | "y"'}, {"x": "whole", "z": "refused"}),
        (sequence(const("A: "), JSON, TEXT), {'A: {"a":3}': "whole", 'A: {"a":3} so': "whole", "B": "refused"}),
        (tag("<t>", TEXT | {"excludes": ["n.", "no"]}, "</t>"), {"<t>nab</t>": "whole", "<t>no": "refused", "<t>a</t>b": "late"}),
        (tag("<t>", TEXT, ["</t>", "</u>"]), {"<t>abc</t>": "whole", "<t>no</u>": "whole", "<t>abc</v>": "part"}),
        (sequence(TEXT, const("END")), {"abc END": "whole", "END": "whole", "abc ENDx": "late", "x EN": "part"}),
        (sequence(TEXT, const("END"), JSON), {'abc END{"a":1}': "whole", "ENDx": "refused"}),
        (CALLS | {"at_least_one": True}, {'<f=x>{"a":1}</f> so': "whole", "hi": "refused"}),
        (CALLS | {"stop_after_first": True}, {'hi <f=x>{"a":1}</f>': "whole", '<f=x>{"a":1}</f> so': "late", "hi": "whole"}),
        (
            sequence(tag("<t>", TEXT, "</t>"), CALLS | {"at_least_one": True, "stop_after_first": True}, const(".")),
            {'<t>q</t><f=x>{"a":1}</f>.': "whole", "<t>q</t>z": "refused", '<t>q</t><f=x>{"a":1}</f>z': "refused"},
        ),
        (tag("<r>", CALLS, "</r>"), {"<r>q</r>": "whole", '<r>q<f=x>{"a":1}</f>z</r>': "whole", '<r><f=x>{"a":1}</r>': "refused"}),
        (
            tag("<r>", CALLS | {"stop_after_first": True}, "</r>"),
            {"<r>q</r>": "whole", '<r>q<f=x>{"a":1}</f></r>': "whole", '<r>q<f=x>{"a":1}</f>z': "refused"},
        ),
        (
            {"type": "tags_with_separator", "separator": ",", "tags": [tag("<i>", JSON, "</i>")]},
            {"": "whole", '<i>{"a":1}</i>': "whole", '<i>{"a":1}</i>,<i>{"a":2}</i>': "whole", '<i>{"a":1}</i>,': "part"},
        ),
        (
            {"type": "repeat", "min": 1, "max": 3, "content": {"type": "or", "elements": [const("a"), const("b")]}},
            {"": "part", "a": "whole", "ab": "whole", "abab": "late"},
        ),
        (
            sequence(*({"type": kind, "content": const(text)} for kind, text in (("optional", "x"), ("plus", "y"), ("star", "z")))),
            {"y": "whole", "xyyz": "whole", "x": "part", "zz": "refused"},
        ),
        ({"type": "or", "elements": [TEXT, JSON]}, {"abc": "whole", '{"a":1}': "whole"}),
    ],
)
def test_texts_of_a_form(grammars: Grammars, tokenizer: Tokenizer, form: dict, texts: dict[str, str]) -> None:
    whole = form if "structures" in form else {"type": "structural_tag", "format": form}
    assert {text: verdict(grammars, whole, plain(tokenizer, text)) for text in texts} == texts


def test_special_tokens_are_tokens(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """A form names them by their text or their id; the same text spelled by other tokens is free text."""
    by_name = {"format": CALLS | {"triggers": ["<s>"], "tags": [tag("<s>x", JSON, "<unk>")]}}
    by_id = {"format": tag({"type": "token", "token": 1}, TEXT, {"type": "token", "token": "<unk>"})}
    json_ids, word = plain(tokenizer, 'x{"a":1}'), plain(tokenizer, "hi")
    assert verdict(grammars, by_name, [*word, 1, *json_ids, 0, *word]) == "whole"
    assert verdict(grammars, by_name, [*word, 1, *word]) == "refused"
    spelled = [token for piece in ("<", "s", ">", "h") for token in plain(tokenizer, piece)]
    assert verdict(grammars, by_name, spelled) == "whole"
    assert verdict(grammars, by_id, [1, *word, 0]) == "whole"
    assert verdict(grammars, by_id, word) == "refused"


LAST = "any_text must be the last of the output, or of a tag that ends with something, or before a const_string"
DEEP: dict = const("x")
for _ in range(70):
    DEEP = {"type": "star", "content": DEEP}


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        (3, "must be made of JSON objects; got 3"),
        ("x", "must be JSON; got text that is none"),
        ("[]", r"must be made of JSON objects; got \[\]"),
        ({}, "must have a JSON object as format here; got None"),
        ({"format": {"type": "nope"}}, "must have parts of the types const_string, .*; got 'nope'"),
        ({"format": {"type": ["tag"]}}, r"must have a text as type here; got \['tag'\]"),
        ({"format": {"type": "const_string"}}, "must have a text as value here; got None"),
        ({"format": sequence()}, "elements must not be empty"),
        ({"format": sequence(TEXT, JSON)}, LAST),
        ({"format": {"type": "star", "content": TEXT}}, LAST),
        ({"format": tag("a", TEXT, "")}, LAST),
        ({"format": tag("a", JSON, [])}, "tags must have an end; got none"),
        ({"format": tag("a", JSON, None)}, "must begin and end parts with texts or tokens; got None"),
        ({"format": CALLS | {"triggers": ["q"]}}, r"tags must begin with one of the triggers \['q'\]; got '<f=x>'"),
        ({"format": CALLS | {"excludes": [""]}}, "excludes must hold texts that are not empty"),
        ({"format": JSON | {"style": "qwen_xml"}}, "json_schema.style must be \"json\"; got 'qwen_xml'"),
        ({"format": JSON | {"any_order": True}}, "json_schema.any_order must be false"),
        ({"format": JSON | {"json_schema": {"type": "nope"}}}, "must be one that compiles; got: .*Invalid type: nope"),
        ({"format": {"type": "regex", "pattern": "("}}, "must be one that compiles; got: .*invalid regex"),
        ({"format": {"type": "grammar", "grammar": "("}}, "grammar must be in Lark's notation or in GBNF"),
        ({"format": {"type": "token", "token": "zz"}}, "token must be an id or the name of a special token; got 'zz'"),
        ({"format": {"type": "token", "token": 99999}}, "must be one that compiles"),
        ({"format": {"type": "repeat", "min": 2, "max": 1, "content": JSON}}, "repeat must have 0 <= min <= max, or max -1"),
        ({"format": DEEP}, "may be nested 64 levels; got more"),
        ({"structures": [3], "triggers": ["a"]}, "must be made of JSON objects; got 3"),
        ({"structures": [], "triggers": ["a"]}, "tags must not be empty"),
        ({"structures": [{"begin": "a", "end": "b"}]}, "must have a list as triggers here; got None"),
    ],
)
def test_what_is_no_structural_tag_is_refused(grammars: Grammars, form: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^structured_outputs.structural_tag {sentence}"):
        grammars.compile("structural_tag", form)
