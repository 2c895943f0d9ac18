"""Chat templates render as in transformers, run in a sandbox, and a prompt has exactly one BOS."""

from dataclasses import replace
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pagedjax.errors import UserError
from pagedjax.text import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"
STORIES = load_tokenizer(GOLDEN / "stories260K")
TEMPLATES = sorted((GOLDEN / "chat_templates").glob("*.jinja"))
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter & <b>Klima</b>",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Zürich, 'quoted'"}}},
        },
    }
]
USER = {"role": "user", "content": "Is 1 < 2 & 3 > 2? é 😀"}
CHATS = {
    "one": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "<think>hm</think>\n\nYes."}, {"role": "user", "content": "Sure?\n"}],
}


def with_template(source: str, **others: str):
    return replace(STORIES, templates={"default": source, **others})


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no_tools", "tools"])
@pytest.mark.parametrize("chat", sorted(CHATS))
@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_published_templates_render_as_in_transformers(path, chat, tools):
    source = path.read_text(encoding="utf-8")
    for prompt in (True, False):
        variables = {"add_generation_prompt": prompt, "tools": tools}
        ours = with_template(source).render_chat(CHATS[chat], **variables)
        [theirs], _ = render_jinja_template([CHATS[chat]], chat_template=source, **variables, **STORIES.special_tokens)
        assert ours == theirs
        assert USER["content"] in ours


def test_there_are_templates():
    assert len(TEMPLATES) >= 4


FEATURES = """
    {%- for m in messages %}
        {%- if m.role == 'skip' %}{% continue %}{% endif %}
        {% generation %}[{{ m.content | trim }}]{% endgeneration %}
        {%- if loop.index == 3 %}{% break %}{% endif %}
    {% endfor %}
{{ {'b': '<&>', 'a': 'é'} | tojson(indent=1, sort_keys=true) }}{{ bos_token }}{{ unset }}{{ extra }}{{ namespace(x=1).x }}
"""


def test_features_of_templates_are_those_of_transformers():
    messages = [{"role": role, "content": f" {role} "} for role in ("user", "skip", "assistant", "user")]
    ours = with_template(FEATURES).render_chat(messages, extra="E")
    [theirs], _ = render_jinja_template(
        [messages], chat_template=FEATURES, add_generation_prompt=True, extra="E", **STORIES.special_tokens
    )
    assert ours == theirs
    assert '"a": "é"' in ours and "<&>" in ours and "<s>E1" in ours


def test_strftime_now_gives_the_date():
    year = with_template("{{ strftime_now('%Y') }}").render_chat([USER])
    assert year.isdigit() and len(year) == 4


@pytest.mark.parametrize("written", ["", "{{ bos_token }}", "<s>"])
def test_bos_stands_once_whoever_writes_it(written):
    tokenizer = with_template(written + "Once{{ messages[0].content }}")
    ids = tokenizer.encode_chat([{"role": "user", "content": " upon"}])
    assert ids == STORIES.encode("Once upon")
    assert ids.count(1) == 1


def test_chat_never_ends_with_the_suffix():
    tokenizer = replace(with_template("Once"), suffix=(2,))
    assert tokenizer.encode("Once")[-1] == 2
    assert tokenizer.encode_chat([USER]) == STORIES.encode("Once")


def test_named_templates_are_picked():
    tokenizer = with_template("D", tool_use="T", rag="R")
    assert tokenizer.render_chat([USER]) == "D"
    assert tokenizer.render_chat([USER], tools=TOOLS) == "T"
    assert tokenizer.render_chat([USER], tools=TOOLS, template="rag") == "R"
    with pytest.raises(UserError, match=r"chat template must be one of \['default', 'rag', 'tool_use'\]; got 'other'"):
        tokenizer.render_chat([USER], template="other")
    with pytest.raises(UserError, match=r"chat template must be one of .*; got \['rag'\]"):
        tokenizer.render_chat([USER], template=["rag"])  # pyright: ignore[reportArgumentType]
    with pytest.raises(UserError, match="this tokenizer has none"):
        STORIES.render_chat([USER])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__.os.popen('id').read() }}",
        "{{ dict.mro()[-1].__subclasses__() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ messages.append('x') }}",
        "{{ messages[0].update(role='system') }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(10000000) %}x{% endfor %}",
    ],
)
def test_sandbox_refuses(source):
    with pytest.raises(UserError, match="the chat template refused the messages: .*Error"):
        with_template(source).render_chat([USER])


@pytest.mark.parametrize("source", ["{{ ''|attr('__class__') }}", "{{ '{0.__class__}'.format(messages) }}"])
def test_sandbox_shows_nothing(source):
    assert with_template(source).render_chat([USER]) == ""


def test_a_template_cannot_change_the_messages_given():
    chat = [{"role": "user", "content": "hi"}]
    assert with_template("{% set messages = [] %}{{ messages|length }}").render_chat(chat) == "0"
    assert chat == [{"role": "user", "content": "hi"}]


def test_errors_of_a_template_are_the_users():
    with pytest.raises(UserError, match="the chat template must be valid Jinja; got Expected an expression"):
        with_template("{% if %}").render_chat([USER])
    with pytest.raises(UserError, match="refused the messages: TemplateError: roles must alternate"):
        with_template("{{ raise_exception('roles must alternate') }}").render_chat([USER])
    with pytest.raises(UserError, match="refused the messages: TypeError"):
        with_template("{{ 'a' + messages[0].content }}").render_chat([{"role": "user", "content": None}])


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert with_template("{{ messages[0].content }}").render_chat([{"role": "user", "content": parts}]) == "one\ntwo"


@pytest.mark.parametrize(
    "messages, message",
    [
        ([], "messages must hold at least one message; got none"),
        (["hi"], r"messages\[0\] must be an object with a role and a content; got 'hi'"),
        ([USER, {"content": "x"}], r"messages\[1\]\.role must be a non-empty string; got None"),
        ([{"role": "user", "content": 3}], r"messages\[0\]\.content must be a string; got 3"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]\.content parts must be .*; got .*image_url"),
    ],
)
def test_bad_messages_are_refused(messages, message):
    with pytest.raises(UserError, match=message):
        with_template("x").render_chat(messages)
