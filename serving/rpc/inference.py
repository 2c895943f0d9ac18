"""pagedjax.v1.Inference: text or token ids in, text and token ids out."""

import contextlib
import math
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc.aio

from pagedjax.host.request import SamplingParams
from serving.call import Call, known_ids
from serving.frontend import Frontend
from serving.gather import Collected, Whole, answer_all, merge, submit_all
from serving.limits import check_batch
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1 import inference_pb2_grpc
from serving.rpc import v1_messages as messages
from serving.rpc.guard import caller, deadline, trace


class Inference(inference_pb2_grpc.InferenceServicer):
    def __init__(self, frontend: Frontend):
        self._frontend = frontend

    async def Generate(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        answers = await answer_all(self._frontend, self._calls(request, context))
        return pb.GenerateResponse(completions=[_completion(answer) for answer in answers])

    async def GenerateStream(self, request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        calls = [replace(call, streams=True) for call in self._calls(request, context)]
        async with submit_all(self._frontend, calls) as replies:
            await context.send_initial_metadata((("x-request-id", replies[0].request_id),))
            begun: set[int] = set()
            async with contextlib.aclosing(merge(replies)) as updates:
                async for index, update in updates:
                    reply, first = replies[index], index not in begun
                    begun.add(index)
                    scored = next((d.prompt_logprobs for d in update if d.prompt_logprobs is not None), None)
                    for delta in update:
                        Collected().add(delta)  # its deadline may have passed
                    yield pb.GenerateStreamResponse(
                        prompt_index=index,
                        request_id=reply.request_id,
                        samples=map(messages.sample, update),
                        prompt_token_ids=reply.request.prompt if first and reply.request else (),
                        prompt_logprobs=messages.logprobs(scored),
                    )

    async def Tokenize(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        check_batch(self._frontend.config.limits, len(request.texts))
        special = not request.without_special
        ids = [await self._frontend.tokenize(text, add_special=special) for text in request.texts]
        return pb.TokenizeResponse(tokens=[pb.TokenIds(ids=each) for each in ids])

    async def Detokenize(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        check_batch(self._frontend.config.limits, len(request.tokens))
        texts = [await self._frontend.detokenize(each.ids, skip_special=request.skip_special) for each in request.tokens]
        return pb.DetokenizeResponse(texts=texts)

    async def Score(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        with self._reading(request, context):
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=request.top_logprobs)
            calls = self._each(request, params, context)
        answers = await answer_all(self._frontend, calls)
        return pb.ScoreResponse(scores=[_score(answer) for answer in answers])

    def _calls(self, request: Any, context: grpc.aio.ServicerContext) -> list[Call]:
        with self._reading(request, context):
            defaults = replace(self._frontend.llm.get_default_sampling_params(), max_tokens=None)
            params = replace(
                messages.sampling_params(request.params, defaults), structured_outputs=messages.structured_outputs(request)
            )
            calls = self._each(request, params, context)
            kept = {"pool": messages.pool(request.pool), "retention": request.retention, "cache_salt": request.cache_salt}
            return [replace(call, **kept) for call in calls]

    def _reading(self, request: Any, context: grpc.aio.ServicerContext) -> contextlib.AbstractContextManager[None]:
        return self._frontend.reading(caller(), known_ids(trace(context), request_id=request.request_id))

    def _each(self, request: Any, params: SamplingParams, context: grpc.aio.ServicerContext) -> list[Call]:
        """One call for each prompt; all of them have the client's deadline."""
        check_batch(self._frontend.config.limits, len(request.prompts))
        first, due, who, where = request.request_id or uuid.uuid4().hex, deadline(context), caller(), trace(context)
        return [
            Call(
                messages.prompt(prompt),
                params,
                who,
                request_id=f"{first}/{i}" if i else first,
                model=request.model,
                deadline=due,
                trace=where,
            )
            for i, prompt in enumerate(request.prompts)
        ]


def _completion(answer: Whole) -> Any:
    scored = next((sample.prompt_logprobs for sample in answer.samples if sample.prompt_logprobs is not None), None)
    return pb.Completion(
        request_id=answer.request_id,
        prompt_token_ids=answer.request.prompt,
        prompt_logprobs=messages.logprobs(scored),
        samples=map(messages.sample, answer.samples),
    )


def _score(answer: Whole) -> Any:
    entries = answer.samples[0].prompt_logprobs or ()
    total = math.fsum(entry.logprob for entry in entries)
    return pb.TextScore(token_ids=answer.request.prompt, logprobs=messages.logprobs(entries), total=total)
