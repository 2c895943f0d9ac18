"""Chat templates: Jinja text that comes with a model, so it is rendered in a sandbox and its errors are the user's to see."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagedjax.errors import UserError, check

Message = Mapping[str, Any]


class Generation(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks what the assistant said (for training); its body is rendered as it is."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as a model saw it in training: Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=64)
def _compile(source: str) -> jinja2.Template:
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = _to_json
    env.globals.pop("lipsum")  # filler text; no template needs it, and it has been a way out of sandboxes
    env.globals["raise_exception"] = _raise_exception
    env.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return env.from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise UserError(f"the chat template must be valid Jinja; got {error}") from error


def render(source: str, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Renders a chat template. Whatever goes wrong inside it, a refusal of the sandbox included, is a UserError."""
    template = _compile(source)
    try:
        return template.render(**{**variables, "messages": plain_messages(messages)})
    except UserError:
        raise
    except Exception as error:  # a template can raise anything: it is a program
        raise UserError(f"the chat template refused the messages: {type(error).__name__}: {error}") from error


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Checked copies of the messages. Content given as parts of type "text" is joined by newlines; other parts are refused."""
    check(len(messages) > 0, "messages must hold at least one message; got none")
    plain = []
    for i, message in enumerate(messages):
        check(isinstance(message, Mapping), f"messages[{i}] must be an object with a role and a content; got {message!r:.80}")
        role, content = message.get("role"), message.get("content")
        check(isinstance(role, str) and role != "", f"messages[{i}].role must be a non-empty string; got {role!r:.80}")
        if isinstance(content, list | tuple):
            for part in content:
                ok = isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
                check(ok, f'messages[{i}].content parts must be {{"type": "text", "text": string}}; got {part!r:.80}')
            content = "\n".join(part["text"] for part in content)
        check(content is None or isinstance(content, str), f"messages[{i}].content must be a string; got {content!r:.80}")
        plain.append({**message, "content": content} if "content" in message else dict(message))
    return plain


def pick_template(templates: Mapping[str, str], name: str | None, *, has_tools: bool) -> str:
    """The template to use: the named one; else "tool_use" when there are tools and the model has it; else "default"."""
    check(len(templates) > 0, "a chat needs a chat template, and this tokenizer has none; send a prompt, or give a template")
    if name is None:
        name = "tool_use" if has_tools and "tool_use" in templates else "default"
    check(isinstance(name, str) and name in templates, f"the chat template must be one of {sorted(templates)}; got {name!r:.80}")
    return templates[name]
