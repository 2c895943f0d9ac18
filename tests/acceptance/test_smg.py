"""Three replicas behind the gateway smg (`pip install smg`), which tokenizes, routes and detokenizes: nobody here wrote it."""

import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from loopback import STORIES, until
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from pagedjax.text import load_tokenizer
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub

SMG = shutil.which("smg") or str(Path(sys.executable).with_name("smg"))
pytestmark = pytest.mark.skipif(not Path(SMG).exists(), reason="needs smg")
ROOT = Path(__file__).parents[2]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}Once{% endif %}"
)
SHAPES = [
    *("--max-model-len", "256", "--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--block-size", "16"),
    *("--decode-rows", "4", "--prefill-tokens", "64", "--kv-memory", "4MiB"),
]
# Steps take 5 ms, so that a request is under way long enough to be left, drained or killed.
SLOW = """
import sys, time
from pagedjax.cli import main
from pagedjax.engine import Engine
step = Engine.step
Engine.step = lambda self: (time.sleep(0.005), step(self))[1]
sys.exit(main(sys.argv[1:]))
"""


@dataclass
class Fleet:
    gateway: int  # port
    folder: Path
    workers: dict[str, subprocess.Popen[str]]  # by address

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.gateway, timeout=120)
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    def chat(self, content: str, **more: Any) -> tuple[int, dict[str, str], Any]:
        messages = [{"role": "user", "content": content}]
        options = {"model": "stories", "max_tokens": 24, "temperature": 0, **more}
        status, headers, data = self.post("/v1/chat/completions", messages=messages, **options)
        return status, headers, data if more.get("stream") else json.loads(data)

    def load(self, address: str) -> Any:
        with grpc.insecure_channel(address) as channel:
            return vllm_engine_pb2_grpc.VllmEngineStub(channel).GetLoads(vllm.GetLoadsRequest()).loads[0]


def started(command: list[str], pattern: str, log: Path) -> tuple[subprocess.Popen[str], str]:
    """(a process, what its log says once it is up)."""
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, text=True)
    found: list[str] = []

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        found.extend(re.findall(pattern, log.read_text()))
        return bool(found)

    until(is_up)
    return process, found[0]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("fleet")
    shutil.copytree(STORIES, folder / "stories")
    settings = json.loads((STORIES / "tokenizer_config.json").read_text())
    (folder / "stories" / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    serve = ["serve", str(folder / "stories"), "--served-model-name", "stories", "--grpc-port", "0", "--http-port", "None", *SHAPES]
    workers: dict[str, subprocess.Popen[str]] = {}
    processes: list[subprocess.Popen[str]] = []
    try:
        for i in range(3):
            command = [sys.executable, "-c", SLOW, *serve, "--compile-cache", compile_cache]
            process, address = started(command, r"ready: .* at (\S+)", folder / f"worker{i}.log")
            processes.append(process)
            workers[address] = process
        ports = [free_port(), free_port()]
        command = [SMG, "launch", "--host", "127.0.0.1", "--port", str(ports[0]), "--prometheus-host", "127.0.0.1"]
        command += ["--prometheus-port", str(ports[1]), "--policy", "cache_aware"]
        command += ["--worker-urls", *(f"grpc://{address}" for address in workers)]
        processes.append(started(command, ".", folder / "smg.log")[0])
        made = Fleet(ports[0], folder, workers)
        until(lambda: registered(made) == 3)
        yield made
    finally:
        for process in processes:
            process.kill()
            process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def registered(fleet: Fleet) -> int:
    """Workers that the gateway finds healthy."""
    connection = http.client.HTTPConnection("127.0.0.1", fleet.gateway, timeout=10)
    try:
        connection.request("GET", "/workers")
        return sum(worker["is_healthy"] for worker in json.loads(connection.getresponse().read())["workers"])
    except OSError:
        return 0
    finally:
        connection.close()


def text_of(data: bytes) -> str:
    """Of a stream of server-sent events."""
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def test_the_gateways_answer_is_the_direct_one(fleet: Fleet) -> None:
    """JSON, events and logprobs through the gateway, and the worker's own answer to the same token ids."""
    content = "Tell me a story"
    tokenizer = load_tokenizer(fleet.folder / "stories")
    ids = tokenizer.encode_chat([{"role": "user", "content": content}])
    with grpc.insecure_channel(next(iter(fleet.workers))) as channel:
        params = pb.SamplingParams(temperature=0, max_tokens=24, logprobs=2)
        asked = pb.GenerateRequest(prompts=[pb.Prompt(tokens=pb.TokenIds(ids=ids))], params=params)
        direct = InferenceStub(channel).Generate(asked).completions[0].samples[0]
    status, _, answer = fleet.chat(content, logprobs=True, top_logprobs=2)
    choice = answer["choices"][0]
    assert status == 200 and choice["message"]["content"].strip() == direct.text.strip() and choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(ids) and answer["usage"]["completion_tokens"] == 24
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert logprobs == pytest.approx([entry.logprob for entry in direct.logprobs], abs=1e-4)
    assert text_of(fleet.chat(content, stream=True)[2]).strip() == direct.text.strip()
    two = fleet.chat(content, n=2, temperature=1.0, seed=3)[2]["choices"]
    assert sorted(choice["index"] for choice in two) == [0, 1]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    assert json.loads(fleet.chat(content, response_format=form)[2]["choices"][0]["message"]["content"]) in ("yes", "no")
    assert fleet.chat(content, model="gpt")[0] == 404


def test_who_shares_a_prefix_meets_it_again(fleet: Fleet) -> None:
    """Of each of several long prefixes at least nine in ten requests go where the first one of them went."""
    homes: Counter[bool] = Counter()
    for story in range(6):
        prefix = f"{story} " + " ".join(f"the {word} {story}" for word in ("dog", "cat", "bird", "fish", "frog", "bear")) * 3
        first = fleet.chat(prefix + " A", max_tokens=2)[1]["x-smg-routed-worker-id"]
        for end in "BCDEFGHIJK":
            homes[fleet.chat(f"{prefix} {end}", max_tokens=2)[1]["x-smg-routed-worker-id"] == first] += 1
    assert homes[True] >= 0.9 * homes.total(), homes


def test_who_disconnects_frees_the_worker(fleet: Fleet) -> None:
    body = {"model": "stories", "messages": [{"role": "user", "content": "Go on"}], "max_tokens": 220, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", fleet.gateway, timeout=60)
    connection.request(
        "POST", "/v1/chat/completions", json.dumps({**body, "ignore_eos": True}), {"content-type": "application/json"}
    )
    answer = connection.getresponse()
    answer.read(300)
    assert sum(fleet.load(address).num_running_reqs for address in fleet.workers) == 1
    answer.close()
    connection.close()
    until(lambda: all(fleet.load(a).num_running_reqs == 0 and fleet.load(a).num_used_tokens == 0 for a in fleet.workers))


def under_load(fleet: Fleet, act: Callable[[], None], requests: int = 40) -> list[int]:
    """The statuses of so many requests, in the middle of which something happens."""
    done = threading.Event()

    def ask(i: int) -> int:
        if i == requests // 3:
            done.set()
        with contextlib.suppress(OSError, http.client.HTTPException):
            return fleet.chat(f"{i} is a number", max_tokens=40, ignore_eos=True)[0]
        return 0

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, i) for i in range(requests)]
        done.wait(60)
        act()
        return [each.result() for each in asked]


def test_a_replica_that_drains_is_not_missed(fleet: Fleet) -> None:
    address, process = list(fleet.workers.items())[2]
    statuses = under_load(fleet, lambda: process.send_signal(signal.SIGTERM))
    assert process.wait(60) == 0 and Counter(statuses) == {200: 40}
    del fleet.workers[address]


def test_a_replica_that_is_killed_takes_only_its_own_requests_along(fleet: Fleet) -> None:
    address, process = list(fleet.workers.items())[1]
    at_most: list[int] = []

    def kill() -> None:
        at_most.append(fleet.load(address).num_total_reqs)
        process.kill()

    statuses = under_load(fleet, kill)
    failed = sum(status != 200 for status in statuses)
    assert failed <= at_most[0] + 1, f"{Counter(statuses)}, {at_most[0]} were open there"
    del fleet.workers[address]
    assert fleet.chat("Still there?")[0] == 200
