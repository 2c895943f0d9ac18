"""inference-perf, of the Kubernetes project, sends a Poisson process of streamed completions: none fails, no token is lost."""

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import STORIES, Server, chat_model, running
from programs import ROOT
from scraper import PROMETHEUS, scraping

PROGRAM = (
    ROOT / ".tools" / "inference-perf" / "bin" / "inference-perf"
)  # its libraries are not ours: it has an environment of its own
pytestmark = pytest.mark.skipif(not PROGRAM.exists(), reason="needs inference-perf, which `make acceptance` installs")
STAGES = [{"rate": 4, "duration": 6}, {"rate": 12, "duration": 8}]  # requests a second, seconds
COUNTS = [stage["rate"] * stage["duration"] for stage in STAGES]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[Server]:
    with chat_model(tmp_path_factory.mktemp("chat"), compile_cache) as llm, running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def reports(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All that it wrote, by name."""
    folder = tmp_path_factory.mktemp("inference-perf")
    if not PROMETHEUS:
        return run(folder, config(server, folder))
    with scraping(server.url, folder) as (url, _):
        metrics = {"type": "prometheus", "prometheus": {"url": url, "scrape_interval": 1}}
        return run(folder, {**config(server, folder), "metrics": metrics})


def config(server: Server, folder: Path) -> dict[str, Any]:
    lengths = {"type": "uniform", "min": 8, "max": 40, "mean": 24, "std_dev": 9}
    return {
        "load": {"type": "poisson", "interval": 1, "stages": STAGES, "num_workers": 2, "base_seed": 1},
        "api": {"type": "completion", "streaming": True},
        "server": {"type": "vllm", "model_name": "stories", "base_url": server.url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": str(STORIES)},
        "data": {"type": "synthetic", "input_distribution": lengths, "output_distribution": lengths},
        "report": {"request_lifecycle": {"summary": True, "per_stage": True, "per_request": True}},
        "storage": {"local_storage": {"path": str(folder / "reports")}},
    }


def run(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    file = folder / "config.yml"
    file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML, too
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    command = [str(PROGRAM), "--config_file", str(file)]
    done = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return {path.stem: json.loads(path.read_text()) for path in (folder / "reports").glob("*.json")}


def counted(server: Server, name: str) -> int:
    page = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return sum(int(float(line.split()[-1])) for line in page.splitlines() if line.startswith(f"{name}{{"))


def test_every_request_succeeds(reports: dict[str, Any]):
    summary = reports["summary_lifecycle_metrics"]
    assert summary["failures"]["count"] == 0 and summary["successes"]["count"] == summary["load_summary"]["count"] == sum(COUNTS)
    stages = [reports[f"stage_{i}_lifecycle_metrics"] for i in range(len(STAGES))]
    assert [stage["successes"]["count"] for stage in stages] == COUNTS
    checked = reports["validation"]  # by itself
    assert [part["errors"] for part in (checked["global"], *checked["reports"].values()) if part["errors"]] == []
    for stage in stages:
        load = stage["load_summary"]
        print({"asked": load["requested_rate"], "sent": load["achieved_rate"], "delay": load["schedule_delay"]["p99"]})


def test_token_counts_add_up(server: Server, reports: dict[str, Any]):
    """Each answer has as many tokens as were asked for; all together, as many as the server says that it made."""
    requests, summary = reports["per_request_lifecycle_metrics"], reports["summary_lifecycle_metrics"]["successes"]
    asked, got = Counter(), Counter()
    for request in requests:
        usage = request["info"]["response_metrics"]["server_usage"]
        asked[json.loads(request["request"])["max_tokens"]] += 1
        got[usage["completion_tokens"]] += 1
        assert request["error"] is None and usage["prompt_tokens"] == request["info"]["request_metrics"]["text"]["input_tokens"]
    assert asked == got and len(asked) > 5
    assert summary["output_tokens"]["total"] == sum(n * times for n, times in got.items())
    assert summary["output_tokens"]["total"] == counted(server, "vllm:generation_tokens_total")
    assert summary["prompt_tokens"]["total"] == counted(server, "vllm:prompt_tokens_total")
    assert summary["client_fallback_requests"] == {"prompt": 0, "output": 0}  # all counts are the server's own
    assert counted(server, "vllm:request_success_total") == sum(COUNTS)


@pytest.mark.skipif(not PROMETHEUS, reason="needs the program prometheus on the PATH (a package of Debian)")
def test_its_own_questions_about_our_metrics_have_answers(reports: dict[str, Any]):
    """By Prometheus, which adds up what it saw between two scrapes."""
    asked = reports["summary_prometheus_metrics"]["successes"]
    assert asked["count"] == pytest.approx(sum(COUNTS), rel=0.2)
    for name in (
        "request_latency",
        "time_to_first_token",
        "inter_token_latency",
        "request_generation_tokens",
        "request_decode_time",
    ):
        assert asked[name]["mean"] > 0 and asked[name]["p99"] >= asked[name]["median"] > 0, name
    assert asked["prompt_len"]["rate"] > 0 and asked["output_len"]["rate"] > 0
