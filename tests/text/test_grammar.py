"""Grammars over real vocabularies: random walks along their masks spell texts of the right form."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pagedjax.errors import UserError
from pagedjax.text import Grammars, Tokenizer, load_tokenizer

ROOT = Path(__file__).parents[1] / "golden"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Tim", "Lily é"]}, "age": {"type": "integer", "minimum": 3, "maximum": 9}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """SentencePiece with byte fallback, 512 tokens, BOS 1, EOS 2."""
    return load_tokenizer(ROOT / "stories260K")


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, [2])


def tokens_of(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(grammars: Grammars, tokenizer: Tokenizer, seed: int, *form: Any, **options: Any) -> str | None:
    """The text of a walk that takes any of the tokens that may be next; None where 200 tokens did not end it."""
    rng, at, taken = np.random.default_rng(seed), grammars.compile(*form, **options), []
    for _ in range(200):
        may = tokens_of(at.mask())
        assert may, "the mask of a text that is not done allows nothing"
        token = int(rng.choice(may))
        if token == 2:
            return tokenizer.decode([1, 403, *taken])[len(tokenizer.decode([1, 403])) :]
        assert at.accept(token)
        taken.append(token)
        if at.done:
            assert not at.mask().any()
            return tokenizer.decode([1, 403, *taken])[len(tokenizer.decode([1, 403])) :]
    return None


def is_json(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"name", "age"} and value["name"] in ("Tim", "Lily é") and 3 <= value["age"] <= 9


def balanced(text: str) -> bool:
    """As many d as a, around one b: no regular expression can say that."""
    return re.fullmatch("a+bd+", text) is not None and text.count("a") == text.count("d")


FORMS: dict[str, tuple[tuple[str, Any], Callable[[str], object]]] = {
    "choice": (("choice", ("yes", " no", 'say "é"', "日本\n")), lambda text: text in ("yes", " no", 'say "é"', "日本\n")),
    "regex": (("regex", r"[0-9]{3}-(ab|é)+"), re.compile(r"[0-9]{3}-(ab|é)+").fullmatch),
    "schema": (("json", SCHEMA), is_json),
    "schema as text": (("json", json.dumps(SCHEMA)), is_json),
    "lark": (("grammar", 'start: "a" ("b" | start) "d"'), balanced),
    "gbnf": (("grammar", 'root ::= "a" ("b" | root) "d"'), balanced),
}


@pytest.mark.parametrize("name", FORMS)
def test_walks_have_the_form(grammars: Grammars, tokenizer: Tokenizer, name: str):
    form, right = FORMS[name]
    texts = [walk(grammars, tokenizer, seed, *form) for seed in range(12)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 6 and len(set(ended)) > 1
    assert all(right(text) for text in ended), ended


def test_what_is_not_allowed_is_not_accepted(grammars: Grammars):
    at = grammars.compile("choice", ("yes", "no"))
    may = set(tokens_of(at.mask()))
    assert 0 < len(may) < 20
    assert not at.copy().accept(next(token for token in range(3, 512) if token not in may))
    assert not at.copy().accept(2)


def test_a_copy_goes_its_own_way(grammars: Grammars, tokenizer: Tokenizer):
    first = grammars.compile("choice", ("ab", "cd"))
    a, c = (next(t for t in tokens_of(first.mask()) if tokenizer.token_bytes(t) == piece) for piece in (b"a", b"c"))
    second = first.copy()
    assert first.accept(a) and second.accept(c)
    assert {tokenizer.token_bytes(t) for t in tokens_of(first.mask())} == {b"b"}
    assert {tokenizer.token_bytes(t) for t in tokens_of(second.mask())} == {b"d"}


def test_allowed_tokens_are_a_further_limit(grammars: Grammars, tokenizer: Tokenizer):
    digits = [token for token in range(512) if tokenizer.token_bytes(token) in (b"1", b"2")]
    text = walk(grammars, tokenizer, 0, "regex", "[0-9]{4}", allowed=[*digits, 2])
    assert text is not None and re.fullmatch("[12]{4}", text)
    beyond = walk(
        grammars, tokenizer, 0, "regex", "[0-9]{4}", allowed=[*digits, 2, -1, 2**32 - 1, 10**30]
    )  # a bit for each is much
    assert beyond == text


@pytest.mark.parametrize(
    ("form", "match"),
    [
        (("json", "{"), "structured_outputs.json must be a JSON schema; got text that is no JSON"),
        (("json", "true"), "structured_outputs.json must be a JSON object; got 'true'"),
        (("json", {"type": float("nan")}), "structured_outputs.json must be one that compiles; got: expected value"),
        (("json", '{"const": "\\ud800"}'), "structured_outputs.json must be one that compiles; got: "),
        (("json", "3"), "structured_outputs.json must be a JSON object; got '3'"),
        (("json", {"type": "nonsense"}), "structured_outputs.json must be one that compiles; got: Invalid type: nonsense"),
        (("regex", "(["), "structured_outputs.regex must be one that compiles; got: "),
        (("grammar", "nonsense !!"), "structured_outputs.grammar must be in Lark's notation or in GBNF; got: "),
        (("grammar", "start: missing"), "structured_outputs.grammar must be one that compiles; got: "),
    ],
)
def test_what_does_not_compile(grammars: Grammars, form: tuple[Any, Any], match: str):
    with pytest.raises(UserError, match=re.escape(match)):
        grammars.compile(*form)


def test_a_form_that_allows_nothing(grammars: Grammars):
    with pytest.raises(UserError, match="structured_outputs.regex must allow at least one token at the start; got"):
        grammars.compile("regex", "[0-9]", allowed=[300])
