"""/metrics: the names that tools read, with values that agree with the requests that were made."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_server import Server, running
from prometheus_client.parser import text_string_to_metric_families
from sse import stream

from pagedjax import LLM
from pagedjax.errors import UserError
from pagedjax.host.histogram import Histogram
from serving.config import ServeConfig
from serving.metrics import one_two_five

# By what llm-d, inference-perf and vLLM's boards ask for.
NAMES = {
    *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:num_requests_waiting_by_reason", "vllm:kv_cache_usage_perc"),
    *("vllm:cache_config_info", "vllm:prompt_tokens", "vllm:prompt_tokens_cached", "vllm:generation_tokens"),
    *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:num_preemptions", "vllm:request_success"),
    *("vllm:admission_rejections", "vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
    *("vllm:request_time_per_output_token_seconds", "vllm:e2e_request_latency_seconds", "vllm:request_queue_time_seconds"),
    *("vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds", "vllm:request_inference_time_seconds"),
    *("vllm:request_prompt_tokens", "vllm:request_generation_tokens", "vllm:request_params_n", "vllm:request_params_max_tokens"),
    *("vllm:request_max_num_generation_tokens", "vllm:iteration_tokens_total", "vllm:request_prefill_kv_computed_tokens"),
    *("vllm:prompt_tokens_by_source", "vllm:engine_sleep_state"),
    *("pagedjax:compilations", "pagedjax:bucket_padding_ratio", "pagedjax:step_seconds", "pagedjax:blocks", "pagedjax:waste_slots"),
}
OLD = ("vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds")


class Page:
    """What was scraped."""

    def __init__(self, client: httpx.Client):
        response = client.get("/metrics")
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=0.0.4")
        self.families = {family.name: family for family in text_string_to_metric_families(response.text)}

    def __call__(self, name: str, **labels: str) -> float:
        """The value of a sample, added up over the labels that are not given."""
        samples = [s for family in self.families.values() for s in family.samples if s.name == name]
        found = [s.value for s in samples if labels.items() <= s.labels.items()]
        assert found, f"{name} {labels} is not there"
        return sum(found)


@pytest.fixture(scope="module")
def fresh(chat_llm: LLM) -> Iterator[Server]:
    """A server whose counters have seen nothing."""
    with running(chat_llm) as server:
        yield server


def test_names_and_labels(fresh: Server):
    with fresh.client() as client:
        page = Page(client)
        assert set(page.families) >= NAMES and not set(page.families) & set(OLD)
        for name, family in page.families.items():
            if name.startswith(("vllm:", "pagedjax:")):
                for sample in family.samples:
                    assert (sample.labels["model_name"], sample.labels["engine"]) == ("stories", "0"), sample
        config = page.families["vllm:cache_config_info"].samples[0]
        pool = fresh.llm.engine.scheduler.pool
        assert (config.labels["block_size"], config.labels["num_gpu_blocks"], config.value) == ("16", str(pool.capacity), 1)
        assert page("pagedjax:compilations_total", phase="start") == len(fresh.llm.engine.executables)
        assert page("pagedjax:compilations_total", phase="after_start") == 0


def test_values_follow_the_requests(fresh: Server):
    with fresh.client() as client:
        before = Page(client)
        prompt = "The quick brown fox jumps over the lazy dog"
        options: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
        usages = [client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 9, **options}).json()["usage"] for _ in "ab"]
        usages.append(client.post("/v1/completions", json={"prompt": "Tom", "max_tokens": 5, "n": 2, **options}).json()["usage"])
        text = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 9, **options}).json()["choices"][0]["text"]
        usages.append(usages[1])
        stream(client, "/v1/completions", prompt=prompt, max_tokens=9, stop=text[5:8], **options)
        assert client.post("/v1/completions", json={"prompt": "a " * 200}).status_code == 400
        page = Page(client)

    def more(name: str, **labels: str) -> float:
        return page(name, **labels) - before(name, **labels)

    prompts = sum(u["prompt_tokens"] for u in usages) + usages[0]["prompt_tokens"]
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages) + usages[1]["prompt_tokens_details"]["cached_tokens"]
    assert more("vllm:prompt_tokens_total") == prompts and more("vllm:prompt_tokens_cached_total") == cached > 0
    assert more("vllm:request_success_total", finished_reason="length") == 5
    assert more("vllm:request_success_total", finished_reason="stop") == 1
    assert more("vllm:request_success_total") == 6
    made = sum(u["completion_tokens"] for u in usages)
    assert made < more("vllm:request_generation_tokens_sum") <= made + 9 and more("vllm:request_generation_tokens_count") == 6
    assert more("vllm:generation_tokens_total") >= more("vllm:request_generation_tokens_sum")
    for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time", "request_prefill_time", "request_decode_time"):
        assert more(f"vllm:{name}_seconds_count") == 5
    whole, decode = more("vllm:e2e_request_latency_seconds_sum"), more("vllm:request_decode_time_seconds_sum")
    assert whole - decode == pytest.approx(more("vllm:time_to_first_token_seconds_sum"))
    assert (
        whole > sum(more(f"vllm:request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")) > 0
    )  # and to tokenize
    assert more("vllm:request_prefill_kv_computed_tokens_sum") == prompts - cached
    assert more("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == cached
    assert more("vllm:prompt_tokens_by_source_total") == prompts
    assert more("vllm:request_params_n_sum") == 6 and more("vllm:request_params_max_tokens_sum") == 4 * 9 + 5
    assert more("vllm:inter_token_latency_seconds_count") >= made - 6 * 2
    assert more("vllm:iteration_tokens_total_sum") == more("pagedjax:computed_tokens_total") > prompts - cached
    assert more("vllm:iteration_tokens_total_count") == more("pagedjax:steps_total") <= more("pagedjax:step_seconds_count") + 2
    assert more("vllm:prefix_cache_hits_total") >= cached
    assert more("pagedjax:padding_tokens_total") > 0 and 0 < page("pagedjax:bucket_padding_ratio") < 1
    assert page("pagedjax:refused_requests_total", code="prompt_too_long") == 1
    answered = {status: page("http_requests_total", handler="/v1/completions", status=status) for status in ("2xx", "4xx")}
    assert answered == {"2xx": 5, "4xx": 1} and page("http_requests_total") == 6 == page("http_request_duration_seconds_count")
    assert [page(f"vllm:{n}") for n in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")] == [0, 0, 0]
    assert sum(page("pagedjax:blocks", state=s) for s in ("used", "shared", "cached", "free")) == page("pagedjax:blocks")


def test_what_is_refused_unread_is_counted(fresh: Server):
    """By its body, its parameters or its key; and a path that is not there is an answer, too."""
    with fresh.client() as client:
        for body in ({"prompt": "a", "no_such_field": 1}, {"prompt": "a", "temperature": -1}, {"prompt": "a", "model": "another"}):
            assert client.post("/v1/completions", json=body).status_code in (400, 404)
        assert client.post("/v1/responses", json={"input": "a", "background": True}).status_code == 400
        assert client.get("/v1/nothing").status_code == 404
        for made_up in ("BREW", "ZAP"):  # a label for each would be as many as clients like
            assert client.request(made_up, "/v1/nothing").status_code == 404
        page = Page(client)
    name = "pagedjax:refused_requests_total"
    assert page(name, code="invalid_argument") == 2 and page(name, code="model_not_found") == page(name, code="unsupported") == 1
    assert page("http_requests_total", handler="none", status="4xx", method="GET") == 1
    assert page("http_requests_total", method="other") == 2 and page("http_requests_total", handler="none") == 3


def test_the_prefix_may_be_our_own(chat_llm: LLM):
    with running(chat_llm, metrics_prefix="pagedjax") as server, server.client() as client:
        names = set(Page(client).families)
    assert {name.replace("vllm:", "pagedjax:") for name in NAMES} <= names and not [n for n in names if n.startswith("vllm:")]
    with pytest.raises(UserError, match="metrics_prefix must be vllm or pagedjax; got 'other'"):
        ServeConfig(metrics_prefix="other")  # pyright: ignore[reportArgumentType]


def test_gauges_while_requests_run(server: Server, client: httpx.Client, slow_steps: None):
    body = {"prompt": "Once", "n": 6, "max_tokens": 100, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        pieces = response.iter_text()  # dropped, it would close the connection
        next(pieces)
        while server.frontend.load.running < 4:
            pass
        page = Page(client)
        assert page("vllm:num_requests_running") == 4 and page("vllm:num_requests_waiting") == 2  # four lanes
        assert 0 < page("vllm:kv_cache_usage_perc") <= 1 and page("pagedjax:blocks", state="shared") >= 0
    while server.llm.engine.has_work():
        pass
    assert Page(client)("vllm:request_success_total", finished_reason="abort") >= 6


def test_a_scrape_does_not_wait_for_a_long_step(server: Server, client: httpx.Client, monkeypatch: pytest.MonkeyPatch):
    def never(_: Any) -> Any:
        raise TimeoutError

    monkeypatch.setattr(server.llm.loop, "call_async", never)
    names = Page(client).families.keys()
    assert "vllm:prompt_tokens" in names and "vllm:num_requests_running" not in names


def test_histograms_and_edges():
    seen = Histogram((1, 2, 5))
    for value, times in ((0.5, 1), (1, 2), (4, 1), (9, 3)):
        seen.observe(value, times)
    assert (seen.counts, seen.total) == ([3, 0, 1, 3], 0.5 + 2 + 4 + 27)
    assert one_two_five(128) == (1, 2, 5, 10, 20, 50, 100) and one_two_five(1) == (1,)
