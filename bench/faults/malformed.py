"""Requests that must be refused: what is no JSON and no protobuf, fields that there are not, and values beyond all bounds."""

import json
import random
from collections.abc import Callable
from typing import Any

import grpc.aio
import httpx
from smg_grpc_proto import vllm_engine_pb2 as vllm

from bench.errors import of_http
from bench.faults.by_http import COMPLETIONS
from bench.faults.records import Outcome
from serving.proto.pagedjax.v1 import inference_pb2 as pb

JSON = "application/json"
V1, VLLM = "/pagedjax.v1.Inference/", "/vllm.grpc.engine.VllmEngine/"

# Fields beside the prompt that no request may have.
FIELDS: tuple[dict[str, Any], ...] = (
    {"tempature": 1},
    {"temperature": -1},
    {"temperature": 1e300},
    {"temperature": "hot"},
    {"temperature": float("nan")},
    {"max_tokens": 0},
    {"max_tokens": 10**40},
    {"max_tokens": "16"},
    {"min_tokens": 10**12},
    {"n": 10**6},
    {"n": True},
    {"top_p": 7},
    {"top_k": 2**40},
    {"logprobs": 10**9},
    {"seed": -1},
    {"stop": ["x"] * 1000},
    {"stop": ""},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"1": 10**400}},
    {"cache_salt": "\ud800"},
    {"structured_outputs": {"regex": "("}},
    {"structured_outputs": {"json": {"type": "nothing"}, "regex": "a"}},
    {"stream_options": {"include_usage": True}},
    {"suffix": "x"},
    {"messages": [{"role": "user", "content": "x"}]},
)
BODIES = (b"", b"{", b"null", b"[]", b'{"prompt": "a"', b"\xff\xfe\x00", b"[" * 50_000, b'{"prompt": ["a", 1]}', b'{"prompt": []}')
PATHS = (COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")


async def by_http(client: httpx.AsyncClient, outcome: Outcome, rng: random.Random) -> None:
    """One of them, answered by an error, or the outcome has none."""
    kind = JSON
    match rng.randrange(6):
        case 0:
            path, content = rng.choice(PATHS), rng.choice(BODIES)
        case 1:
            path, content, kind = COMPLETIONS, b'{"prompt": "a"}', rng.choice(("text/plain", "", "application/xml"))
        case 2:
            path, content = rng.choice(("/v2/completions", "/v1/models/none")), b"{}"
        case 3:
            path, content = COMPLETIONS, json.dumps({"prompt": [2**31 - 1, -1, 10**30][: rng.randint(1, 3)], "echo": True}).encode()
        case _:
            path, content = COMPLETIONS, json.dumps({"prompt": "a", **rng.choice(FIELDS)}).encode()
    response = await client.post(path, content=content, headers={"content-type": kind})
    if response.status_code != 200:
        outcome.error = of_http(response.status_code, response.headers, response.content)


def _v1(**params: Any) -> bytes:
    return pb.GenerateRequest(prompts=[pb.Prompt(text="a")], params=pb.SamplingParams(**params)).SerializeToString()


def _vllm(**params: Any) -> bytes:
    return vllm.GenerateRequest(text="a", sampling_params=vllm.SamplingParams(**params)).SerializeToString()


MOST = 2**32 - 1
MESSAGES: tuple[Callable[[random.Random], tuple[str, bytes]], ...] = (
    lambda rng: (V1 + "Generate", bytes([0xFF]) + rng.randbytes(rng.randint(1, 200))),  # an unknown wire type
    lambda rng: (V1 + "GenerateStream", _v1(max_tokens=4)[:-1]),  # cut off
    lambda rng: (VLLM + "Generate", _vllm(max_tokens=4)[:-1]),
    lambda rng: (VLLM + "Generate", b"\x0a\x02\xff\xfe"),  # a string that is no UTF-8
    lambda rng: (V1 + "Nothing", b""),
    lambda rng: ("/no.such.Service/Method", b""),
    lambda rng: (V1 + "Generate", b""),
    lambda rng: (VLLM + "Generate", b""),
    lambda rng: (V1 + "Generate", _v1(temperature=rng.choice((-1.0, float("nan"), float("inf"), 1e300)))),
    lambda rng: (
        V1 + "GenerateStream",
        _v1(**{rng.choice(("n", "max_tokens", "min_tokens", "top_k", "logprobs", "best_of")): MOST}),
    ),
    lambda rng: (V1 + "Generate", _v1(stop_token_ids=[MOST])),
    lambda rng: (V1 + "Generate", _v1(logit_bias={MOST: 1.0})),
    lambda rng: (V1 + "Score", pb.ScoreRequest(prompts=[pb.Prompt(text="a")], top_logprobs=MOST).SerializeToString()),
    lambda rng: (V1 + "Tokenize", b""),
    lambda rng: (V1 + "Generate", pb.GenerateRequest(prompts=[pb.Prompt()] * rng.randint(1, 200)).SerializeToString()),
    lambda rng: (V1 + "Generate", pb.GenerateRequest(prompts=[pb.Prompt(text="a")], retention=99).SerializeToString()),
    lambda rng: (V1 + "Generate", pb.GenerateRequest(prompts=[pb.Prompt(text="a")], model="\U0001f600" * 3000).SerializeToString()),
    lambda rng: (VLLM + "Generate", _vllm(**{rng.choice(("n", "max_tokens", "min_tokens", "top_k")): MOST})),
    lambda rng: (VLLM + "Generate", _vllm(logprobs=rng.choice((-7, 2**31 - 1)))),
    lambda rng: (VLLM + "Generate", _vllm(json_schema="{")),
    lambda rng: (VLLM + "Generate", _vllm(top_p=rng.choice((-1.0, 2.0, float("nan"))))),
    lambda rng: (VLLM + "Embed", b""),
)


async def by_grpc(channel: grpc.aio.Channel, outcome: Outcome, rng: random.Random) -> None:
    """One of them; the error is raised, as grpc.aio has it."""
    method, message = rng.choice(MESSAGES)(rng)
    outcome.way = f"grpc {method.rpartition('/')[2]}"
    if method in (V1 + "GenerateStream", VLLM + "Generate"):
        async for _ in channel.unary_stream(method)(message):
            pass
    else:
        await channel.unary_unary(method)(message)
