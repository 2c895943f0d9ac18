"""A real HTTP server on a real port, in a thread of its own."""

import asyncio
import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from pagedjax import LLM
from pagedjax.engine import Engine
from serving.auth import Keys
from serving.config import ServeConfig
from serving.events import Event
from serving.frontend import Frontend
from serving.http.app import open_http

STORIES = Path(__file__).parent / "golden" / "stories260K"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }} <tool_call>\n{% endif %}"
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no role ' + m.role) }}"
    "{% endif %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood | default('') }}{% if add_generation_prompt %}Once{% endif %}"
)

TOOLS_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% for call in m.tool_calls or [] %}<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}{% endfor %}"
)


def chat_model(
    folder: Path, compile_cache: str, *, template: str = TEMPLATE, special: Mapping[int, str] | None = None, **options: Any
) -> LLM:
    """stories260K with a tiny chat template; in the shapes of conftest's engines, so that `compile_cache`, the run's, has them.
    `special`: tokens that become special ones of this text."""
    model = folder / "stories"
    shutil.copytree(STORIES, model)
    path = model / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "chat_template": template}), encoding="utf-8")
    _make_special(model / "tokenizer.json", special or {})
    shapes = {"buckets.decode_rows": (4,), "buckets.prefill_tokens": (32,), "cache.kv_memory": 2 << 20}
    sizes = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 32, "block_size": 16}
    return LLM(model, compile_cache=compile_cache, **{**sizes, **shapes, **options})


def _make_special(path: Path, special: Mapping[int, str]) -> None:
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    vocab, added = tokenizer["model"]["vocab"], tokenizer["added_tokens"]
    for token, text in special.items():
        vocab.pop(next(piece for piece, at in vocab.items() if at == token))
        vocab[text] = token
        added.append({**added[0], "id": token, "content": text})
    path.write_text(json.dumps(tokenizer), encoding="utf-8")


@dataclass
class Server:
    """A server that runs, and what is behind it."""

    url: str
    frontend: Frontend
    llm: LLM
    loop: asyncio.AbstractEventLoop
    events: list[Event]

    def client(self, **options) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, trust_env=False, **options)

    def on_engine[T](self, ask: Callable[[Engine], T]) -> T:
        return self.llm.loop.call(ask)

    def on_loop(self, call: Callable[[], None]) -> None:
        """Runs it on the server's event loop, and waits."""

        async def run() -> None:
            call()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)


@contextlib.contextmanager
def running(llm: LLM | None, keys: Keys | None = None, **config) -> Iterator[Server]:
    """Starts a server on a free port. Without a model it stays in its start."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    events: list[Event] = []

    async def start():
        frontend = Frontend(ServeConfig(http_port=0, **config), "stories")
        frontend.observers.append(events.append)
        listener = await open_http(frontend, keys or Keys())
        if llm is not None:
            await frontend.start(llm)
        return frontend, listener

    frontend, listener = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    try:
        yield Server(f"http://{listener.address}", frontend, llm, loop, events)  # pyright: ignore[reportArgumentType]
    finally:
        asyncio.run_coroutine_threadsafe(listener.stop(1), loop).result(30)
        frontend._pool.shutdown()  # the model stays for others
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
