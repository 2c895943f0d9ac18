"""Sequences for tests of the waiting side, without a scheduler."""

from dataclasses import dataclass
from typing import Any

from pagedjax.host.request import Request, SamplingParams, Service


@dataclass(eq=False)
class Queued:
    request: Request
    order: int
    arrival: float
    max_len: int
    tokens: list[int]
    num_scheduled: int = 0
    index: int = 0

    @property
    def key(self) -> tuple[str, int]:
        return self.request.id, self.index

    @property
    def prompt_len(self) -> int:
        return len(self.request.prompt)


def queued(order: int, *, arrival: float | None = None, prompt: int = 8, max_tokens: int | None = 4, **service: Any) -> Queued:
    """A sequence that came `order`th, at that second unless `arrival` says otherwise."""
    request = Request(str(order), (1,) * prompt, SamplingParams(max_tokens=max_tokens), service=Service(**service))
    longest = prompt + (100 if max_tokens is None else max_tokens)
    return Queued(request, order, float(order) if arrival is None else arrival, longest, list(request.prompt))
