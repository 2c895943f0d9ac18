"""/tokenize, /detokenize and /tokenizer_info, as vLLM has them and lm-eval asks for them."""

from typing import Any

from fastapi import APIRouter
from starlette.responses import JSONResponse, Response

from pagedjax.errors import check
from pagedjax.text import Tokenizer
from serving.frontend import need_tokenizer
from serving.http.answer import Answer
from serving.http.chat import template_messages, template_tools, text_length
from serving.http.logprobs import label
from serving.http.requests import DetokenizeRequest, TokenizeRequest
from serving.http.site import Asked, FromClient
from serving.limits import check_chars

router = APIRouter()


@router.post("/tokenize", response_class=JSONResponse)
async def tokenize(body: TokenizeRequest, asked: FromClient) -> Response:
    """Token ids of a text, or of a conversation in the model's template."""
    return Answer(lambda: _tokenize(body, asked), asked.headers)


async def _tokenize(body: TokenizeRequest, asked: Asked) -> dict[str, Any]:
    asked.check_model(body.model)
    check((body.prompt is None) != (body.messages is None), "prompt or messages must be given, one of the two")
    if body.prompt is not None:
        of_chat = {"tools": body.tools, "add_generation_prompt": body.add_generation_prompt}
        wrong = [
            name for name, value in {**of_chat, "chat_template_kwargs": body.chat_template_kwargs}.items() if value is not None
        ]
        check(not wrong, f"{', '.join(wrong)} must go with messages; got a prompt")
        ids = await asked.frontend.tokenize(body.prompt, add_special=body.add_special_tokens is not False)
    else:
        check(body.add_special_tokens is None, f"add_special_tokens must go with a prompt; got {body.add_special_tokens}")
        messages = template_messages(body.messages or [])
        check_chars(asked.frontend.config.limits, text_length(messages))
        ids = await asked.frontend.chat_ids(
            messages,
            tools=template_tools(body.tools),
            add_generation_prompt=body.add_generation_prompt is not False,
            chat_template_kwargs=body.chat_template_kwargs,
        )
    llm = asked.frontend.llm
    strings = [label(need_tokenizer(llm), token) for token in ids] if body.return_token_strs else None
    length = llm.engine.config.schedule.max_model_len
    return {"count": len(ids), "max_model_len": length, "tokens": list(ids), "token_strs": strings}


@router.post("/detokenize", response_class=JSONResponse)
async def detokenize(body: DetokenizeRequest, asked: FromClient) -> Response:
    """The text of token ids, special ones included."""

    async def work() -> dict[str, Any]:
        asked.check_model(body.model)
        wrong = next((token for token in body.tokens if not 0 <= token < 2**32), None)
        check(wrong is None, f"each of tokens must be a token id; got {wrong}")
        return {"prompt": await asked.frontend.detokenize(body.tokens)}

    return Answer(work, asked.headers)


@router.get("/tokenizer_info", response_class=JSONResponse)
async def tokenizer_info(asked: FromClient) -> Response:
    """What a client needs to know to count tokens, and to render chats of its own."""

    async def work() -> dict[str, Any]:
        tokenizer: Tokenizer = need_tokenizer(asked.frontend.llm)
        return {
            **{name: tokenizer.special_tokens.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")},
            **tokenizer.special_tokens,
            "chat_template": tokenizer.chat_template,
            "add_bos_token": tokenizer.bos_id is not None and tokenizer.bos_id in tokenizer.prefix,
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": asked.frontend.llm.engine.config.schedule.max_model_len,
        }

    return Answer(work, asked.headers)
