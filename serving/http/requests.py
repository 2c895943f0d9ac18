"""What the HTTP endpoints take: the names of OpenAI's API, and beyond them those that vLLM gave to what it has not.

Types are strict (no "5" for 5), null means absent, and a field that is not here is refused by its name.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, WithJsonSchema

from pagedjax.errors import UserError

MOST_NESTED = 128  # levels of what may hold anything; the limit that can be set for schemas is below
BIAS = {"type": "object", "additionalProperties": {"type": "number"}}
PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}, "minItems": 1},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1}, "minItems": 1},
    ]
}


def _check_nesting(value: Any) -> Any:
    """What follows its parts, here and in templates, does so by recursion."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MOST_NESTED):
        level = [part for each in level for part in (each.values() if isinstance(each, dict) else each)]
        level = [part for part in level if isinstance(part, dict | list)]
        if not level:
            return value
    raise ValueError(f"nested more than {MOST_NESTED} levels")


# The first wrong entry of a list is enough: a body may hold millions.
type Integers = Annotated[list[int], FailFast()]
type Strings = Annotated[list[str], FailFast()]
type Object = Annotated[dict[str, Any], AfterValidator(_check_nesting)]
type Objects = Annotated[list[Object], FailFast()]
type SchemaOrText = Annotated[str | dict[str, Any], AfterValidator(_check_nesting)]


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Harmless(Fields):
    """Taken and not used: nothing about an answer depends on them. docs/serving-http.md has the same list."""

    user: Any = None
    store: Any = None  # answers are never stored
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class StreamOptions(Fields):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; true is refused where it is read


class JsonSchema(Fields):
    """`name` and `description` are labels; the schema is followed to the letter, strict or not."""

    name: str
    description: str | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Fields):
    """`format`, or `structures` and `triggers`: of a structural tag."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: Object | None = None
    structures: Objects | None = None
    triggers: Strings | None = None


class StructuredOutputs(Fields):
    """vLLM's way to say the same, and more; exactly one of these."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Strings | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: SchemaOrText | None = None


class Sampling(Harmless):
    """What chat and completions share. `None`: as the model's makers recommend, or SamplingParams has it."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    logit_bias: Annotated[dict[str, Any] | None, WithJsonSchema(BIAS)] = None  # by token id, which JSON writes as a string
    allowed_token_ids: Integers | None = None
    bad_words: Strings | None = None
    stop: str | Strings | None = None
    stop_token_ids: Integers | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    beam_width: int | None = None  # None: n
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    cache_salt: str | None = None  # only requests of one tenant with the same salt share cached blocks
    service_tier: Literal["auto", "default", "flex"] | None = None  # flex: the pool of batch requests
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaOrText | None = None  # and so on: what structured_outputs was called before
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None


class Message(BaseModel):
    """One turn. Further fields reach the chat template, which may know them."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: str | Objects | None = None
    __pydantic_extra__: dict[str, Annotated[Any, AfterValidator(_check_nesting)]] = Field(init=False)


class Function(Fields):
    name: str
    description: str | None = None
    parameters: Object | None = None
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


type Messages = Annotated[list[Message], FailFast(), Field(min_length=1)]
type Tools = Annotated[list[Tool], FailFast()]


class Conversation(Fields):
    """What a chat template renders."""

    messages: Messages
    tools: Tools | None = None
    add_generation_prompt: bool | None = None  # None: true
    chat_template_kwargs: Object | None = None


class ChatRequest(Sampling, Conversation):
    max_completion_tokens: int | None = None  # the newer name of max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool | None = None  # None: true


class CompletionRequest(Sampling):
    prompt: Annotated[Any, WithJsonSchema(PROMPT)]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None  # None: true


class TextFormat(Fields):
    """The response_format of a response, without a level between."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Object | None, Field(alias="schema")] = None
    strict: bool | None = None


class Text(Fields):
    format: TextFormat | None = None


class ResponsesRequest(Harmless):
    """The basic form: text in, one message out, nothing kept."""

    user: str | None = None  # repeated
    metadata: dict[str, str] | None = None  # repeated, too

    input: str | Objects
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    top_logprobs: int | None = None
    include: Strings | None = None
    text: Text | None = None
    tools: Objects | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    truncation: Literal["auto", "disabled"] | None = None
    previous_response_id: str | None = None
    background: bool | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None
    chat_template_kwargs: Object | None = None


class TokenizeRequest(Fields):
    """Of a text, or of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: Object | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Fields):
    model: str | None = None
    tokens: Integers


def as_prompts(value: Any) -> list[str | tuple[int, ...]]:
    """The prompts of a completion: one text, the ids of one, or a list of either."""
    rule = "prompt must be a text, a list of token ids, or a list of either"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise UserError(f"{rule}; got {value!r:.80}")
    if _is_ids(value):
        return [tuple(value)]
    prompts: list[str | tuple[int, ...]] = []
    for prompt in value:
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and _is_ids(prompt)):
            raise UserError(f"{rule}; got {prompt!r:.80} in a list")
        prompts.append(prompt if isinstance(prompt, str) else tuple(prompt))
    return prompts


def _is_ids(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(type(value) is int for value in values)
