"""Structural tags: an output as a tree of parts, free text here and a form there. The JSON is xgrammar's, which vLLM and smg pass
on: an object with a "format", or the older one with "structures" and "triggers". It becomes a grammar in llguidance's notation.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark

from pagedjax.errors import check

Part = Mapping[str, Any]
Mark = list[str | int]  # what a part begins or ends with: text, and ids of tokens that no text spells
RULE = "structured_outputs.structural_tag"
DEPTH = 64  # of parts in parts


def structural_tag_to_lark(form: str | Part, specials: Mapping[str, int], spaces: str) -> str:
    """A grammar in llguidance's dialect of Lark. `specials`: the ids of tokens that no text spells, by the names that a form calls
    them; `spaces`: a regular expression for what may stand between the pieces of JSON. UserError for what is no structural tag, and
    for parts that are not known here."""
    if isinstance(form, str):
        try:
            form = json.loads(form)
        except ValueError as error:
            check(False, f"{RULE} must be JSON; got text that is none ({error})")
    writer = _Writer(specials, spaces)
    older = isinstance(form, Mapping) and "structures" in form
    start = writer.part(_newer(form) if older else _get(form, "format", Mapping), [], 0)
    return "\n".join(["%llguidance {}", f"start: {start}", *writer.rules, "TEXT: /(?s:.*)/", ""])


def _newer(form: Any) -> Part:
    tags = [
        {
            "begin": _get(one, "begin", str),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": _get(one, "end", str),
        }
        for one in _get(form, "structures", list)
    ]
    return {"type": "triggered_tags", "triggers": _get(form, "triggers", list), "tags": tags}


class _Writer:
    """Writes parts as expressions, and the rules that those need. What ends a part is written with it: `ends` are the marks of
    which one must follow; without any nothing follows; None: what follows is not known, and no free text may come before it."""

    def __init__(self, specials: Mapping[str, int], spaces: str):
        self.rules: list[str] = []
        self._specials, self._spaces = specials, spaces
        self._names = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"(?!)")
        self._open = {
            "any_text": lambda part, ends, depth: self._free(part, ends),
            "triggered_tags": self._triggered_tags,
            "sequence": self._sequence,
            "or": self._or,
        }
        self._closed: dict[str, Callable[[Part, int], str]] = {
            "const_string": lambda part, depth: self._literal(self._mark(_get(part, "value", str))),
            "json_schema": self._json_schema,
            "regex": lambda part, depth: self._rule("/" + _slashed(_get(part, "pattern", str)) + "/"),
            "grammar": self._grammar,
            "token": lambda part, depth: self._literal(self._mark(part)),
            "optional": lambda part, depth: f"({self.part(part.get('content'), None, depth)})?",
            "plus": lambda part, depth: f"({self.part(part.get('content'), None, depth)})+",
            "star": lambda part, depth: f"({self.part(part.get('content'), None, depth)})*",
            "repeat": self._repeat,
            "tag": self._tag,
            "tags_with_separator": self._tags_with_separator,
        }

    def part(self, part: Any, ends: Sequence[Mark] | None, depth: int) -> str:
        kind = _get(part, "type", str)
        names = [*self._closed, *self._open]
        check(kind in names, f"{RULE} must have parts of the types {', '.join(names)}; got {kind!r:.80}")
        check(depth < DEPTH, f"{RULE} may be nested {DEPTH} levels; got more")
        if kind in self._open:
            return self._open[kind](part, ends, depth + 1)
        return self._closed[kind](part, depth + 1) + self._either(map(self._literal, ends or []))

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"p{len(self.rules)}"
        self.rules.append(f"{name}[lazy]: {body}" if lazy else f"{name}: {body}")
        return name

    @staticmethod
    def _either(choices: Any) -> str:
        written = " | ".join(choices)
        return f" ({written})" if written else ""

    # --- marks -----------------------------------------------------------------------------------------------------

    def _mark(self, given: Any) -> Mark:
        """Of a text, in which names of special tokens stand for those, or of a part of type token."""
        if isinstance(given, Mapping):
            token = given.get("token")
            token = self._specials.get(token, token) if isinstance(token, str) else token
            right = isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 2**32
            check(right, f"{RULE} token must be an id or the name of a special token; got {token!r:.80}")
            assert isinstance(token, int)
            return [token]
        check(isinstance(given, str), f"{RULE} must begin and end parts with texts or tokens; got {given!r:.80}")
        mark, at = [], 0
        for found in self._names.finditer(given):
            mark += [given[at : found.start()], self._specials[found[0]]]
            at = found.end()
        return [piece for piece in (*mark, given[at:]) if piece != ""]

    def _ends(self, tag: Part) -> list[Mark]:
        given = tag.get("end")
        ends = [self._mark(one) for one in (given if isinstance(given, list) else [given])]
        check(bool(ends), f"{RULE} tags must have an end; got none")
        return ends

    @staticmethod
    def _literal(mark: Mark) -> str:
        return " ".join(f"<[{piece}]>" if isinstance(piece, int) else json.dumps(piece) for piece in mark) or '""'

    def _text(self, excludes: Sequence[str], end: Mark) -> str:
        """Any text without `excludes`, up to the first place where `end` stands and with it; of an empty end: all that comes."""
        free = " & ".join(["TEXT", *(f"~/(?s:.*{_slashed(re.escape(text))}.*)/" for text in excludes)])
        if end and isinstance(end[0], str):
            return f"{self._rule(f'({free}) {json.dumps(end[0])}', lazy=True)} {self._literal(end[1:]) if end[1:] else ''}"
        name = self._rule(free) if excludes else "TEXT"
        return f"{name} {self._literal(end)}" if end else name

    # --- parts -----------------------------------------------------------------------------------------------------

    def _json_schema(self, part: Part, depth: int) -> str:
        style, schema = part.get("style", "json"), part.get("json_schema")
        check(style == "json", f'{RULE} json_schema.style must be "json"; got {style!r:.80}')
        check(not part.get("any_order"), f"{RULE} json_schema.any_order must be false: properties keep the order of the schema")
        if schema is True:
            schema = {}
        check(isinstance(schema, Mapping), f"{RULE} json_schema must be a JSON schema; got {schema!r:.80}")
        assert isinstance(schema, Mapping)
        return self._rule("%json " + json.dumps({"x-guidance": {"whitespace_pattern": self._spaces}, **schema}))

    def _grammar(self, part: Part, depth: int) -> str:
        given = _get(part, "grammar", str)
        try:
            return self._rule("%lark {\n" + any_to_lark(given) + "\n}")
        except Exception as error:  # of its own kinds, for what it cannot read
            check(False, f"{RULE} grammar must be in Lark's notation or in GBNF; got: {' '.join(str(error).split())[:200]}")
            raise

    def _repeat(self, part: Part, depth: int) -> str:
        least, most = _get(part, "min", int), _get(part, "max", int)
        right = least >= 0 and (most == -1 or (most >= least and most > 0))
        check(right, f"{RULE} repeat must have 0 <= min <= max, or max -1; got {least} and {most}")
        return f"({self.part(part.get('content'), None, depth)}){{{least},{'' if most == -1 else most}}}"

    def _tag(self, tag: Part, depth: int, begun: int = 0) -> str:
        """`begun`: so many characters of its begin are written."""
        begin = tag.get("begin")
        begin = self._mark(begin[begun:] if isinstance(begin, str) else begin)
        return f"{self._literal(begin)} {self.part(tag.get('content'), self._ends(tag), depth)}"

    def _tags_with_separator(self, part: Part, depth: int) -> str:
        tag = self._either([self._tag(tag, depth) for tag in _tags(part)])
        more = "" if part.get("stop_after_first") else f" ({self._literal(self._mark(part.get('separator')))}{tag})*"
        return f"({tag}{more})" if part.get("at_least_one") else f"({tag}{more})?"

    # --- parts that may have free text at their end ------------------------------------------------------------------

    def _free(self, part: Part, ends: Sequence[Mark] | None) -> str:
        """The last of it."""
        known = ends is not None and all(ends)
        rule = "the last of the output, or of a tag that ends with something, or before a const_string"
        check(known, f"{RULE} {part['type']} must be {rule}")
        return self._either(self._text(_excludes(part), end) for end in ends or [[]])

    def _triggered_tags(self, part: Part, ends: Sequence[Mark] | None, depth: int) -> str:
        tags, first_only, needed = _tags(part), part.get("stop_after_first"), part.get("at_least_one")
        first = self._either([self._tag(tag, depth) for tag in tags])
        after = self._either(map(self._literal, ends or []))
        if first_only and needed:  # no free text
            return first + after
        rest = self._free(part, ends)
        by_trigger: dict[str, list[Part]] = {trigger: [] for trigger in _texts(part, "triggers")}
        for tag in tags:
            begin = _get(tag, "begin", str)
            own = [trigger for trigger in by_trigger if begin.startswith(trigger)]
            check(len(own) == 1, f"{RULE} tags must begin with one of the triggers {[*by_trigger]!r:.200}; got {begin!r:.80}")
            by_trigger[own[0]].append(tag)
        found = self._either(
            self._text(_excludes(part), self._mark(trigger)) + self._either([self._tag(tag, depth, len(trigger)) for tag in own])
            for trigger, own in by_trigger.items()
            if own
        )
        return self._either([found + after, rest]) if first_only else f"{first if needed else ''} ({found})* {rest}"

    def _sequence(self, part: Part, ends: Sequence[Mark] | None, depth: int) -> str:
        elements, written = _some(part, "elements"), []
        while elements:
            element, *elements = elements
            closing = bool(elements) and element.get("type") in self._open and elements[0].get("type") == "const_string"
            if closing:  # free text ends with it
                written.append(self.part(element, [self._mark(_get(elements[0], "value", str))], depth))
                elements = elements[1:]
            else:
                written.append(self.part(element, None if elements else ends, depth))
        return " ".join(written) + (self._either(map(self._literal, ends or [])) if closing else "")

    def _or(self, part: Part, ends: Sequence[Mark] | None, depth: int) -> str:
        return self._either([self.part(element, ends, depth) for element in _some(part, "elements")])


def _get(part: Any, name: str, kind: type) -> Any:
    check(isinstance(part, Mapping), f"{RULE} must be made of JSON objects; got {part!r:.80}")
    value = part.get(name)
    right = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
    what = {str: "a text", int: "a whole number", list: "a list", Mapping: "a JSON object"}[kind]
    check(right, f"{RULE} must have {what} as {name} here; got {value!r:.80}")
    return value


def _some(part: Part, name: str) -> list[Part]:
    found = _get(part, name, list)
    check(bool(found), f"{RULE} {name} must not be empty")
    for one in found:
        check(isinstance(one, Mapping), f"{RULE} {name} must hold JSON objects; got {one!r:.80}")
    return found


def _tags(part: Part) -> list[Part]:
    return _some(part, "tags")


def _texts(part: Part, name: str) -> list[str]:
    found = _get(part, name, list)
    right = all(isinstance(text, str) and text for text in found)
    check(right, f"{RULE} {name} must hold texts that are not empty; got {found!r:.80}")
    return found


def _excludes(part: Part) -> list[str]:
    return _texts(part, "excludes") if part.get("excludes") else []


def _slashed(pattern: str) -> str:
    r"""A regular expression as one between slashes: those in it as \/."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL)
