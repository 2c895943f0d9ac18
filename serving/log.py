"""The log: one line for each thing that happens, as text or as JSON, with the id of the request that it is about."""

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Literal

from serving.events import Ended, Event, Observer, Refused

LOG = logging.getLogger("pagedjax.serving")
TRACEPARENT = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f]{2}")
FIELDS = "fields"  # attribute of a record: what a program would look for, by name


def trace_id_of(traceparent: str) -> str:
    """The id in a W3C trace context (version-traceid-parentid-flags); "" where it is none."""
    found = TRACEPARENT.fullmatch(traceparent)
    return found[1] if found else ""


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
    """Of the server's own messages, to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if kind == "json" else TextLines("%(asctime)s %(levelname)s %(message)s"))
    LOG.handlers[:] = [handler]
    LOG.setLevel(logging.INFO)
    LOG.propagate = False


def requests(*, prompts: bool) -> Observer:
    """One line for each request that ended or was refused. Token ids of prompts are written only where `prompts`."""

    def observe(event: Event) -> None:
        match event:
            case Ended(caller=caller, request=request):
                fields = {
                    "request_id": request.id,
                    "tenant": caller.tenant,
                    "key": caller.name,
                    "prompt_tokens": len(request.prompt),
                    "generated_tokens": sum(usage.generated for usage in event.usages),
                    "finish": ",".join(event.finishes) if event.refusal is None else event.refusal.code,
                    "first_token": None if event.first_token is None else round(event.first_token, 4),
                    "seconds": round(event.seconds, 4),
                }
                if event.trace_id:
                    fields["trace_id"] = event.trace_id
                if prompts:
                    fields["prompt"] = list(request.prompt)
                LOG.info("request", extra={FIELDS: fields})
            case Refused(caller=caller, refusal=refusal):
                about = {"tenant": caller.tenant, "key": caller.name, "code": refusal.code, "why": refusal.message}
                LOG.info("refused", extra={FIELDS: about})

    return observe
