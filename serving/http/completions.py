"""/v1/completions: prompts as texts or token ids, one or many."""

import time
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from pagedjax.errors import check
from serving.errors import Refusal
from serving.frontend import need_tokenizer
from serving.http.forms import form_field
from serving.http.generate import Job, respond
from serving.http.requests import CompletionRequest, as_prompts
from serving.http.sampling import call_options, check_stream_options, sampling_params
from serving.http.shapes import Bodies
from serving.http.site import Asked, FromClient
from serving.limits import check_batch

router = APIRouter()


async def completion_job(body: CompletionRequest, asked: Asked) -> Job:
    """UserError or Refusal for what cannot be honoured."""
    asked.check_model(body.model)
    if body.suffix:
        raise Refusal("unsupported", "suffix must be absent: the model writes at the end of a text only", param="suffix")
    options, params = check_stream_options(body.stream, body.stream_options), sampling_params(body, asked.defaults)
    prompts = as_prompts(body.prompt)
    check_batch(asked.frontend.config.limits, len(prompts))
    answer_id = f"cmpl-{uuid.uuid4().hex}"
    ids = [answer_id] if len(prompts) == 1 else [f"{answer_id}-{i}" for i in range(len(prompts))]
    more: dict[str, Any] = {**call_options(body), "add_special": body.add_special_tokens is not False}
    model, usage = asked.frontend.model_name, bool(options.include_usage or options.continuous_usage_stats)
    return Job(
        bodies=Bodies("text_completion", answer_id, model, int(time.time()), usage=usage),
        calls=[asked.call(prompt, params, each, **more) for prompt, each in zip(prompts, ids, strict=True)],
        tokenizer=need_tokenizer(asked.frontend.llm),
        options=options,
        is_chat=False,
        echoes=[await _text(asked, prompt, params.skip_special_tokens) for prompt in prompts] if body.echo else None,
        only_echo=bool(body.echo) and body.max_tokens == 0,
        token_ids=bool(body.return_token_ids),
        form_field=form_field(body),
    )


async def _text(asked: Asked, prompt: str | tuple[int, ...], skip_special: bool) -> str:
    """Of a prompt, as it is echoed: a text is repeated as it was given."""
    return prompt if isinstance(prompt, str) else await asked.frontend.detokenize(prompt, skip_special=skip_special)


@router.post("/v1/completions", response_class=JSONResponse)
async def completions(body: CompletionRequest, asked: FromClient) -> Response:
    """Continues one prompt or several; with stream=true as server-sent events."""
    check(body.prompt is not None, "prompt must be given; got null")
    return respond(asked, lambda: completion_job(body, asked), stream=bool(body.stream))
