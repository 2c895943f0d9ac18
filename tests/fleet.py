"""Replicas of stories260K behind the gateway smg (`pip install smg`), which tokenizes, routes and detokenizes."""

import contextlib
import http.client
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from http_server import STORIES
from loopback import until
from programs import found, free_port, started
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

SMG = found("smg")
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


@dataclass(frozen=True)
class Replica:
    grpc: str  # address
    http: str  # address
    process: subprocess.Popen[str]

    def load(self) -> Any:
        with grpc.insecure_channel(self.grpc) as channel:
            return vllm_engine_pb2_grpc.VllmEngineStub(channel).GetLoads(vllm.GetLoadsRequest()).loads[0]

    def generated(self) -> int:
        """Tokens, since its start."""
        host, port = self.http.rsplit(":", 1)
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=60)) as connection:
            connection.request("GET", "/metrics")
            page = connection.getresponse().read().decode()
        (line,) = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total{")]
        return int(float(line.split()[-1]))


@dataclass(frozen=True)
class Fleet:
    gateway: str  # address
    folder: Path  # of the model
    replicas: list[Replica]  # those that should answer

    def post(self, path: str, **body: Any) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body)."""
        with self.connection() as connection:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

    @contextlib.contextmanager
    def connection(self) -> Iterator[http.client.HTTPConnection]:
        host, port = self.gateway.rsplit(":", 1)
        with contextlib.closing(http.client.HTTPConnection(host, int(port), timeout=120)) as made:
            yield made

    def chat(self, content: str, **more: Any) -> tuple[int, dict[str, str], Any]:
        messages = [{"role": "user", "content": content}]
        options = {"model": "stories", "max_tokens": 24, "temperature": 0, **more}
        status, headers, data = self.post("/v1/chat/completions", messages=messages, **options)
        return status, headers, json.loads(data)

    def healthy(self) -> int:
        """Replicas that the gateway finds healthy."""
        try:
            with self.connection() as connection:
                connection.request("GET", "/workers")
                return sum(worker["is_healthy"] for worker in json.loads(connection.getresponse().read())["workers"])
        except OSError:
            return 0  # it does not listen yet


@contextlib.contextmanager
def fleet(folder: Path, compile_cache: str, count: int) -> Iterator[Fleet]:
    """So many replicas and a gateway that has found them."""
    model = folder / "stories"
    shutil.copytree(STORIES, model)
    settings = json.loads((STORIES / "tokenizer_config.json").read_text())
    (model / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    serve = ["serve", str(model), "--served-model-name", "stories", "--grpc-port", "0", "--http-port", "0", *SHAPES]
    replicas: list[Replica] = []
    processes: list[subprocess.Popen[str]] = []
    try:
        for i in range(count):
            command = [sys.executable, "-c", SLOW, *serve, "--compile-cache", compile_cache]
            process, said = started(command, r"ready: .* at (\S+), (\S+)", folder / f"replica{i}.log")
            processes.append(process)
            replicas.append(Replica(said[1], said[2], process))
        port = free_port()
        command = [SMG, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-host", "127.0.0.1"]
        command += ["--prometheus-port", str(free_port()), "--policy", "cache_aware"]
        command += ["--worker-urls", *(f"grpc://{replica.grpc}" for replica in replicas)]
        processes.append(started(command, ".", folder / "smg.log")[0])
        made = Fleet(f"127.0.0.1:{port}", model, replicas)
        until(lambda: made.healthy() == count)
        yield made
    finally:
        for process in processes:
            process.kill()
            process.wait()
