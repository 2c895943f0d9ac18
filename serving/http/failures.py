"""Errors in OpenAI's shape."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from serving.errors import refusal
from serving.http.requests import ChatRequest, CompletionRequest, DetokenizeRequest, ResponsesRequest, TokenizeRequest
from serving.log import FIELDS, LOG

# Codes that clients know under another name.
CODES = {"prompt_too_long": "context_length_exceeded", "unauthenticated": "invalid_api_key"}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
MODELS = (ChatRequest, CompletionRequest, ResponsesRequest, TokenizeRequest, DetokenizeRequest)
KNOWN = {name for model in MODELS for name in model.model_fields}
BLAMED = re.compile(r"(?:request \S+: )?(?:the |each of |each token of )?([a-z_]+)")


@dataclass(frozen=True)
class Failure:
    """An error as it is answered."""

    status: int
    body: dict[str, Any]
    headers: Mapping[str, str]


def failure(error: Exception, ids: Mapping[str, str] | None = None) -> Failure:
    """Any error. What is ours is logged, with the request's ids, and keeps its words to itself."""
    if isinstance(error, RequestValidationError):
        return _failure(400, *_validation(error), code="invalid_argument")
    if isinstance(error, HTTPException) and error.status_code == 400:  # no UTF-8, too deep, or a number with too many digits
        return _failure(400, f"the body must be JSON that can be read; {error.detail}", None, code="invalid_argument")
    if isinstance(error, HTTPException):
        return _failure(error.status_code, str(error.detail), None, code=None, headers=error.headers)
    told = refusal(error)
    if told.code == "internal":
        LOG.error("an answer failed", exc_info=error, extra={FIELDS: ids or {}})
    headers = {} if told.retry_after is None else {"retry-after": str(max(1, math.ceil(told.retry_after)))}
    param = told.param or _blamed(told.message) if told.http == 400 else told.param
    return _failure(told.http, told.message, param, code=CODES.get(told.code, told.code), headers=headers)


def _failure(
    status: int, message: str, param: str | None, *, code: str | None, headers: Mapping[str, str] | None = None
) -> Failure:
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return Failure(status, {"error": {"message": message, "type": kind, "param": param, "code": code}}, headers or {})


def _validation(error: RequestValidationError) -> tuple[str, str | None]:
    """The first thing that is wrong with a body: one sentence, and the field."""
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"][1:]) or None
    given = repr(first.get("input"))
    given = given if len(given) <= 80 else given[:77] + "..."
    if isinstance(first.get("input"), bytes):
        return "the body must be JSON, with content-type: application/json", None
    match first["type"]:
        case "extra_forbidden":
            return f"{path} is not a field that is known here; docs/serving-http.md lists those that are", path
        case "missing":
            return f"{path or 'the body'} must be given", path
        case "json_invalid":
            return f"the body must be JSON; {first.get('ctx', {}).get('error', first['msg'])}", None
    rule = re.sub("^(Input|Value) should ", "must ", str(first["msg"]))
    rule = rule if rule.startswith("must ") else f"must be right ({rule})"
    return f"{path or 'the body'} {rule}; got {given}", path


def _blamed(message: str) -> str | None:
    """The field that an error of ours is about: its sentence begins with it."""
    found = BLAMED.match(message)
    return found[1] if found and found[1] in KNOWN else None
