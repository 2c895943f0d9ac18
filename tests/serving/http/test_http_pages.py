"""/v1/responses, the tokenizer's endpoints, status, and the page."""

import re
from html.parser import HTMLParser
from typing import Any

import httpx
import openai
import pytest
from http_server import Server
from sse import stream

from pagedjax import LLM, SamplingParams
from pagedjax.host.block_pool import BlockPool
from pagedjax.host.reserve import BuddyPool
from serving.http.status import PAGE, block_map
from serving.metrics import Blocks

HELLO = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Tell me a story."}]


def test_a_response(server: Server, client: httpx.Client, chat_llm: LLM):
    (output,) = chat_llm.chat(HELLO, SamplingParams(max_tokens=12, temperature=0))
    text = output.outputs[0].text
    inputs = ["Tell me a story.", [{"role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}]]
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as sdk:
        for given in inputs:
            options: dict[str, Any] = {"model": "stories", "input": given, "instructions": "Be kind.", "temperature": 0}
            answer = sdk.responses.create(**options, max_output_tokens=12, metadata={"a": "b"}, store=False)
            assert answer.output_text == text and answer.metadata == {"a": "b"}
            assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
            assert (answer.usage.input_tokens, answer.usage.output_tokens) == (len(output.prompt_token_ids), 12)
        events = list(sdk.responses.create(**options, max_output_tokens=12, stream=True))
    assert [e.type.removeprefix("response.") for e in events if "delta" not in e.type] == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == text
    assert events[-1].response.output_text == text and events[-1].response.usage.output_tokens == 12
    include: dict[str, Any] = {
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "max_output_tokens": 4,
        "temperature": 0,
    }
    (item,) = client.post("/v1/responses", json={"input": "Hi", **include}).json()["output"]
    entries = item["content"][0]["logprobs"]
    assert len(entries) == 4 and all(len(e["top_logprobs"]) == 2 for e in entries)
    deltas = [e for e in stream(client, "/v1/responses", input="Hi", **include) if e["type"].endswith("text.delta")]
    assert [entry for e in deltas for entry in e["logprobs"]] == entries


def test_tokens_of_a_text(client: httpx.Client, chat_llm: LLM):
    text = "Once upon a 😀"
    ids = chat_llm.tokenizer.encode(text)
    body = client.post("/tokenize", json={"model": "stories", "prompt": text, "return_token_strs": True}).json()
    assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 128)
    assert body["token_strs"][:2] == ["<s>", " Once"] and len(body["token_strs"]) == len(ids)
    assert client.post("/tokenize", json={"prompt": text, "add_special_tokens": False}).json()["tokens"] == ids[1:]
    assert client.post("/detokenize", json={"tokens": ids[1:]}).json() == {"prompt": text}
    assert client.post("/detokenize", json={"tokens": ids}).json()["prompt"].startswith("<s>")


def test_tokens_of_a_chat(client: httpx.Client, chat_llm: LLM):
    body = {"messages": HELLO, "chat_template_kwargs": {"mood": "sad"}, "add_generation_prompt": False}
    expected = chat_llm.chat_prompt(HELLO, add_generation_prompt=False, chat_template_kwargs={"mood": "sad"})
    assert client.post("/tokenize", json=body).json()["tokens"] == list(expected)
    assert client.post("/tokenize", json={"messages": HELLO}).json()["tokens"] == list(chat_llm.chat_prompt(HELLO))


def test_what_is_told_of_the_tokenizer(client: httpx.Client, chat_llm: LLM):
    info = client.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["add_bos_token"], info["vocab_size"]) == ("<s>", "</s>", True, 512)
    assert info["chat_template"] == chat_llm.tokenizer.chat_template


def test_status(client: httpx.Client):
    assert client.get("/health").json() == {"status": "live"} and client.get("/ready").json() == {"status": "ready"}
    assert re.match(r"\d+\.\d+", client.get("/version").json()["version"])
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["owned_by"], model["max_model_len"]) == ("stories", "pagedjax", 128)
    assert client.get("/v1/models/stories").json() == model
    schema = client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/metrics"} <= set(schema["paths"])
    assert client.get("/docs").status_code == 404  # a page that would load scripts from elsewhere


# --- the page -------------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self, page: str):
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def script() -> str:
    (source,) = re.findall("<script>(.*?)</script>", PAGE, re.DOTALL)
    return source


def test_the_page_needs_nothing_from_elsewhere(client: httpx.Client):
    response = client.get("/ui")
    assert response.status_code == 200 and response.text == PAGE
    assert client.get("/", follow_redirects=True).text == PAGE
    for tag, attributes in Elements(PAGE).found:
        for name in ("src", "href", "action", "style", "onclick", "srcset"):
            value = attributes.get(name)
            assert value is None or (tag == "link" and value.startswith("data:")), f"{tag} has {name}={value}"
    assert re.findall(r"https?://[^\s'\"]+", PAGE) == ["http://www.w3.org/2000/svg", "http://www.w3.org/2000/svg"]
    assert "@import" not in PAGE and "url(" not in PAGE and "innerHTML" not in PAGE
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and policy.count("'sha256-") == 2


def test_the_ids_of_the_page_are_those_of_its_script():
    ids = [attributes["id"] for _, attributes in Elements(PAGE).found if "id" in attributes]
    assert len(set(ids)) == len(ids)
    source = script()
    asked = set(re.findall(r'\$\("([a-z_0-9-]+)"\)', source)) | {f"{k}{i}" for k in "kn" for i in range(4)}
    (numbers,) = re.findall(r"NUMBERS = \[(.*?)\]", source)
    assert asked | set(re.findall('"([a-z_]+)"', numbers)) <= set(ids)
    assert asked >= {"log", "input", "send", "stop", "map", "tiles", "state"}
    labelled = [a for tag, a in Elements(PAGE).found if tag in ("input", "textarea", "select")]
    assert len(labelled) == PAGE.count("<label") + 1 and any("aria-label" in a for a in labelled)  # the message itself has no label


def test_the_fields_the_page_sends_are_taken(client: httpx.Client):
    (numbers,) = re.findall(r"NUMBERS = \[(.*?)\]", script())
    body = dict.fromkeys(re.findall('"([a-z_]+)"', numbers), 1) | {"stream": True, "stream_options": {"include_usage": True}}
    assert stream(client, "/v1/completions", prompt="Once", **body)[-1] == "[DONE]"
    assert stream(client, "/v1/chat/completions", messages=HELLO, **body)[-1] == "[DONE]"


def test_the_state_of_the_page(server: Server, client: httpx.Client):
    before = client.get("/ui/state").json()
    used = re.findall(r"\bs(?:tate)?\.([a-z_]+)", script())
    assert set(used) <= set(before) and {"running", "blocks"} <= set(used)
    assert set(re.findall(r"\bblocks\.([a-z_]+)", script())) <= set(before["blocks"])
    client.post("/v1/completions", json={"prompt": "Once upon a time there was a little", "max_tokens": 30, "ignore_eos": True})
    state = client.get("/ui/state").json()
    assert state["generated"] - before["generated"] == 30 and state["chat"] is True and state["lanes"] == 4
    blocks = state["blocks"]
    assert len(blocks["cells"]) == blocks["total"] == server.llm.engine.scheduler.pool.capacity and blocks["per_cell"] == 1
    assert blocks["cells"].count("1") == blocks["cached"] > 0 and blocks["cells"].count("0") == blocks["free"]


def test_blocks_that_share_a_square():
    blocks = Blocks(total=10, size=16, used=2, shared=1, cached=1, states=bytes([0, 1, 0, 0, 2, 0, 0, 0, 3, 0]))
    counts = {"total": 10, "size": 16, "used": 2, "shared": 1, "cached": 1, "free": 7}
    assert block_map(blocks, most=5) == counts | {"cells": "10203", "per_cell": 2}
    assert block_map(blocks, most=10)["cells"] == "0100200030"


@pytest.mark.parametrize("pool", [BlockPool(8), BuddyPool(8)])
def test_the_states_of_blocks(pool: Any):
    blocks = pool.allocate(2)
    if isinstance(pool, BlockPool):
        other = pool.allocate(2)
        pool.share(blocks[:1])
        pool.keep(other[0])
        pool.release(other)
        assert pool.states().count(3) == 1 == pool.states()[blocks[0] - 1] // 3
        assert pool.states()[other[0] - 1] == 1 and pool.states()[other[1] - 1] == 0
        pool.release(blocks[:1])
    assert [state for state in pool.states() if state > 1] == [2, 2] and len(pool.states()) == 7
    assert {i + 1 for i, state in enumerate(pool.states()) if state == 2} == set(blocks)
