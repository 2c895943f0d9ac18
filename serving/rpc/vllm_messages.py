"""Messages of vllm.grpc.engine: requests to SamplingParams, deltas to chunks. Replies are token ids; there is no text in them."""

from collections.abc import Sequence
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb

from pagedjax.errors import check
from pagedjax.host.constraint import StructuredOutputsParams
from pagedjax.host.request import Logprobs, SamplingParams, Usage
from pagedjax.stream import Delta
from serving.errors import Refusal

FINISH = {"stop": "stop", "length": "length", "cancelled": "abort"}  # the others are statuses
ELSEWHERE = {  # fields of GenerateRequest that stand for what this engine does not do
    "kv_transfer_params": "prefill and decode on different workers",
    "mm_inputs": "images and video",
    "extra_mm_inputs": "images and video",
    "kv_transfer_params_json": "prefill and decode on different workers",
    "media_refs": "images and video",
}


def sampling_params(given: Any) -> SamplingParams:
    """Of a vllm.grpc.engine.SamplingParams, in which 0 often means that nothing was said. `spaces_between_special_tokens` is of
    detokenizing, which the client does. UserError for a value out of its range."""
    return SamplingParams(
        n=given.n or 1,
        max_tokens=given.max_tokens if given.HasField("max_tokens") else None,
        min_tokens=given.min_tokens,
        temperature=given.temperature if given.HasField("temperature") else 1.0,
        top_k=given.top_k,
        top_p=given.top_p or 1.0,
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty or 1.0,
        seed=given.seed % 2**64 if given.HasField("seed") else None,
        logit_bias=dict(given.logit_bias),
        stop=tuple(given.stop),
        stop_token_ids=tuple(given.stop_token_ids),
        include_stop_str_in_output=given.include_stop_str_in_output,
        ignore_eos=given.ignore_eos,
        logprobs=given.logprobs if given.HasField("logprobs") else None,
        prompt_logprobs=given.prompt_logprobs if given.HasField("prompt_logprobs") else None,
        skip_special_tokens=given.skip_special_tokens,
        structured_outputs=structured_outputs(given),
    )


def structured_outputs(given: Any) -> StructuredOutputsParams | None:
    """The form that is asked for. It holds from the first token on, as `grammar_from_first_token` asks: nothing here looks for the
    end of a model's reasoning."""
    kind = given.WhichOneof("constraint")
    match kind:
        case "json_schema":
            return StructuredOutputsParams(json=given.json_schema)
        case "regex" | "grammar" | "structural_tag":
            return StructuredOutputsParams(**{kind: getattr(given, kind)})
        case "choice":
            return StructuredOutputsParams(choice=tuple(given.choice.choices))
        case "json_object":
            return StructuredOutputsParams(json_object=True) if given.json_object else None
    return None


def check_supported(request: Any) -> None:
    """Refusal for what a GenerateRequest may ask of other engines only."""
    asked = {field.name for field, _ in request.ListFields()}
    for name in sorted(asked & ELSEWHERE.keys()):
        raise Refusal("unsupported", f"{name} is not supported: {ELSEWHERE[name]}", param=name)
    rank = request.data_parallel_rank
    check(rank in (0, -1), f"data_parallel_rank must be 0, since there is one replica here; got {rank}")


def prompt(request: Any, truncated: int | None) -> str | list[int]:
    """The text or the token ids of a request. `truncated`: ids are cut to so many, from the left."""
    kind = request.WhichOneof("input")
    check(kind is not None, "a request must hold tokenized or text; got neither")
    if kind == "text":
        check(truncated is None, "truncate_prompt_tokens must go with tokenized input; got it with text")
        return request.text
    ids = list(request.tokenized.input_ids)
    return ids if truncated is None else ids[-truncated:]


def truncation(given: Any, context: int) -> int | None:
    """How many tokens of the prompt are wanted; -1 in the message: as many as the context takes."""
    if not given.HasField("truncate_prompt_tokens"):
        return None
    count = given.truncate_prompt_tokens
    check(count == -1 or count > 0, f"truncate_prompt_tokens must be positive, or -1 for the model's context; got {count}")
    return context - 1 if count == -1 else count


def output_logprobs(entries: Sequence[Logprobs] | None) -> Any:
    """None where none were asked for."""
    if entries is None:
        return None
    return pb.OutputLogProbs(
        token_logprobs=[e.logprob for e in entries],
        token_ids=[e.token for e in entries],
        top_logprobs=[_top(e) for e in entries],
    )


def input_logprobs(ids: Sequence[int], entries: Sequence[Logprobs] | None) -> Any:
    """Of the whole prompt; its first token has no logprob."""
    if entries is None:
        return None
    return pb.InputLogProbs(
        token_logprobs=[pb.InputTokenLogProb(), *(pb.InputTokenLogProb(value=e.logprob) for e in entries)],
        token_ids=ids,
        top_logprobs=[pb.TopLogProbs(), *map(_top, entries)],
    )


def _top(entry: Logprobs) -> Any:
    return pb.TopLogProbs(values=[value for _, value in entry.top], token_ids=[token for token, _ in entry.top])


def chunk(delta: Delta, ids: Sequence[int], cached: int) -> Any:
    """What one step gave one sequence; counts are of this chunk."""
    return pb.GenerateResponse(
        chunk=pb.GenerateStreamChunk(
            token_ids=delta.tokens,
            prompt_tokens=len(ids),
            completion_tokens=len(delta.tokens),
            cached_tokens=cached,
            output_logprobs=output_logprobs(delta.logprobs),
            input_logprobs=input_logprobs(ids, delta.prompt_logprobs),
            index=delta.index,
        )
    )


def complete(delta: Delta, ids: Sequence[int], stop_token_ids: Sequence[int]) -> Any:
    """The end of a sequence, of which `delta` is all of the output. What matched is said of the client's own stops only: the end
    of the model's own text is no match."""
    usage = delta.usage or Usage()
    matched: dict[str, Any] = {}
    if isinstance(delta.stop, str):
        matched = {"matched_stop_str": delta.stop}
    elif delta.stop is not None and delta.stop in stop_token_ids:
        matched = {"matched_token_id": delta.stop}
    return pb.GenerateResponse(
        complete=pb.GenerateComplete(
            output_ids=delta.tokens,
            finish_reason=FINISH[delta.finish or "cancelled"],
            prompt_tokens=len(ids),
            completion_tokens=len(delta.tokens),
            cached_tokens=usage.cached,
            output_logprobs=output_logprobs(delta.logprobs),
            input_logprobs=input_logprobs(ids, delta.prompt_logprobs),
            index=delta.index,
            **matched,
        )
    )
