"""What happens to requests, told to whoever observes a Frontend: metrics, logs, traces."""

from collections.abc import Callable
from dataclasses import dataclass

from pagedjax.host.request import FinishReason, Request, Usage
from serving.auth import Caller
from serving.errors import Refusal


@dataclass(frozen=True)
class Refused:
    """A request did not reach the engine."""

    caller: Caller
    refusal: Refusal


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

    caller: Caller
    request: Request
    finishes: tuple[FinishReason, ...]
    usages: tuple[Usage, ...]
    seconds: float  # since it was handed to the engine
    first_token: float | None  # seconds until the first token
    refusal: Refusal | None = None  # why it did not come to its end
    trace_id: str = ""  # the client's


Event = Refused | Accepted | Advanced | Ended
Observer = Callable[[Event], None]  # called on the event loop; must be quick, and must not raise
