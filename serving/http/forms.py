"""The form that an answer must have, as a request of chat or completions asks for it."""

import re
from dataclasses import dataclass
from typing import Any

from pagedjax.errors import check
from pagedjax.host.constraint import StructuredOutputsParams
from serving.errors import Refusal
from serving.http.requests import ChatRequest, CompletionRequest, ResponseFormat

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
OWN_NAME = "structured_outputs"  # in the errors of the engine


@dataclass(frozen=True)
class Form:
    params: StructuredOutputsParams
    field: str  # of the request that asked for it


def asked_form(body: ChatRequest | CompletionRequest) -> Form | None:
    """None where an answer may have any form. UserError for two forms at once, and for one that says nothing."""
    asked: dict[str, dict[str, Any]] = {}
    if body.response_format is not None and (form := _of_format(body.response_format)):
        asked["response_format"] = form
    if body.structured_outputs is not None:
        asked[OWN_NAME] = body.structured_outputs.model_dump(by_alias=True, exclude_none=True)
    asked |= {name: {kind: getattr(body, name)} for name, kind in GUIDED.items() if getattr(body, name) is not None}
    check(len(asked) <= 1, f"{' and '.join(asked)} must not go together: an answer has one form")
    return next((Form(StructuredOutputsParams(**form), field) for field, form in asked.items()), None)


def form_field(body: ChatRequest | CompletionRequest) -> str:
    """The field of the request that asks for a form."""
    form = asked_form(body)
    return OWN_NAME if form is None else form.field


def _of_format(form: ResponseFormat) -> dict[str, Any]:
    """Nothing of type text."""
    tag = form.model_dump(include={"format", "structures", "triggers"}, exclude_none=True)
    right = not tag or form.type == "structural_tag"
    check(right, f"response_format.{next(iter(tag), '')} must go with type structural_tag; got {form.type}")
    given = form.json_schema is not None
    check(not given or form.type == "json_schema", f"response_format.json_schema must go with type json_schema; got {form.type}")
    match form.type:
        case "json_object":
            return {"json_object": True}
        case "structural_tag":
            check(bool(tag), "response_format.format must be given with type structural_tag; got null")
            return {"structural_tag": tag}
        case "json_schema":
            schema = None if form.json_schema is None else form.json_schema.schema_
            check(schema is not None, "response_format.json_schema.schema must be given with type json_schema; got null")
            return {"json": schema}
    return {}


def blame(error: Refusal, field: str) -> Refusal:
    """The same error about the field that the client knows the form by."""
    if field == OWN_NAME or (error.param != OWN_NAME and not error.message.startswith(OWN_NAME)):
        return error
    return Refusal(error.code, re.sub(rf"^{OWN_NAME}(\.\w+)?", field, error.message), param=field)
