"""Replicas behind the gateway smg, asked by OpenAI's own clients for Python and JavaScript: nobody here wrote these."""

import contextlib
import http.client
import json
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fleet as fleets
import grpc
import openai
import pytest
from fleet import Fleet, Replica
from loopback import until

from pagedjax.text import load_tokenizer
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub

NPM = Path(__file__).with_name("openai_npm")
pytestmark = pytest.mark.skipif(not fleets.SMG, reason="needs smg, which `make acceptance` installs")
CONTENT = "Tell me a story"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[Fleet]:
    """Three of them: one is drained, one is killed, the last one is left."""
    with fleets.fleet(tmp_path_factory.mktemp("fleet"), compile_cache, 3) as made:
        yield made


@dataclass(frozen=True)
class Answer:
    text: str
    finish: str
    tokens: tuple[int, int]  # of the prompt, generated
    logprobs: list[float]
    best: list[list[float]]  # of the two best tokens at each position


@pytest.fixture(scope="module")
def direct(fleet: Fleet) -> Answer:
    """A replica's own answer to the token ids of the chat."""
    ids = load_tokenizer(fleet.folder).encode_chat([{"role": "user", "content": CONTENT}])
    params = pb.SamplingParams(temperature=0, max_tokens=24, logprobs=2)
    with grpc.insecure_channel(fleet.replicas[0].grpc) as channel:
        asked = pb.GenerateRequest(prompts=[pb.Prompt(tokens=pb.TokenIds(ids=ids))], params=params)
        (sample,) = InferenceStub(channel).Generate(asked).completions[0].samples
    assert sample.finish_reason == pb.FINISH_REASON_LENGTH
    best = [[top.logprob for top in entry.top] for entry in sample.logprobs]
    return Answer(sample.text, "length", (len(ids), 24), [entry.logprob for entry in sample.logprobs], best)


def answer(choices: list[dict[str, Any]], usage: dict[str, Any], part: str) -> Answer:
    """Of one message, or of its pieces; `part` is where a choice has it."""
    entries = [entry for c in choices for entry in (c.get("logprobs") or {}).get("content") or []]
    best = [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries]
    (finish,) = [c["finish_reason"] for c in choices if c.get("finish_reason")]
    text = "".join(c[part].get("content") or "" for c in choices)
    return Answer(text, finish, (usage["prompt_tokens"], usage["completion_tokens"]), [e["logprob"] for e in entries], best)


def by_python(url: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """(the whole answer, the chunks of a streamed one)"""
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(**body)
        chunks = list(client.chat.completions.create(**body, stream=True, stream_options={"include_usage": True}))
    return whole.model_dump(), [chunk.model_dump() for chunk in chunks]


def by_npm(url: str, body: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The same."""
    if shutil.which("node") is None or not (NPM / "node_modules" / "openai").is_dir():
        pytest.skip("needs node, and what `make acceptance` installs for it")
    command = ["node", str(NPM / "chat.js"), url, json.dumps(body)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    return made["whole"], made["chunks"]


@pytest.mark.parametrize("client", [by_python, by_npm])
@pytest.mark.parametrize("through", ["gateway", "replica"])
def test_clients_read_the_direct_answer(
    fleet: Fleet, direct: Answer, through: str, client: Callable[[str, dict[str, Any]], tuple[Any, list[Any]]]
) -> None:
    """JSON, events, usage and logprobs."""
    body = {"model": "stories", "messages": [{"role": "user", "content": CONTENT}], "max_tokens": 24, "temperature": 0}
    address = fleet.gateway if through == "gateway" else fleet.replicas[1].http
    whole, chunks = client(f"http://{address}/v1", {**body, "logprobs": True, "top_logprobs": 2})
    *pieces, last = chunks
    assert last["choices"] == [] and len(pieces) > 10
    joined = answer([choice for piece in pieces for choice in piece["choices"]], last["usage"], "delta")
    for got in (answer(whole["choices"], whole["usage"], "message"), joined):
        # smg decodes an answer on its own, without the space before its first word
        assert got.text == (direct.text.lstrip(" ") if through == "gateway" else direct.text)
        assert (got.finish, got.tokens) == (direct.finish, direct.tokens)
        assert got.logprobs == pytest.approx(direct.logprobs, abs=1e-4)
        assert got.best == [pytest.approx(tops, abs=1e-4) for tops in direct.best]


def test_what_else_the_gateway_passes_on(fleet: Fleet) -> None:
    """Samples, forms, and a model that is not there."""
    two = fleet.chat(CONTENT, n=2, temperature=1.0, seed=3)[2]["choices"]
    assert sorted(choice["index"] for choice in two) == [0, 1]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}
    assert json.loads(fleet.chat(CONTENT, response_format=form)[2]["choices"][0]["message"]["content"]) in ("yes", "no")
    assert fleet.chat(CONTENT, model="gpt")[0] == 404


def test_who_shares_a_prefix_meets_it_again(fleet: Fleet) -> None:
    """Of each of several long prefixes at least nine in ten requests go where the first one of them went; not all prefixes go to
    the same replica."""
    stays: Counter[bool] = Counter()
    homes: set[str] = set()
    for story in range(6):
        prefix = f"{story} " + " ".join(f"the {word} {story}" for word in ("dog", "cat", "bird", "fish", "frog", "bear")) * 3
        first = fleet.chat(prefix + " A", max_tokens=2)[1]["x-smg-routed-worker-id"]
        homes.add(first)
        for end in "BCDEFGHIJK":
            stays[fleet.chat(f"{prefix} {end}", max_tokens=2)[1]["x-smg-routed-worker-id"] == first] += 1
    assert stays[True] >= 0.9 * stays.total(), stays
    assert len(homes) > 1


def test_who_disconnects_frees_the_worker(fleet: Fleet) -> None:
    """Of 220 tokens few are made, and no block stays."""
    before = sum(replica.generated() for replica in fleet.replicas)
    body = {"model": "stories", "messages": [{"role": "user", "content": "Go on"}], "max_tokens": 220, "stream": True}
    with fleet.connection() as connection:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps({**body, "ignore_eos": True}), {"content-type": "application/json"}
        )
        stream = connection.getresponse()
        stream.read(300)
        assert sum(replica.load().num_running_reqs for replica in fleet.replicas) == 1
        stream.close()
    loads = lambda: [replica.load() for replica in fleet.replicas]
    until(lambda: all(load.num_running_reqs == 0 and load.num_used_tokens == 0 for load in loads()))
    assert 0 < sum(replica.generated() for replica in fleet.replicas) - before < 220


def under_load(fleet: Fleet, act: Callable[[], None], requests: int = 40) -> list[int]:
    """The statuses of so many requests, in the middle of which something happens."""
    begun = threading.Event()

    def ask(i: int) -> int:
        if i == requests // 3:
            begun.set()
        with contextlib.suppress(OSError, http.client.HTTPException):
            return fleet.chat(f"{i} is a number", max_tokens=40, ignore_eos=True)[0]
        return 0

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, i) for i in range(requests)]
        begun.wait(60)
        act()
        return [each.result() for each in asked]


def busiest(fleet: Fleet) -> tuple[Replica, int]:
    """The replica with the most open requests, once there are any, and how many."""
    found: list[tuple[Replica, int]] = []

    def is_busy() -> bool:
        loads = [(replica, replica.load().num_total_reqs) for replica in fleet.replicas]
        found.append(max(loads, key=lambda load: load[1]))
        return found[-1][1] > 0

    until(is_busy)
    return found[-1]


def test_a_replica_that_drains_is_not_missed(fleet: Fleet) -> None:
    drained: list[Replica] = []

    def drain() -> None:
        drained.append(busiest(fleet)[0])
        drained[0].process.send_signal(signal.SIGTERM)

    statuses = under_load(fleet, drain)
    assert drained[0].process.wait(60) == 0 and Counter(statuses) == {200: 40}
    fleet.replicas.remove(drained[0])


def test_a_replica_that_is_killed_takes_only_its_own_requests_along(fleet: Fleet) -> None:
    killed: list[tuple[Replica, int]] = []

    def kill() -> None:
        killed.append(busiest(fleet))
        killed[0][0].process.kill()

    statuses = under_load(fleet, kill)
    ((replica, open_there),) = killed
    failed = sum(status != 200 for status in statuses)
    assert failed <= open_there + 1, f"{Counter(statuses)}, {open_there} were open there"
    fleet.replicas.remove(replica)
    assert fleet.chat("Still there?")[0] == 200
