"""`pagedjax serve` with a collector of OpenTelemetry, behind a gateway that traces, too; and without either."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from collector import Collector, attributes, collecting
from http_server import STORIES
from loopback import until
from programs import found, free_port, started

SMG = found("smg")
SHAPES = [
    *("--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--block-size", "16"),
    *("--decode-rows", "4", "--prefill-tokens", "32", "--kv-memory", "2MiB"),
]
# At its end it says what of OpenTelemetry was imported.
PROGRAM = """
import json, sys
from pagedjax.cli import main
code = main(sys.argv[1:])
modules = [name for name in sys.modules if name.startswith("opentelemetry")]
print(json.dumps({"message": "imported", "modules": modules}), file=sys.stderr)
sys.exit(code)
"""
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@contextlib.contextmanager
def server(folder: Path, compile_cache: str, *flags: str) -> Iterator[tuple[str, str]]:
    """(its gRPC address, its HTTP address). At the end it is told to end, and does."""
    command = [sys.executable, "-c", PROGRAM, "serve", str(STORIES), "--served-model-name", "stories", *SHAPES, *flags]
    command += ["--grpc-port", "0", "--http-port", "0", "--log-format", "json", "--compile-cache", compile_cache]
    process, said = started(command, r"ready: .* at ([\d.:]+), ([\d.:]+)", folder / "log")
    try:
        yield said[1], said[2]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def lines(folder: Path) -> list[dict]:
    """Of the log, all of which is JSON."""
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


def test_spans_reach_the_collector_before_the_end(tmp_path: Path, compile_cache: str) -> None:
    with collecting() as collector:
        with server(tmp_path, compile_cache, "--otlp-traces-endpoint", collector.endpoint) as (_, http):
            ask(http, {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"})
        (span,) = collector.request_spans(1)
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT) and len(collector.below(span)) == 4
    (about,) = [line for line in lines(tmp_path) if line["message"] == "request"]
    assert (about["trace_id"], about["header_id"]) == (TRACE, "mine") and about["request_id"] == attributes(span)[
        "gen_ai.response.id"
    ]
    (imported,) = [line["modules"] for line in lines(tmp_path) if line["message"] == "imported"]
    assert "opentelemetry.sdk.trace" in imported  # the control of the next test


def test_without_the_flag_nothing_of_it_is_imported(tmp_path: Path, compile_cache: str) -> None:
    with server(tmp_path, compile_cache) as (_, http):
        ask(http, {"traceparent": f"00-{TRACE}-{PARENT}-01"})
    (imported,) = [line["modules"] for line in lines(tmp_path) if line["message"] == "imported"]
    assert not [
        name for name in imported if name.startswith(("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto"))
    ]


@pytest.mark.skipif(not SMG, reason="needs smg, which `make acceptance` installs")
def test_a_gateways_span_is_the_parent_of_ours(tmp_path: Path, compile_cache: str) -> None:
    with collecting() as collector, server(tmp_path, compile_cache, "--otlp-traces-endpoint", collector.endpoint) as (grpc, _):
        port = free_port()
        command = [SMG, "launch", "--host", "127.0.0.1", "--port", str(port), "--worker-urls", f"grpc://{grpc}"]
        command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port())]
        command += ["--enable-trace", "--otlp-traces-endpoint", collector.endpoint.removeprefix("http://")]
        gateway, _ = started(command, ".", tmp_path / "smg.log")
        try:
            url = f"http://127.0.0.1:{port}"
            until(lambda: is_ready(url))
            ask(url.removeprefix("http://"), {"traceparent": f"00-{TRACE}-{PARENT}-01"})
            ours = span_of(collector)
            until(lambda: any(span.span_id == ours.parent_span_id for span in collector.spans))
        finally:
            gateway.terminate()
            gateway.wait(30)
    assert ours.trace_id.hex() == TRACE and ours.parent_span_id.hex() != PARENT


def ask(address: str, headers: dict[str, str]) -> None:
    body = {"model": "stories", "prompt": "Once upon", "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"http://{address}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
    assert answer.status_code == 200, answer.text


def is_ready(url: str) -> bool:
    try:
        workers = httpx.get(f"{url}/workers", trust_env=False).json()["workers"]
        return any(worker["is_healthy"] for worker in workers)
    except httpx.HTTPError:
        return False


def span_of(collector: Collector):
    """Ours among those of the gateway."""
    named = lambda: [span for span in collector.spans if span.name == "text_completion stories"]
    until(lambda: bool(named()))
    (span,) = named()
    return span
