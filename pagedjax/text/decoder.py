"""Tokens of a running request to text that may be shown, one push at a time."""

import codecs
from collections.abc import Iterable
from dataclasses import dataclass

from pagedjax.errors import check
from pagedjax.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StopHit:
    """The stop string that ended a text, and how many tokens it took: those up to and including the one that completes it."""

    stop: str
    num_tokens: int


class IncrementalDecoder:
    """Turns the tokens of one sequence into text, holding back what may not be shown yet.

    Held back are at most three bytes of an unfinished UTF-8 character (a byte that cannot go on is shown as U+FFFD at once) and
    the longest end of the text that may still grow into a stop string. Of several stop strings the one that is complete first
    wins; if two end at the same character, the longer one. Without a hit and with nothing before, the pieces from `push` and
    `finish` joined are exactly `tokenizer.decode` of all tokens. Each token costs time proportional to its own characters times
    the number of stop strings.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        skip_special: bool = True,
        shown: Iterable[int] = (),
        after: Iterable[int] = (),
    ):
        """`min_tokens`: a stop string that is complete within so many tokens does not count; its text is shown, and matching goes
        on through it. `shown`: special tokens that `skip_special` does not skip. `after`: the tokens before the first one. Where
        they spell anything, the text goes on and does not start: a vocabulary that drops the space before a text's first word
        keeps it then."""
        check(not isinstance(stop, str) and all(stop), f"stop must be a tuple of non-empty strings; got {stop!r}")
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids.difference(shown) if skip_special else frozenset()
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._stops = [(s, _borders(s)) for s in dict.fromkeys(stop)]
        self._matched = [0] * len(self._stops)  # characters of each stop string that the text ends with
        self._held = ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._first = all(token in tokenizer.special_ids for token in after)
        self._strip = tokenizer.spelling.strip_left if self._first else 0
        self._num_tokens = 0
        self.hit: StopHit | None = None  # set by the push (or finish) that completes a stop string

    def push(self, tokens: Iterable[int]) -> str:
        """Takes the next tokens and returns the text that has become safe to show. After a hit all further tokens are ignored."""
        shown = ""
        for token in tokens:
            if self.hit is not None:
                break
            self._num_tokens += 1
            if token in self._skipped:
                continue
            spelled = self._tokenizer.token_bytes(token, first=self._first)
            if spelled is None:
                continue
            self._first = False
            shown += self._take(self._utf8.decode(spelled))
        return shown

    def finish(self) -> str:
        """The text still held back; the sequence has ended. An unfinished character becomes U+FFFD."""
        if self.hit is not None:
            return ""
        shown = self._take(self._utf8.decode(b"", final=True))
        if self.hit is None:
            shown, self._held = shown + self._held, ""
        return shown

    def _take(self, text: str) -> str:
        """Adds new text; returns what no stop string can reach any more."""
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
                break
            text, self._strip = text[1:], self._strip - 1
        if not self._stops:
            return text
        before = len(self._held)
        self._held += text
        for i, char in enumerate(text, before + 1):
            complete = None
            for k, (stop, borders) in enumerate(self._stops):
                n = self._matched[k]
                while n and stop[n] != char:
                    n = borders[n - 1]
                n += stop[n] == char
                if n == len(stop):
                    counts = self._num_tokens > self._min_tokens and len(stop) > len(complete or "")
                    complete = stop if counts else complete
                    n = borders[-1]
                self._matched[k] = n
            if complete is not None:
                self.hit = StopHit(complete, self._num_tokens)
                shown = self._held[: i if self._include_stop else i - len(complete)]
                self._held = ""
                return shown
        keep = max(self._matched)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown


def _borders(pattern: str) -> list[int]:
    """For each prefix of a pattern, the length of its longest proper suffix that is a prefix too (Knuth, Morris and Pratt 1977)."""
    borders = [0] * len(pattern)
    n = 0
    for i in range(1, len(pattern)):
        while n and pattern[n] != pattern[i]:
            n = borders[n - 1]
        n += pattern[n] == pattern[i]
        borders[i] = n
    return borders
