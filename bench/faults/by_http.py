"""Requests over HTTP; what comes is noted in an Outcome, and so is an error that was answered."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx

from bench.errors import of_body, of_http
from bench.faults.by_grpc import take
from bench.faults.records import Job, Manner, Outcome

COMPLETIONS = "/v1/completions"


def body_of(jobs: Sequence[Job], **more: Any) -> dict[str, Any]:
    """`jobs` differ in their prompts alone."""
    first = jobs[0]
    prompts = [job.text if job.text is not None else list(job.prompt) for job in jobs]
    body = {"prompt": prompts if len(prompts) > 1 else prompts[0], "max_tokens": first.max_tokens, "n": first.n}
    body |= {"temperature": first.temperature, "ignore_eos": first.ignore_eos, "return_token_ids": True}
    body |= {"logprobs": first.logprobs} if first.logprobs is not None else {}
    body |= {"structured_outputs": {"json": json.loads(first.schema)}} if first.schema is not None else {}
    return body | more


def _headers(manner: Manner) -> dict[str, str]:
    return {} if manner.deadline is None else {"x-request-timeout": f"{manner.deadline:.4f}"}


def _take(outcome: Outcome, n: int, choice: dict[str, Any]) -> None:
    prompt, index = divmod(choice["index"], n)
    take(outcome.sample(prompt, index), choice["token_ids"] or (), choice["text"], choice["finish_reason"])


def _count(outcome: Outcome, usage: dict[str, Any] | None) -> None:
    if usage is not None:
        outcome.counted = usage["completion_tokens"]


async def http_whole(client: httpx.AsyncClient, jobs: Sequence[Job], outcome: Outcome, manner: Manner) -> None:
    response = await client.post(COMPLETIONS, json=body_of(jobs), headers=_headers(manner))
    if response.status_code != 200:
        outcome.error = of_http(response.status_code, response.headers, response.content)
        return
    answer = response.json()
    for choice in answer["choices"]:
        _take(outcome, jobs[0].n, choice)
    _count(outcome, answer["usage"])


async def http_stream(client: httpx.AsyncClient, jobs: Sequence[Job], outcome: Outcome, manner: Manner) -> None:
    body = body_of(jobs, stream=True, stream_options={"include_usage": True})
    async with client.stream("POST", COMPLETIONS, json=body, headers=_headers(manner)) as response:
        if response.status_code != 200:
            outcome.error = of_http(response.status_code, response.headers, await response.aread())
            return
        count, done = 0, False
        async for data in _events(response):
            if done:
                raise httpx.RemoteProtocolError(f"{data[:80]!r} came after [DONE]")
            if data == "[DONE]":
                done = True
                continue
            event = json.loads(data)
            if "error" in event:
                outcome.error = of_body(event["error"], None, {})
                return
            for choice in event["choices"]:
                _take(outcome, jobs[0].n, choice)
            _count(outcome, event.get("usage"))
            count += 1
            if manner.messages is not None and count >= manner.messages:
                outcome.end = "left"
                return
            if count == 1 and manner.pause:
                await asyncio.sleep(manner.pause)
        if not done:
            raise httpx.RemoteProtocolError("the stream ended without [DONE]")


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    """The data of each server-sent event."""
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


async def half_a_request(host: str, port: int, jobs: Sequence[Job], *, sent: float) -> None:
    """Connects, sends a part of a request, and goes away. `sent`: how much of it, as a part of 1."""
    body = json.dumps(body_of(jobs, stream=True)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    whole = head.encode() + body
    _, writer = await asyncio.open_connection(host, port)
    writer.write(whole[: int(sent * len(whole))])
    await writer.drain()
    writer.transport.abort()
