"""What happens to requests, told to whoever observes a Frontend: metrics, logs, traces."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pagedjax.host.request import FinishReason, Request, Usage
from serving.auth import Caller
from serving.call import Call
from serving.errors import Refusal


@dataclass(frozen=True)
class Refused:
    """A request did not reach the engine."""

    caller: Caller
    refusal: Refusal
    ids: Mapping[str, str]  # as in Call
    call: Call | None = None  # None: what came could not even be read
    seconds: float = 0.0  # since it came


@dataclass(frozen=True)
class Accepted:
    """A request was taken into the engine's queue."""

    caller: Caller
    request: Request


@dataclass(frozen=True)
class Advanced:
    """A step gave a request tokens, of all its sequences together."""

    request: Request
    tokens: int
    seconds: float  # since the tokens before these; of the first ones: since the request was handed to the engine
    first: bool


@dataclass(frozen=True)
class Ended:
    """A request is over. `finishes` and `usages` are of the sequences that came to an end, of which a request that was left early,
    or whose reader was too slow, may have none."""

    call: Call
    request: Request
    finishes: tuple[FinishReason, ...]
    usages: tuple[Usage, ...]
    tokens: int  # of all sequences, those that did not come to an end, too
    prepared: float  # seconds from when it came until it was handed to the engine
    seconds: float  # since then
    first_token: float | None  # seconds from then until the first token
    refusal: Refusal | None = None  # why it did not come to its end


Event = Refused | Accepted | Advanced | Ended
Observer = Callable[[Event], None]  # called on the event loop; must be quick, and must not raise
