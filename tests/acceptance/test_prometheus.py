"""Debian's Prometheus scrapes the server, and answers what dashboards of vLLM ask it."""

from collections.abc import Iterator

import pytest
from http_server import Server, chat_model, running
from loopback import until
from scraper import PROMETHEUS, Ask, scraping

pytestmark = pytest.mark.skipif(not PROMETHEUS, reason="needs the program prometheus on the PATH (a package of Debian)")
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
def query(server: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ask]:
    with scraping(server.url, tmp_path_factory.mktemp("prometheus")) as (_, ask):
        yield ask


def test_every_expression_has_an_answer(server: Server, query: Ask):
    prompt = "The quick brown fox jumps over the lazy dog"
    made = lambda: float(query(f"vllm:generation_tokens_total{OF}")[0]["value"][1])
    with server.client() as client:
        for rounds in (1, 2):  # a rate needs requests between two scrapes
            for _ in range(3):
                client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 20, "ignore_eos": True})
            until(lambda all_of_them=rounds * 60: made() == all_of_them)
    answers = {expression: query(expression) for expression in EXPRESSIONS}
    missing = [expression for expression, found in answers.items() if not found or found[0]["value"][1] == "NaN"]
    assert missing == []
    assert query("vllm:no_such_metric") == []
