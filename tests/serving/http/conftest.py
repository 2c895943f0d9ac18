"""stories260K with a tiny chat template, behind a server for each module."""

from collections.abc import Iterator

import httpx
import loopback
import pytest
from http_server import TOOLS_TEMPLATE, Server, chat_model, running

from pagedjax import LLM


@pytest.fixture(scope="session")
def chat_llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    with chat_model(tmp_path_factory.mktemp("chat"), compile_cache) as llm:
        yield llm


@pytest.fixture(scope="session")
def tools_llm(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[LLM]:
    """With room for calls, a template that teaches the hermes way of calling, and a special token as Mistral's models have it.
    Its shapes are those of an engine in test_engine.py."""
    shapes = {"max_model_len": 512, "max_num_seqs": 2, "buckets.decode_rows": (1, 2)}
    options = {"template": TOOLS_TEMPLATE, "special": {507: "[TOOL_CALLS]"}, **shapes}
    with chat_model(tmp_path_factory.mktemp("tools"), compile_cache, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def server(chat_llm: LLM) -> Iterator[Server]:
    """One for each module; nothing may be left open or held by it."""
    with running(chat_llm) as server:
        yield server
        assert server.frontend.open_requests == 0
        server.on_engine(lambda engine: engine.scheduler.check())
        pool = chat_llm.engine.scheduler.pool
        assert pool.num_free == pool.capacity


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def slow_steps(server: Server) -> Iterator[None]:
    """Every step takes 20 ms longer, so that a request is there for a while."""
    with loopback.slow_steps(server.llm.engine, 0.02):
        yield
