"""A Refusal as a gRPC status with google.rpc details, which clients in every language can read."""

import math

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from serving.errors import Refusal

DOMAIN = "pagedjax"
LONGEST = 1000  # bytes of a message: it travels in headers, up to three times, and there each byte may take three


def details(refusal: Refusal) -> list[Message]:
    """ErrorInfo always (its reason is the code of serving/errors.py); what is full, when to come back, and which field is wrong,
    where there is something to say."""
    found: list[Message] = [error_details_pb2.ErrorInfo(reason=refusal.code.upper(), domain=DOMAIN)]
    if refusal.retry_after is not None:
        whole = math.floor(refusal.retry_after)
        delay = duration_pb2.Duration(seconds=whole, nanos=int((refusal.retry_after - whole) * 1e9))
        found.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if refusal.grpc == "RESOURCE_EXHAUSTED":
        violation = error_details_pb2.QuotaFailure.Violation(subject=refusal.code, description=_short(refusal.message))
        found.append(error_details_pb2.QuotaFailure(violations=[violation]))
    if refusal.param is not None:
        wrong = error_details_pb2.BadRequest.FieldViolation(field=refusal.param, description=_short(refusal.message))
        found.append(error_details_pb2.BadRequest(field_violations=[wrong]))
    return found


def _short(message: str) -> str:
    return message.encode("utf-8", "replace")[:LONGEST].decode("utf-8", "ignore")


async def abort(context: grpc.aio.ServicerContext, refusal: Refusal) -> None:
    """Ends the call; always raises. A client that retries by itself is told how long to wait (grpc-retry-pushback-ms)."""
    status = status_pb2.Status(code=code_pb2.Code.Value(refusal.grpc), message=_short(refusal.message))
    for detail in details(refusal):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    whole = rpc_status.to_status(status)
    trailers = list(whole.trailing_metadata)
    if refusal.retry_after is not None:
        trailers.append(("grpc-retry-pushback-ms", str(math.ceil(refusal.retry_after * 1000))))
    if refusal.code == "form_failed":
        trailers.append(("smg-constraint-failed", "engine"))  # smg answers 422 then
    await context.abort(whole.code, whole.details, tuple(trailers))
