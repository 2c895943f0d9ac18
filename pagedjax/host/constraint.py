"""What limits the tokens of a sequence one by one, such as a grammar, as the scheduler sees it; and how a request asks for one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from pagedjax.errors import check, is_unicode

Kind = Literal["json", "regex", "choice", "grammar", "structural_tag"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Constraint(Protocol):
    """Follows one sequence. It needs the host between two tokens: a sequence that has one takes a row only when its last step is
    committed."""

    def copy(self) -> "Constraint":
        """Another one that stands where this one stands."""
        ...

    def accept(self, token: int) -> bool:
        """Takes the next token, which is none of the request's stop ids; False where it is not allowed."""
        ...

    @property
    def done(self) -> bool:
        """Whether the text is complete and nothing may follow."""
        ...

    def mask(self) -> np.ndarray:
        """u32[words]: bit t % 32 of word t // 32 is 1 where token t may be next, stop ids included where the text may end."""
        ...


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form that an output must have; exactly one of these. Names and meanings are those of vLLM."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema
    regex: str | None = None
    choice: tuple[str, ...] | None = None  # one of these texts
    grammar: str | None = None  # context-free, in Lark's notation or in GBNF
    json_object: bool = False  # any JSON object
    structural_tag: str | Mapping[str, Any] | None = None  # a tree of free text and forms, as xgrammar writes it in JSON

    @property
    def form(self) -> tuple[Kind, Any]:
        """Which it is, and what it says."""
        if self.json_object:
            return "json", {"type": "object"}
        return next((name, getattr(self, name)) for name in KINDS if getattr(self, name) is not None)

    def __post_init__(self):
        given = [name for name in KINDS if getattr(self, name) is not None]
        given += ["json_object"] if self.json_object else []
        names = f"{', '.join(KINDS)} and json_object"
        check(len(given) == 1, f"structured_outputs must have exactly one of {names}; got {', '.join(given) or 'none'}")
        for name, what in (("json", "a JSON schema"), ("structural_tag", "a structural tag")):
            value = getattr(self, name)
            right = value is None or isinstance(value, str | Mapping)
            check(right, f"structured_outputs.{name} must be {what}, as a text or an object; got {type(value).__name__}")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            check(value is None or isinstance(value, str), f"structured_outputs.{name} must be a string; got {value!r:.80}")
            check(value is None or is_unicode(value), f"structured_outputs.{name} must be valid Unicode; got {value!r:.80}")
        if self.choice is not None:
            check(not isinstance(self.choice, str), f"structured_outputs.choice must be a list of texts; got {self.choice!r:.80}")
            object.__setattr__(self, "choice", tuple(self.choice))
            right = all(isinstance(text, str) and text for text in self.choice)
            check(
                bool(self.choice) and right,
                f"structured_outputs.choice must hold texts that are not empty; got {self.choice!r:.80}",
            )
            valid = all(map(is_unicode, self.choice))
            check(valid, f"structured_outputs.choice must hold texts of valid Unicode; got {self.choice!r:.80}")
