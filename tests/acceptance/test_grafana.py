"""What our Grafana board asks, put to a real Prometheus that scrapes a server under a little load: everything has an answer."""

import re
from collections.abc import Iterator

import httpx
import pytest
from board import BOARD, expressions, filled
from http_server import Server, chat_model, running
from loopback import until
from scraper import PROMETHEUS, Ask, scraping

pytestmark = pytest.mark.skipif(not PROMETHEUS, reason="needs the program prometheus on the PATH (a package of Debian)")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[Server]:
    with chat_model(tmp_path_factory.mktemp("chat"), compile_cache) as llm, running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def prometheus(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Ask]]:
    """(its URL, a way to ask it), once there was a load in two scrapes, as rates need it; each time something was refused."""
    with scraping(server.url, tmp_path_factory.mktemp("prometheus")) as (url, ask), server.client() as client:
        made = lambda: float(ask("sum(vllm:generation_tokens_total)")[0]["value"][1])
        prompt = "The quick brown fox jumps over the lazy dog"
        for rounds in (1, 2):
            client.post("/v1/completions", json={"prompt": prompt, "no_such_field": 1})
            for _ in range(3):
                client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20, "ignore_eos": True})
            until(lambda all_of_them=rounds * 60: made() == all_of_them)
        yield url, ask


def missing(ask: Ask, asked: list[str]) -> list[str]:
    """Those that have no answer, or none that is a number."""
    return [expression for expression in asked if all(found["value"][1] == "NaN" for found in ask(expression))]


@pytest.mark.parametrize("by_name", [False, True])
def test_every_expression_has_an_answer(server: Server, prometheus: tuple[str, Ask], by_name: bool):
    """For all models and instances, and for one of each by name."""
    _, ask = prometheus
    chosen = {"model": "stories", "instance": server.url.removeprefix("http://")} if by_name else {}
    asked = [filled(expression, **chosen) for expression in expressions()]
    assert missing(ask, asked) == [] and len(asked) > 50


def test_another_model_and_a_misspelled_name_have_none(prometheus: tuple[str, Ask]):
    _, ask = prometheus
    others = [filled(expression, model="another") for expression in expressions() if "$model" in expression]
    assert missing(ask, others) == others and len(others) > 50
    asked = filled(expressions()[0])
    misspelled = asked.replace("success", "sucess")
    assert missing(ask, [asked, misspelled]) == [misspelled] != [asked]


def test_the_variables_have_values(server: Server, prometheus: tuple[str, Ask]):
    url, _ = prometheus
    found = {}
    for variable in BOARD["templating"]["list"]:
        if variable["type"] == "query":
            query = re.fullmatch(r"label_values\((.*), (\w+)\)", filled(variable["query"]))
            assert query is not None
            answer = httpx.get(f"{url}/api/v1/label/{query[2]}/values", params={"match[]": query[1]}, trust_env=False)
            found[variable["name"]] = answer.json()["data"]
    assert found == {"model": ["stories"], "instance": [server.url.removeprefix("http://")]}
