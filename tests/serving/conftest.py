"""One model for all tests, and one server for all of a module."""

from collections.abc import Iterator

import pytest
from loopback import SMALL, STORIES, Server, serving

from pagedjax import LLM


@pytest.fixture(scope="session")
def llm(compile_cache: str) -> Iterator[LLM]:
    with LLM(STORIES, **SMALL, compile_cache=compile_cache) as made:
        yield made


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Server]:
    with serving(llm) as made:
        yield made
