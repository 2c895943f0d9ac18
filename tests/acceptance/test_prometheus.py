"""Debian's Prometheus scrapes the server, and answers what dashboards of vLLM ask it."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from http_server import Server, chat_model, running

pytestmark = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs the program prometheus")
OF = '{model_name="stories"}'
QUANTILES = ("e2e_request_latency", "time_to_first_token", "inter_token_latency", "request_time_per_output_token")
MEANS = ("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time")
EXPRESSIONS = [
    *(f"histogram_quantile({q}, sum by (le) (rate(vllm:{n}_seconds_bucket{OF}[1m])))" for n in QUANTILES for q in (0.5, 0.99)),
    *(f"rate(vllm:{n}_seconds_sum{OF}[1m]) / rate(vllm:{n}_seconds_count{OF}[1m])" for n in (*QUANTILES, *MEANS)),
    *(f"rate(vllm:{n}_total{OF}[1m])" for n in ("prompt_tokens", "generation_tokens", "prefix_cache_hits", "num_preemptions")),
    *(f"vllm:{n}{OF}" for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")),
    f"sum by (finished_reason) (increase(vllm:request_success_total{OF}[1m]))",
    f"sum by (le) (increase(vllm:request_prompt_tokens_bucket{OF}[1m]))",
    f"sum by (le) (increase(vllm:request_generation_tokens_bucket{OF}[1m]))",
    f"rate(vllm:prefix_cache_hits_total{OF}[1m]) / rate(vllm:prefix_cache_queries_total{OF}[1m])",
    "sum by (phase) (rate(pagedjax:step_seconds_sum[1m])) / sum by (phase) (rate(pagedjax:step_seconds_count[1m]))",
    'pagedjax:compilations_total{phase="after_start"} == 0',
    "pagedjax:bucket_padding_ratio > 0",
    "sum by (state) (pagedjax:blocks)",
    "rate(process_cpu_seconds_total[1m])",
    f"sum by (source) (rate(vllm:prompt_tokens_by_source_total{OF}[1m]))",
    'vllm:time_to_first_token_seconds_bucket{le="1.0"} / ignoring (le) vllm:time_to_first_token_seconds_count',
    'sum(rate(vllm:request_time_per_output_token_seconds_bucket{le="0.025"}[1m]))',
    'max(vllm:engine_sleep_state{sleep_state="awake"}) == 1',
    "sum by (handler) (rate(http_request_duration_seconds_sum[1m]) / (rate(http_request_duration_seconds_count[1m]) > 0))",
    'sum by (status) (rate(http_requests_total{status="2xx"}[1m]))',
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[Server]:
    with chat_model(tmp_path_factory.mktemp("chat"), compile_cache) as llm, running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def query(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], list[Any]]]:
    """Asks a Prometheus that scrapes the server every second."""
    folder = tmp_path_factory.mktemp("prometheus")
    target = server.url.removeprefix("http://")
    config = (
        f"global: {{scrape_interval: 1s}}\nscrape_configs: [{{job_name: pagedjax, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    (folder / "prometheus.yml").write_text(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    log = (folder / "log").open("w")
    process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)

    def ask(expression: str) -> list[Any]:
        answer = httpx.get(f"http://{address}/api/v1/query", params={"query": expression}, trust_env=False).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return answer["data"]["result"]

    try:
        wait_until(lambda: ask("up == 1"))
        yield ask
    finally:
        process.terminate()
        process.wait(30)
        log.close()


def wait_until(done: Callable[[], Any]) -> None:
    for _ in range(600):
        try:
            if done():
                return
        except httpx.HTTPError:
            pass  # it does not listen yet
        time.sleep(0.1)
    raise AssertionError("it did not happen within a minute")


def test_every_expression_has_an_answer(server: Server, query: Callable[[str], list[Any]]):
    prompt = "The quick brown fox jumps over the lazy dog"
    with server.client() as client:
        for _ in range(2):  # a rate needs requests between two scrapes
            before = query(f"vllm:generation_tokens_total{OF}")
            for _ in range(3):
                client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20, "ignore_eos": True})
            wait_until(lambda before=before: query(f"vllm:generation_tokens_total{OF}")[0]["value"][1] != before[0]["value"][1])
    answers = {expression: query(expression) for expression in EXPRESSIONS}
    missing = [expression for expression, found in answers.items() if not found or found[0]["value"][1] == "NaN"]
    assert missing == []
    assert query("vllm:no_such_metric") == []
    made = query(f"vllm:generation_tokens_total{OF}")[0]["value"][1]
    assert float(made) == 6 * 20
