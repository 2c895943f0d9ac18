"""/v1/responses in its basic form: a text or messages in, one message out. Nothing is kept, so none can be asked for again."""

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from pagedjax.errors import check
from serving.errors import check_limit
from serving.http.answer import Answer
from serving.http.chat import chat_job
from serving.http.failures import failure
from serving.http.generate import Job, pieces
from serving.http.requests import ChatRequest, JsonSchema, Message, ResponseFormat, ResponsesRequest, Text
from serving.http.sampling import check_stream_options
from serving.http.shapes import Choice, Count, joined_choice, named_event
from serving.http.site import Asked, FromClient

LOGPROBS = "message.output_text.logprobs"

router = APIRouter()


@router.post("/v1/responses", response_class=JSONResponse)
async def respond(body: ResponsesRequest, asked: FromClient) -> Response:
    """Answers; with stream=true as server-sent events."""
    return Answer(_events(body, asked) if body.stream else lambda: _whole(body, asked), asked.headers)


def as_chat(body: ResponsesRequest) -> ChatRequest:
    """The same request as chat has it. Refusal for what the basic form does not have."""
    unsupported = {
        "previous_response_id": body.previous_response_id is not None,
        "background": bool(body.background),
        "truncation": body.truncation == "auto",
        "tools": bool(body.tools),
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "include": not set(body.include or ()) <= {LOGPROBS},
    }
    for name, wrong in unsupported.items():
        check_limit(not wrong, "unsupported", f"{name} cannot be honoured here; got {getattr(body, name)!r:.80}", name)
    wants = LOGPROBS in (body.include or ())
    check(wants or body.top_logprobs is None, f"top_logprobs must go with include of {LOGPROBS}; got {body.top_logprobs}")
    system = [Message(role="system", content=body.instructions)] if body.instructions else []
    return ChatRequest(
        model=body.model,
        messages=[*system, *_messages(body.input)],
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        logprobs=wants or None,
        top_logprobs=body.top_logprobs,
        response_format=_response_format(body.text),
        chat_template_kwargs=body.chat_template_kwargs,
        service_tier=body.service_tier,
        stream=body.stream,
    )


def _response_format(text: Text | None) -> ResponseFormat | None:
    """As chat has it, with a level more."""
    form = None if text is None else text.format
    if form is None:
        return None
    said = form.model_dump(exclude={"type"}, exclude_none=True, by_alias=True)
    check(form.type == "json_schema" or not said, f"text.format of type {form.type} must have nothing else; got {', '.join(said)}")
    if form.type != "json_schema":
        return ResponseFormat(type=form.type)
    check("name" in said and "schema" in said, f"text.format must have a name and a schema; got {', '.join(said) or 'neither'}")
    return ResponseFormat(type=form.type, json_schema=JsonSchema(**said))


def _messages(given: str | list[dict[str, Any]]) -> list[Message]:
    if isinstance(given, str):
        return [Message(role="user", content=given)]
    check(len(given) > 0, "input must hold at least one message; got none")
    messages = []
    for i, item in enumerate(given):
        check(
            item.get("type", "message") == "message" and isinstance(item.get("role"), str),
            f"input[{i}] must be a message with a role; got {item!r:.80}",
        )
        content = item.get("content")
        if isinstance(content, list):
            for part in content:
                right = isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text", "text")
                check(right and isinstance(part.get("text"), str), f"input[{i}].content parts must be texts; got {part!r:.80}")
            content = "\n".join(part["text"] for part in content)
        check(isinstance(content, str), f"input[{i}].content must be a text; got {content!r:.80}")
        messages.append(Message(role=str(item["role"]), content=content))
    return messages


async def _job(body: ResponsesRequest, asked: Asked) -> tuple[Job, dict[str, Any]]:
    """What to do, and the response without its end."""
    options = check_stream_options(body.stream, body.stream_options)
    check(
        not options.include_usage and not options.continuous_usage_stats,
        "stream_options of a response may have include_obfuscation; its usage is in its last event",
    )
    with asked.reading():
        job = await chat_job(as_chat(body), asked)
    params, form = job.calls[0].params, body.text and body.text.format
    job = replace(job, form_field="text" if job.form_field == "response_format" else job.form_field)
    return job, {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "model": asked.frontend.model_name,
        "output": [],
        "parallel_tool_calls": False,
        "previous_response_id": None,
        "store": False,
        "temperature": params.temperature,
        "text": {"format": {"type": "text"} if form is None else form.model_dump(exclude_none=True, by_alias=True)},
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": [],
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _message(item_id: str, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _content(text: str, logprobs: list[Any] | None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs or []}


def _entries(choice: Choice) -> list[Any]:
    return (choice.logprobs or {}).get("content", [])


def _status(choice: Choice) -> str:
    return "completed" if choice.finish == "stop" else "incomplete"


def _ended(response: dict[str, Any], choice: Choice, usage: Count, item: dict[str, Any]) -> dict[str, Any]:
    status = _status(choice)
    return {
        **response,
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if choice.finish == "length" else None,
        "output": [item],
        "usage": {
            "input_tokens": usage.prompt,
            "input_tokens_details": {"cached_tokens": usage.cached or 0},
            "output_tokens": usage.generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage.prompt + usage.generated,
        },
    }


async def _whole(body: ResponsesRequest, asked: Asked) -> dict[str, Any]:
    job, response = await _job(body, asked)
    parts, usage = [], Count()
    async with contextlib.aclosing(pieces(asked.frontend, job)) as each:
        async for piece, so_far in each:
            parts.append(piece)
            usage = so_far
    choice = joined_choice(parts, logprobs=None)
    item = _message(f"msg_{uuid.uuid4().hex}", _status(choice), [_content(choice.text, _entries(choice))])
    return _ended(response, choice, usage, item)


async def _events(body: ResponsesRequest, asked: Asked) -> AsyncGenerator[bytes]:
    """In the order that OpenAI has; each with its number. What fails once it has begun is said by response.failed."""
    job, response = await _job(body, asked)
    numbers = iter(range(1 << 62))
    at: dict[str, Any] = {"output_index": 0, "item_id": f"msg_{uuid.uuid4().hex}", "content_index": 0}
    item_at = {"output_index": 0}

    def event(name: str, **fields: Any) -> bytes:
        return named_event(f"response.{name}", {"type": f"response.{name}", "sequence_number": next(numbers), **fields})

    parts, usage, begun = [], Count(), False
    try:
        async with contextlib.aclosing(pieces(asked.frontend, job)) as each:
            async for piece, so_far in each:
                usage = so_far
                if not begun:
                    begun = True
                    yield event("created", response=response)
                    yield event("in_progress", response=response)
                    yield event("output_item.added", **item_at, item=_message(at["item_id"], "in_progress", []))
                    yield event("content_part.added", **at, part=_content("", None))
                parts.append(piece)
                if piece.text or piece.logprobs:
                    yield event("output_text.delta", **at, delta=piece.text, logprobs=_entries(piece))
    except Exception as error:
        if not begun:
            raise
        failed = failure(error, {"header_id": asked.header_id}).body["error"]
        yield event(
            "failed", response={**response, "status": "failed", "error": {"code": "server_error", "message": failed["message"]}}
        )
        return
    choice = joined_choice(parts, logprobs=None)
    content, status = _content(choice.text, _entries(choice)), _status(choice)
    item = _message(at["item_id"], status, [content])
    yield event("output_text.done", **at, text=choice.text, logprobs=_entries(choice))
    yield event("content_part.done", **at, part=content)
    yield event("output_item.done", **item_at, item=item)
    yield event(status, response=_ended(response, choice, usage, item))
