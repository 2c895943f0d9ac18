"""/v1/chat/completions, and what turns a conversation into what a chat template takes."""

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from pagedjax.errors import UserError, check
from serving.frontend import need_tokenizer
from serving.http.forms import form_field
from serving.http.generate import Job, respond
from serving.http.requests import ChatRequest, Conversation, Message, Tool
from serving.http.sampling import call_options, check_stream_options, sampling_params
from serving.http.shapes import Bodies
from serving.http.site import Asked, FromClient
from serving.http.tools import tool_use
from serving.limits import check_chars

router = APIRouter()


def template_options(body: Conversation | ChatRequest) -> dict[str, Any]:
    """The arguments of Frontend.chat_ids beside the messages."""
    unwanted = isinstance(body, ChatRequest) and body.tool_choice == "none"  # then the model is not told of any tools
    return {
        "tools": None if unwanted else template_tools(body.tools),
        "add_generation_prompt": body.add_generation_prompt is not False,
        "chat_template_kwargs": body.chat_template_kwargs,
    }


def template_tools(tools: Sequence[Tool] | None) -> list[dict[str, Any]] | None:
    """As they were given: what is absent stays absent."""
    return None if tools is None else [tool.model_dump(exclude_unset=True) for tool in tools]


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As templates know them: a developer is a system, null fields are absent, and arguments of calls are objects."""
    return [_template_message(i, message.model_dump(exclude_none=True)) for i, message in enumerate(messages)]


def _template_message(i: int, message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "developer":
        message["role"] = "system"
    calls = message.get("tool_calls")
    if calls is not None:
        check(isinstance(calls, list), f"messages[{i}].tool_calls must be a list; got {calls!r:.80}")
        message["tool_calls"] = [_template_call(f"messages[{i}].tool_calls[{k}]", call) for k, call in enumerate(calls)]
    return message


def _template_call(where: str, call: Any) -> dict[str, Any]:
    """OpenAI writes arguments as a string of JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    check(isinstance(function, Mapping), f"{where} must be an object with a function; got {call!r:.80}")
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where}.function.arguments must be JSON; got {error}") from None
    return {**call, "function": {**(function or {}), "arguments": arguments}}


def text_length(value: Any) -> int:
    """Characters of all texts in it."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_length, value.values()))
    return sum(map(text_length, value)) if isinstance(value, list) else 0


async def chat_job(body: ChatRequest, asked: Asked) -> Job:
    """Tokenizes the conversation; UserError or Refusal for what cannot be honoured."""
    asked.check_model(body.model)
    options, params = check_stream_options(body.stream, body.stream_options), sampling_params(body, asked.defaults)
    tokenizer = need_tokenizer(asked.frontend.llm)
    tools, field = tool_use(body, tokenizer, asked.frontend.config.tool_parser), form_field(body)
    if tools is not None and tools.form is not None:
        check(
            params.structured_outputs is None, f"{field} must not go with calls that are forced; got tool_choice={body.tool_choice}"
        )
        params, field = replace(params, structured_outputs=tools.form), "tools"
    messages = template_messages(body.messages)
    check_chars(asked.frontend.config.limits, text_length(messages))
    ids = await asked.frontend.chat_ids(messages, **template_options(body))
    answer_id = f"chatcmpl-{uuid.uuid4().hex}"
    model, usage = asked.frontend.model_name, bool(options.include_usage or options.continuous_usage_stats)
    return Job(
        bodies=Bodies("chat.completion", answer_id, model, int(time.time()), usage=usage),
        calls=[asked.call(ids, params, answer_id, **call_options(body), shown=() if tools is None else tools.shown)],
        tokenizer=tokenizer,
        options=options,
        token_ids=bool(body.return_token_ids),
        tools=tools,
        form_field=field,
    )


@router.post("/v1/chat/completions", response_class=JSONResponse)
async def chat_completions(body: ChatRequest, asked: FromClient) -> Response:
    """Answers a conversation; with stream=true as server-sent events."""
    return respond(asked, lambda: chat_job(body, asked), stream=bool(body.stream))
