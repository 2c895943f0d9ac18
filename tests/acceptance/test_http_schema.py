"""schemathesis makes requests of our own OpenAPI description, right ones and wrong ones: none of them may be answered by a 5xx."""

from collections import Counter
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from http_server import Server, chat_model, running
from hypothesis import HealthCheck, given, settings, strategies
from schemathesis import GenerationMode

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
# What no description can say: which model there is, and which messages its chat template takes.
RIGHT = {"model": "stories", "messages": [{"role": "user", "content": "Once"}]}
PAGES = {"/health", "/ready", "/version", "/v1/models", "/v1/models/{name}", "/metrics", "/ui", "/ui/state", "/tokenizer_info"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[Server]:
    with chat_model(tmp_path_factory.mktemp("chat"), compile_cache) as llm, running(llm) as server:
        yield server
        assert server.frontend.open_requests == 0 and not llm.engine.has_work()
        llm.engine.scheduler.check()


@pytest.fixture(scope="module")
def api(server: Server) -> schemathesis.BaseSchema:
    schema = schemathesis.openapi.from_dict(httpx.get(f"{server.url}/openapi.json").json())
    schema.config.update(base_url=server.url)
    return schema


def status(case: schemathesis.Case) -> int:
    """Of the answer, which is no error of ours."""
    response = case.call()
    assert response.status_code < 500, f"{response.status_code}: {response.text}"
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
    return response.status_code


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("path", PATHS)
def test_no_request_is_answered_by_an_error_of_ours(server: Server, api: schemathesis.BaseSchema, path: str, mode: GenerationMode):
    statuses: Counter[int] = Counter()
    operation = api[path]["POST"]

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(operation.as_strategy(generation_mode=mode), strategies.booleans())
    def check(case: schemathesis.Case, mended: bool) -> None:
        if mended and mode == GenerationMode.POSITIVE:
            case.body = {**case.body, **{name: value for name, value in RIGHT.items() if name in case.body}}
        statuses[status(case)] += 1

    check()
    print(path, mode.value, dict(statuses))
    assert statuses.total() >= 100
    # nothing that the description rules out is answered; some of the rest is
    assert (statuses[200] > 0) == (mode == GenerationMode.POSITIVE)


@pytest.mark.parametrize("path", sorted(PAGES))
def test_no_page_is_an_error_of_ours(server: Server, api: schemathesis.BaseSchema, path: str):
    statuses: Counter[int] = Counter()

    @settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(api[path]["GET"].as_strategy(generation_mode=GenerationMode.POSITIVE))
    def check(case: schemathesis.Case) -> None:
        statuses[status(case)] += 1

    check()
    print(path, dict(statuses))
    assert set(statuses) == ({404} if "{" in path else {200})  # no model has a name that was made up


def test_all_paths_are_tried(server: Server):
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    tried = {**dict.fromkeys(PATHS, {"post"}), **dict.fromkeys(PAGES, {"get"})}
    assert {path: set(methods) for path, methods in paths.items()} == tried
