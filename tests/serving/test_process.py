"""`pagedjax serve` as a process: ready, drained by SIGTERM, stopped by a second one, and ended by a step that fails."""

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from loopback import STORIES

from pagedjax.commands.serve import process_age
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub

ROOT = Path(__file__).parents[2]
SHAPES = [
    *("--max-model-len", "128", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--block-size", "16"),
    *("--decode-rows", "4", "--prefill-tokens", "32", "--kv-memory", "2MiB"),
]
# Steps take 20 ms, so that a signal finds an answer under way; on SIGUSR1 the next one fails.
PROGRAM = """
import signal, sys, time
from pagedjax.cli import main
from pagedjax.engine import Engine
step, broken = Engine.step, []
signal.signal(signal.SIGUSR1, lambda *_: broken.append(1))
def slow(self):
    time.sleep(0.02)
    if broken:
        raise OSError("the device went away")
    return step(self)
Engine.step = slow
sys.exit(main(sys.argv[1:]))
"""


@contextlib.contextmanager
def process(cache: str, *args: str) -> Iterator[tuple[subprocess.Popen[str], Any]]:
    """(the server, a stub), once it is ready."""
    command = ["serve", str(STORIES), "--grpc-port", "0", "--http-port", "None", "--log-format", "json", *SHAPES, *args]
    server = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *command, "--compile-cache", cache],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert server.stderr is not None
    try:
        address, before = None, []
        for line in server.stderr:
            said = json.loads(line)["message"]  # each line is JSON, those of the start, too
            before.append(said)
            if found := re.search(r"ready: .* at (\S+)", said):
                address = found[1]
                break
        assert address is not None, f"it ended with {server.wait()}"
        assert process_age() is None or any("to a first token" in line for line in before)
        with grpc.insecure_channel(address) as channel:
            yield server, InferenceStub(channel)
    finally:
        server.kill()
        server.wait()
        server.stderr.close()


@pytest.mark.skipif(process_age() is None, reason="needs Linux, whose /proc tells when a process began")
def test_the_age_of_a_process() -> None:
    before = time.monotonic()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = time.monotonic()
    try:
        time.sleep(0.1)
        least = time.monotonic() - started
        age = process_age(Path(f"/proc/{child.pid}/stat"))
        assert age is not None and least <= age + 0.02 and age <= time.monotonic() - before + 0.02  # it is known to 10 ms
    finally:
        child.communicate()


def messages(server: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """The lines it still writes, to its end."""
    assert server.stderr is not None
    return [json.loads(line) for line in server.stderr if line.startswith("{")]


def ask(max_tokens: int) -> Any:
    params = pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(prompts=[pb.Prompt(text="Once")], params=params)


def test_sigterm_drains(compile_cache: str) -> None:
    """The answer under way comes to its end, nothing new is taken, and the process ends with 0."""
    with process(compile_cache) as (server, stub):
        trace = "0af7651916cd43dd8448eb211c80319c"
        answers = stub.GenerateStream(ask(100), metadata=(("traceparent", f"00-{trace}-b7ad6b7169203331-01"),))
        next(answers)
        server.send_signal(signal.SIGTERM)
        assert 1 + sum(len(s.token_ids) for m in answers for s in m.samples) >= 100
        assert server.wait(60) == 0
        lines = messages(server)
    assert [line["message"] for line in lines if line["message"] != "request"][-1] == "drained, the server ends"
    (about,) = [line for line in lines if line["message"] == "request"]
    assert (about["finish"], about["generated_tokens"]) == ("length", 100) and about["request_id"] and "prompt" not in about
    assert about["trace_id"] == trace


def test_a_second_sigterm_stops_at_once(compile_cache: str) -> None:
    with process(compile_cache, "--drain-seconds", "1000") as (server, stub):
        answers = stub.GenerateStream(ask(120))
        next(answers)
        server.send_signal(signal.SIGTERM)
        assert server.stderr is not None and "draining: 1 requests" in server.stderr.readline()
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 128 + signal.SIGTERM
        with pytest.raises(grpc.RpcError):
            list(answers)


def test_a_failing_step_ends_the_process_with_the_reason_last(compile_cache: str) -> None:
    with process(compile_cache) as (server, stub):
        answers = stub.GenerateStream(ask(120))
        next(answers)
        server.send_signal(signal.SIGUSR1)
        with pytest.raises(grpc.RpcError) as caught:
            list(answers)
        assert caught.value.code() is grpc.StatusCode.INTERNAL and server.wait(60) == 70
        last = messages(server)[-1]
    assert last["level"] == "critical" and last["message"] == "the engine failed, the server ends: OSError: the device went away"
