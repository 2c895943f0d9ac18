"""Requests over gRPC, by both services; what comes is noted in an Outcome. An error is raised as grpc.aio has it."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc

from bench.faults.records import Job, Manner, Outcome, Sample
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub

FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_CANCELLED: "abort"}


def take(sample: Sample, tokens: Sequence[int], text: str | None, finish: str | None) -> None:
    """Notes one message about a sample."""
    sample.after_end += sample.finish is not None
    sample.pieces.append(tuple(tokens))
    if text is not None:
        sample.text = (sample.text or "") + text
    sample.finish = finish or sample.finish


# --- pagedjax.v1 ----------------------------------------------------------------------------------------------------


def v1_request(jobs: Sequence[Job]) -> Any:
    """`jobs` differ in their prompts alone."""
    first = jobs[0]
    params = pb.SamplingParams(
        n=first.n, max_tokens=first.max_tokens, temperature=first.temperature, ignore_eos=first.ignore_eos, logprobs=first.logprobs
    )
    form = None if first.schema is None else pb.Constraint(json_schema=first.schema)
    return pb.GenerateRequest(prompts=[_prompt(job) for job in jobs], params=params, constraint=form)


def _prompt(job: Job) -> Any:
    return pb.Prompt(tokens=pb.TokenIds(ids=job.prompt)) if job.text is None else pb.Prompt(text=job.text)


def _take_v1(outcome: Outcome, prompt: int, given: Any) -> None:
    sample = outcome.sample(prompt, given.index)
    take(sample, given.token_ids, given.text, FINISH.get(given.finish_reason))
    if given.finish_reason and given.HasField("usage"):
        sample.counted = given.usage.generated_tokens


async def v1_whole(channel: grpc.aio.Channel, jobs: Sequence[Job], outcome: Outcome, manner: Manner) -> None:
    answer = await InferenceStub(channel).Generate(v1_request(jobs), timeout=manner.deadline)
    for prompt, completion in enumerate(answer.completions):
        for given in completion.samples:
            _take_v1(outcome, prompt, given)


async def v1_stream(channel: grpc.aio.Channel, jobs: Sequence[Job], outcome: Outcome, manner: Manner) -> None:
    call = InferenceStub(channel).GenerateStream(v1_request(jobs), timeout=manner.deadline)

    def note(message: Any) -> None:
        for given in message.samples:
            _take_v1(outcome, message.prompt_index, given)

    await _read(call, note, outcome, manner)


# --- vllm.grpc.engine -----------------------------------------------------------------------------------------------


def vllm_request(job: Job, *, stream: bool, request_id: str = "") -> Any:
    params = vllm.SamplingParams(
        n=job.n, max_tokens=job.max_tokens, temperature=job.temperature, ignore_eos=job.ignore_eos, logprobs=job.logprobs
    )
    if job.schema is not None:
        params.json_schema = job.schema
    source = {"tokenized": vllm.TokenizedInput(input_ids=job.prompt)} if job.text is None else {"text": job.text}
    return vllm.GenerateRequest(request_id=request_id, sampling_params=params, stream=stream, **source)


def _take_vllm(outcome: Outcome, answer: Any, *, streams: bool) -> None:
    if answer.HasField("chunk"):
        take(outcome.sample(0, answer.chunk.index), answer.chunk.token_ids, None, None)
        return
    end = answer.complete
    sample = outcome.sample(0, end.index)
    take(sample, () if streams else end.output_ids, None, end.finish_reason)
    sample.final, sample.counted = tuple(end.output_ids), end.completion_tokens


async def vllm_whole(channel: grpc.aio.Channel, jobs: Sequence[Job], outcome: Outcome, manner: Manner) -> None:
    await _generate(channel, jobs[0], outcome, manner, stream=False)


async def vllm_stream(channel: grpc.aio.Channel, jobs: Sequence[Job], outcome: Outcome, manner: Manner) -> None:
    await _generate(channel, jobs[0], outcome, manner, stream=True)


async def vllm_aborted(channel: grpc.aio.Channel, jobs: Sequence[Job], outcome: Outcome, manner: Manner) -> None:
    """Ended by another call after `manner.leave_after` seconds."""
    name = uuid.uuid4().hex

    async def abort() -> None:
        await asyncio.sleep(manner.leave_after or 0.0)
        await vllm_engine_pb2_grpc.VllmEngineStub(channel).Abort(vllm.AbortRequest(request_ids=[name]))

    aborting = asyncio.create_task(abort())
    try:
        await _generate(channel, jobs[0], outcome, manner, stream=True, request_id=name)
    finally:
        await asyncio.wait([aborting])
    aborting.result()


async def _generate(
    channel: grpc.aio.Channel, job: Job, outcome: Outcome, manner: Manner, *, stream: bool, request_id: str = ""
) -> None:
    request = vllm_request(job, stream=stream, request_id=request_id)
    call = vllm_engine_pb2_grpc.VllmEngineStub(channel).Generate(request, timeout=manner.deadline)
    await _read(call, lambda answer: _take_vllm(outcome, answer, streams=stream), outcome, manner)


async def _read(call: Any, note: Callable[[Any], None], outcome: Outcome, manner: Manner) -> None:
    """All messages of a call, at the reader's pace."""
    count = 0
    async for message in call:
        note(message)
        count += 1
        if manner.messages is not None and count >= manner.messages:
            call.cancel()
            outcome.end = "left"
            return
        if count == 1 and manner.pause:
            await asyncio.sleep(manner.pause)
