"""The log: one line for each thing that happens, as text or as JSON, with the id of the request that it is about."""

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from serving.auth import Caller
from serving.events import Ended, Event, Observer, Refused

LOG = logging.getLogger("pagedjax.serving")
LONGEST = 1000  # characters of a sentence, which may repeat what a client sent
RESET = "ExecuteBatchError raised in core by servicer method"
GRPC = logging.getLogger("grpc._cython.cygrpc")
FIELDS = "fields"  # attribute of a record: what a program would look for, by name


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, FIELDS, {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        named = " ".join(
            f"{name}={value!r}" if isinstance(value, str) else f"{name}={value}"
            for name, value in getattr(record, FIELDS, {}).items()
        )
        return f"{super().format(record)} {named}".rstrip()


def setup(kind: Literal["text", "json"]) -> None:
    """To stderr, in one form: the server's own messages, and what libraries have to warn of."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines("%(asctime)s %(levelname)s %(message)s"))
    logging.getLogger().handlers[:] = [handler]
    logging.captureWarnings(True)
    LOG.setLevel(logging.INFO)
    GRPC.addFilter(client_went_away)


def client_went_away(record: logging.LogRecord) -> bool:
    """gRPC calls it an error, with a traceback, where a client resets its stream while the answer is being sent, unless it has
    heard of the reset before: nobody's fault, so one line of information."""
    said = record.getMessage()
    if said.startswith(RESET):
        record.levelno, record.levelname, record.exc_info = logging.INFO, "INFO", None
        record.msg, record.args = f"a client went away while it was answered by {said[len(RESET) :].strip()}", ()
    return True


def requests(*, prompts: bool) -> Observer:
    """One line for each request that ended or was refused. Token ids of prompts are written only where `prompts`."""

    def observe(event: Event) -> None:
        match event:
            case Ended(call=call, request=request):
                fields = _about(call.caller, call.ids) | {
                    "prompt_tokens": len(request.prompt),
                    "generated_tokens": event.tokens,
                    "finish": ",".join(event.finishes) if event.refusal is None else event.refusal.code,
                    "first_token": None if event.first_token is None else round(event.prepared + event.first_token, 4),
                    "seconds": round(event.prepared + event.seconds, 4),
                }
                if prompts:
                    fields["prompt"] = list(request.prompt)
                LOG.info("request", extra={FIELDS: fields})
            case Refused(caller=caller, refusal=refusal):
                fields = _about(caller, event.ids) | {"code": refusal.code, "why": refusal.message[:LONGEST]}
                LOG.info("refused", extra={FIELDS: fields})

    return observe


def _about(caller: Caller, ids: Mapping[str, str]) -> dict[str, Any]:
    return {**ids, "tenant": caller.tenant, "key": caller.name}
