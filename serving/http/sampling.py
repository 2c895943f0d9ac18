"""From a request of chat or completions to SamplingParams: every field is honoured here or refused here."""

import re
from collections.abc import Mapping
from typing import Any

from pagedjax.errors import check
from pagedjax.host.request import SamplingParams
from serving.http.forms import asked_form
from serving.http.requests import ChatRequest, CompletionRequest, StreamOptions

SAME_NAME = (
    *("n", "min_tokens", "temperature", "top_k", "top_p", "min_p", "typical_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "seed", "allowed_token_ids", "bad_words", "stop", "stop_token_ids"),
    *("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "best_of", "length_penalty", "early_stopping"),
)


def sampling_params(body: ChatRequest | CompletionRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """`defaults`: what the model's makers recommend, by the names of SamplingParams. UserError for what cannot be honoured."""
    form = asked_form(body)
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = {_token(key): value for key, value in body.logit_bias.items()}
    beams = _beams(body)
    if form is not None:
        given |= {"structured_outputs": form.params}
    if beams:  # by the model's own distribution: what its makers recommend for sampling has no place there
        given |= {"beam_width": beams}
        defaults = {name: value for name, value in defaults.items() if name == "max_tokens"}
    wanted = {"max_tokens": None} if isinstance(body, ChatRequest) else {}
    params = SamplingParams(**{**wanted, **defaults, **given, **_lengths(body), **_logprobs(body)})
    check(
        not body.stream or params.best_of in (None, params.n),
        f"best_of must be n, which is {params.n}, in a stream: the best are known at the end; got {params.best_of}",
    )
    return params


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> StreamOptions:
    """What a stream brings beside the text; UserError for options without a stream, and for padding."""
    check(options is None or bool(stream), f"stream_options must go with stream=true; got stream={stream}")
    options = options or StreamOptions()
    check(not options.include_obfuscation, "stream_options.include_obfuscation must be false; got True")
    return options


def call_options(body: ChatRequest | CompletionRequest) -> dict[str, Any]:
    """Fields of a Call that say how the request is served, and what it is."""
    return {
        "pool": "batch" if body.service_tier == "flex" else "interactive",
        "cache_salt": body.cache_salt or "",
        "operation": "chat" if isinstance(body, ChatRequest) else "text_completion",
        "streams": bool(body.stream),
    }


def _token(key: str) -> int:
    check(re.fullmatch("-?[0-9]{1,18}", key) is not None, f"each token of logit_bias must be an integer; got {key!r:.80}")
    return int(key)


def _beams(body: ChatRequest | CompletionRequest) -> int:
    if body.beam_width is not None:
        check(body.use_beam_search is not False, f"beam_width must go with use_beam_search; got {body.beam_width}")
        return body.beam_width
    return (body.n or 1) if body.use_beam_search else 0


def _lengths(body: ChatRequest | CompletionRequest) -> dict[str, Any]:
    wanted = body.max_tokens
    if isinstance(body, ChatRequest) and body.max_completion_tokens is not None:
        check(
            wanted in (None, body.max_completion_tokens),
            f"max_tokens and max_completion_tokens are the same thing; got {wanted} and {body.max_completion_tokens}",
        )
        wanted = body.max_completion_tokens
    if wanted == 0 and isinstance(body, CompletionRequest) and body.echo:
        wanted = 1  # its token is not shown
    return {} if wanted is None else {"max_tokens": wanted}


def _logprobs(body: ChatRequest | CompletionRequest) -> dict[str, Any]:
    if isinstance(body, CompletionRequest):
        scores = bool(body.echo) and body.logprobs is not None
        check(not (scores and _beams(body)), f"logprobs must not go with echo in a beam search; got {body.logprobs}")
        return {"logprobs": body.logprobs, "prompt_logprobs": body.logprobs if body.echo else None}
    check(
        body.top_logprobs is None or bool(body.logprobs),
        f"top_logprobs must go with logprobs=true; got {body.top_logprobs} and logprobs={body.logprobs}",
    )
    return {"logprobs": (body.top_logprobs or 0) if body.logprobs else None}
