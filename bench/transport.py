"""What gRPC costs, as one JSON line: python -m bench.transport MODEL [--streams 64] [--tokens 32] [--rounds 3]

The same requests again and again, all at once: read in the engine's own process, and through GenerateStream on loopback by a
client in a process of its own, which shares the machine's cores. The two take turns, so that what else the machine does meets both.
Figures are medians over the rounds, after one of each that is not counted, of the mean time between the tokens of a stream, in ms.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from pagedjax import LLM, SamplingParams
from serving.auth import Keys
from serving.config import ServeConfig
from serving.frontend import Frontend
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub
from serving.rpc.listen import open_grpc

PROMPT = 8  # tokens


def prompts(streams: int) -> list[list[int]]:
    return [[100 + (i * PROMPT + j) % 200 for j in range(PROMPT)] for i in range(streams)]


async def gaps(streams: int, open_one: Callable[[list[int]], Awaitable[AsyncIterator[int]]]) -> float:
    """Mean ms between two tokens, over all streams, which begin together. An iterator gives the number of tokens that came."""

    async def one(prompt: list[int]) -> float:
        times, tokens = [], 0
        async for count in await open_one(prompt):
            times.append(time.perf_counter())
            tokens += count
        return (times[-1] - times[0]) / (tokens - 1)

    return 1e3 * statistics.mean(await asyncio.gather(*map(one, prompts(streams))))


async def direct(llm: LLM, streams: int, tokens: int) -> float:
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)

    async def open_one(prompt: list[int]) -> AsyncIterator[int]:
        stream = await llm.stream_async(prompt, params)
        return (len(delta.tokens) async for delta in stream)

    return await gaps(streams, open_one)


async def client(address: str, streams: int, tokens: int) -> None:
    """Runs a round for each line of stdin, and prints its figure."""
    params = pb.SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = InferenceStub(channel)

        async def open_one(prompt: list[int]) -> AsyncIterator[int]:
            answers: Any = stub.GenerateStream(
                pb.GenerateRequest(prompts=[pb.Prompt(tokens=pb.TokenIds(ids=prompt))], params=params)
            )
            return (len(message.samples[0].token_ids) async for message in answers)

        while await asyncio.to_thread(sys.stdin.readline):
            print(await gaps(streams, open_one), flush=True)


async def measure(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    frontend = Frontend(ServeConfig(grpc_port=0, http_port=None), args.model)
    listener = await open_grpc(frontend, Keys())
    await frontend.start(llm)
    command = [sys.executable, "-m", "bench.transport", "--client", listener.address]
    command += ["--streams", str(args.streams), "--tokens", str(args.tokens)]
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    figures: dict[str, list[float]] = {"direct": [], "grpc": []}
    for _ in range(1 + args.rounds):
        figures["direct"].append(await direct(llm, args.streams, args.tokens))
        process.stdin.write(b"\n")
        figures["grpc"].append(float(await process.stdout.readline()))
    process.stdin.close()
    await process.wait()
    await listener.stop(0)
    frontend.close()
    kept = {name: values[1:] for name, values in figures.items()}
    medians = {name: statistics.median(values) for name, values in kept.items()}
    added = medians["grpc"] / medians["direct"] - 1
    rounded = {name: [round(value, 2) for value in values] for name, values in kept.items()}
    return {
        "model": args.model,
        "streams": args.streams,
        "tokens": args.tokens,
        **{f"{k}_ms": round(v, 2) for k, v in medians.items()},
        "added_percent": round(100 * added, 1),
        "rounds_ms": rounded,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--client", default="", help="address of a server; used by the program itself")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.client:
        asyncio.run(client(args.client, args.streams, args.tokens))
        return
    options: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": args.streams, "max_num_batched_tokens": 4 * args.streams}
    options |= {"buckets.decode_rows": (args.streams,), "buckets.prefill_tokens": (4 * args.streams,)}
    with LLM(args.model, **options) as llm:
        print(json.dumps(asyncio.run(measure(llm, args))))


if __name__ == "__main__":
    main()
