"""What goes wrong, as clients see it: one table for gRPC and HTTP."""

from dataclasses import dataclass
from typing import Literal

from pagedjax.errors import EngineStopped, QueueFull, UserError

Code = Literal[
    "invalid_argument",
    "unsupported",
    "prompt_too_long",
    "output_too_long",
    "too_many_samples",
    "too_many_logprobs",
    "too_many_stops",
    "form_too_large",
    "form_too_deep",
    "form_failed",
    "batch_too_large",
    "message_too_large",
    "unauthenticated",
    "permission_denied",
    "model_not_found",
    "request_not_found",
    "duplicate_request",
    "queue_full",
    "too_many_streams",
    "slow_reader",
    "not_ready",
    "draining",
    "engine_down",
    "engine_failed",
    "deadline_exceeded",
    "cancelled",
    "unimplemented",
    "internal",
]


@dataclass(frozen=True)
class Answer:
    """How a kind of error is told: the name of a grpc.StatusCode, an HTTP status, and after how many seconds to try again where
    trying again makes sense (None: it does not) and the error itself knows nothing better."""

    grpc: str
    http: int
    retry: float | None = None


ANSWERS: dict[Code, Answer] = {
    "invalid_argument": Answer("INVALID_ARGUMENT", 400),
    "unsupported": Answer("INVALID_ARGUMENT", 400),  # a field that is known and cannot be honoured
    "prompt_too_long": Answer("INVALID_ARGUMENT", 400),
    "output_too_long": Answer("INVALID_ARGUMENT", 400),
    "too_many_samples": Answer("INVALID_ARGUMENT", 400),
    "too_many_logprobs": Answer("INVALID_ARGUMENT", 400),
    "too_many_stops": Answer("INVALID_ARGUMENT", 400),
    "form_too_large": Answer("INVALID_ARGUMENT", 400),  # a schema or grammar that the output must follow
    "form_too_deep": Answer("INVALID_ARGUMENT", 400),
    "form_failed": Answer("FAILED_PRECONDITION", 422),  # the output cannot go on in it
    "batch_too_large": Answer("INVALID_ARGUMENT", 400),
    "message_too_large": Answer("RESOURCE_EXHAUSTED", 413),
    "unauthenticated": Answer("UNAUTHENTICATED", 401),
    "permission_denied": Answer("PERMISSION_DENIED", 403),
    "model_not_found": Answer("NOT_FOUND", 404),
    "request_not_found": Answer("NOT_FOUND", 404),
    "duplicate_request": Answer("ALREADY_EXISTS", 409),
    "queue_full": Answer("RESOURCE_EXHAUSTED", 429, 1.0),
    "too_many_streams": Answer("RESOURCE_EXHAUSTED", 429, 1.0),
    "slow_reader": Answer("RESOURCE_EXHAUSTED", 429),
    "not_ready": Answer("UNAVAILABLE", 503, 1.0),
    "draining": Answer("UNAVAILABLE", 503, 1.0),
    "engine_down": Answer("UNAVAILABLE", 503, 5.0),  # it failed before the request came
    "engine_failed": Answer("INTERNAL", 500),  # under the request
    "deadline_exceeded": Answer("DEADLINE_EXCEEDED", 504),
    "cancelled": Answer("CANCELLED", 499),
    "unimplemented": Answer("UNIMPLEMENTED", 501),
    "internal": Answer("INTERNAL", 500),
}


class Refusal(Exception):
    """A request that is not served, or not to its end. `code`: a key of ANSWERS; `param`: the field that is to blame."""

    def __init__(self, code: Code, message: str, *, param: str | None = None, retry_after: float | None = None):
        super().__init__(message)
        self.code: Code = code
        self.message, self.param = message, param
        answer = ANSWERS[code]
        self.grpc, self.http = answer.grpc, answer.http
        self.retry_after = answer.retry if retry_after is None else retry_after  # seconds; None: no use


def refusal(error: BaseException) -> Refusal:
    """Any error as clients are told of it. What is ours and not theirs keeps its words to itself."""
    match error:
        case Refusal():
            return error
        case QueueFull():
            return Refusal("queue_full", str(error), retry_after=error.retry_after)
        case UserError():
            return Refusal("invalid_argument", str(error))
        case EngineStopped():
            return Refusal("engine_failed", "the engine stopped after an error; the request may be sent to another one")
    return Refusal("internal", f"an error of the server's own ({type(error).__name__}); its log has more")


def form_failed() -> Refusal:
    """Of output whose form has come to a point from which it cannot go on."""
    rule = "an output must be able to go on in its form"
    return Refusal(
        "form_failed",
        f"{rule}; got to a point where the other limits of the request allow no token of it",
        param="structured_outputs",
    )


def check_limit(ok: bool, code: Code, message: str, param: str | None = None) -> None:
    """Raises Refusal(code) unless ok."""
    if not ok:
        raise Refusal(code, message, param=param)
