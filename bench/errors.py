"""Errors as a client sees them, held against the table of docs/serving.md: what both bench.faults and bench.fuzz judge by."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from serving.errors import ANSWERS
from serving.http.failures import CODES
from serving.rpc.status import DOMAIN

OWN_CODES: dict[Any, Any] = {code: code for code in ANSWERS} | {
    told: code for code, told in CODES.items()
}  # by what HTTP calls them
OURS = ("internal", "engine_failed", "engine_down")  # codes that say that the server is to blame
BODY = {"message", "type", "param", "code"}
DETAILS = "grpc-status-details-bin"


@dataclass(frozen=True)
class Told:
    """An error. `code`: of the table; "" where a library says it before our code is asked, or the client itself."""

    code: str
    status: str  # the name of a gRPC status, or an HTTP status
    message: str
    retry: bool = False  # it says when to come back
    quota: bool = False  # it says what is full
    wrong: str = ""  # in what it differs from what is documented

    @property
    def label(self) -> str:
        return f"{self.status} {self.code}".strip()


def of_grpc(code: grpc.StatusCode, message: str | None, trailers: Iterable[tuple[str, Any]] | None) -> Told:
    """Of a call that ended with something else than OK."""
    found = dict(trailers or ())
    packed = found.get(DETAILS)
    if packed is None:
        return Told("", code.name, message or "")
    status = status_pb2.Status.FromString(packed)
    details = {detail.TypeName().rpartition(".")[2]: detail for detail in status.details}
    info = error_details_pb2.ErrorInfo()
    if "ErrorInfo" in details:
        details["ErrorInfo"].Unpack(info)
    name = info.reason.lower()
    retry, quota = "RetryInfo" in details, "QuotaFailure" in details
    wrong = _wrong_grpc(name, code, info, retry=retry and "grpc-retry-pushback-ms" in found, quota=quota)
    return Told(name, code.name, message or "", retry, quota, wrong)


def _wrong_grpc(name: str, code: grpc.StatusCode, info: Any, *, retry: bool, quota: bool) -> str:
    answer = ANSWERS.get(name)  # pyright: ignore[reportArgumentType]
    if answer is None or info.domain != DOMAIN:
        return f"reason {info.reason!r} of domain {info.domain!r} is in no table"
    if answer.grpc != code.name:
        return f"{name} must be {answer.grpc}; got {code.name}"
    if answer.retry is not None and not retry:
        return f"{name} must say when to come back (RetryInfo and grpc-retry-pushback-ms); got nothing"
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not quota:
        return f"{name} must say what is full (QuotaFailure); got nothing"
    return ""


def of_http(status: int, headers: Mapping[str, str], body: bytes) -> Told:
    """Of an answer that is no 200."""
    if not headers.get("content-type", "").startswith("application/json"):
        return Told("", str(status), body[:200].decode("utf-8", "replace"), wrong=f"a {status} must be JSON; got {body[:80]!r}")
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return Told("", str(status), "", wrong=f"a {status} must hold an error; got {body[:80]!r}")
    return of_body(error, status, headers)


def of_body(error: Any, status: int | None, headers: Mapping[str, str]) -> Told:
    """Of the object that describes an error. `status`: None where it came in a stream that had begun."""
    if not isinstance(error, dict) or set(error) != BODY or not (isinstance(error["message"], str) and error["message"]):
        return Told("", str(status or 200), "", wrong=f"an error must hold {', '.join(sorted(BODY))}; got {error!r:.80}")
    code = OWN_CODES.get(error["code"], "")
    retry, wrong = headers.get("retry-after", "").isdigit(), ""
    if code == "":
        known = error["code"] is None and status in (404, 405)  # there is no such path, or method
        wrong = "" if known else f"code {error['code']!r} with status {status} is in no table"
    elif status is not None and ANSWERS[code].http != status:
        wrong = f"{code} must be {ANSWERS[code].http}; got {status}"
    elif status is not None and ANSWERS[code].retry is not None and not retry:
        wrong = f"{code} must say when to come back (retry-after); got nothing"
    return Told(code, str(status or 200), error["message"], retry, status == 429, wrong)
