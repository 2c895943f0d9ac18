"""`buf curl` knows the services by reflection alone: both APIs, health, streams and errors, without a proto file."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from loopback import SMALL, STORIES, Server, serving
from programs import found

from pagedjax import LLM, SamplingParams

BUF = found("buf")
pytestmark = pytest.mark.skipif(not BUF, reason="needs buf, which `make install` installs")
ONCE = "Once upon a time"
GREEDY = {"temperature": 0, "max_tokens": 24}


@pytest.fixture(scope="module")
def server(compile_cache: str) -> Iterator[Server]:
    with LLM(STORIES, **SMALL, compile_cache=compile_cache) as llm, serving(llm) as made:
        yield made


def curl(server: Server, method: str, *options: str, **body: Any) -> subprocess.CompletedProcess[str]:
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", *options]
    command += ["--data", json.dumps(body), f"http://{server.address}/{method}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def answers(server: Server, method: str, **body: Any) -> list[Any]:
    """All messages of one call."""
    done = curl(server, method, **body)
    assert done.returncode == 0, done.stderr
    decoder, messages, text = json.JSONDecoder(), [], done.stdout.strip()
    while text:
        message, end = decoder.raw_decode(text)
        messages.append(message)
        text = text[end:].strip()
    return messages


@pytest.fixture(scope="module")
def offline(server: Server) -> Any:
    return server.llm.generate(ONCE, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0]


def test_generate(server: Server, offline: Any):
    (answer,) = answers(server, "pagedjax.v1.Inference/Generate", prompts=[{"text": ONCE}], params=GREEDY)
    (sample,) = answer["completions"][0]["samples"]
    assert (sample["text"], tuple(sample["tokenIds"])) == (offline.text, offline.token_ids)
    assert sample["finishReason"] == "FINISH_REASON_LENGTH" and sample["usage"]["generatedTokens"] == 24


def test_generate_stream(server: Server, offline: Any):
    messages = answers(server, "pagedjax.v1.Inference/GenerateStream", prompts=[{"text": ONCE}], params=GREEDY)
    samples = [sample for message in messages for sample in message.get("samples", [])]
    assert len(messages) > 10 and "".join(sample.get("text", "") for sample in samples) == offline.text
    assert tuple(token for sample in samples for token in sample.get("tokenIds", [])) == offline.token_ids


def test_vllms_service(server: Server, offline: Any):
    assert answers(server, "vllm.grpc.engine.VllmEngine/HealthCheck") == [{"healthy": True, "message": "ready"}]
    (info,) = answers(server, "vllm.grpc.engine.VllmEngine/GetModelInfo")
    assert (info["servedModelName"], info["maxContextLength"], info["vocabSize"]) == ("stories", 128, 512)
    request = {"text": ONCE, "samplingParams": {"temperature": 0, "maxTokens": 24}, "stream": True}
    *chunks, last = answers(server, "vllm.grpc.engine.VllmEngine/Generate", **request)
    assert [token for piece in chunks for token in piece["chunk"]["tokenIds"]] == list(offline.token_ids)
    assert last["complete"]["outputIds"] == list(offline.token_ids) and last["complete"]["finishReason"] == "length"


def test_health(server: Server):
    for name in ("", "pagedjax.v1.Inference", "vllm.grpc.engine.VllmEngine"):
        assert answers(server, "grpc.health.v1.Health/Check", service=name) == [{"status": "SERVING"}]
    assert json.loads(curl(server, "grpc.health.v1.Health/Check", service="nobody").stderr)["code"] == "not_found"


def test_what_there_is(server: Server):
    command = [BUF, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--list-methods", f"http://{server.address}"]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split()
    assert {"pagedjax.v1.Admin/Drain", "pagedjax.v1.Inference/Score", "vllm.grpc.engine.VllmEngine/Abort"} <= set(listed)


def test_an_error_has_its_code_and_details(server: Server):
    done = curl(server, "pagedjax.v1.Inference/Generate", prompts=[{"text": ONCE}], params={"topP": 2})
    error = json.loads(done.stderr)
    assert done.returncode != 0 and error["code"] == "invalid_argument" and "top_p must be in (0, 1]; got 2" in error["message"]
    assert any(detail["type"] == "google.rpc.ErrorInfo" for detail in error["details"])
    unknown = curl(server, "pagedjax.v1.Inference/Generate", prompt=ONCE)
    assert unknown.returncode != 0 and "prompt" in unknown.stderr  # read by our own schema, not sent
