"""Plan -> the buffers a step and a lane are fed with. The only writer of padding."""

import numpy as np

from pagedjax.buckets import Bucket
from pagedjax.host.plan import Copy, Entry, Plan
from pagedjax.limits import BAD_WORD_TOKENS
from pagedjax.wire import Fields, size, split


def pack(plan: Plan, bucket: Bucket, fields: Fields, num_lanes: int) -> np.ndarray:
    """i32 buffer of StepInput for the bucket. Padding rows have length 0 and lane R; padding tokens belong to no row; padding
    copies are of the scrap block to itself."""
    buffer = np.zeros(size(fields), np.int32)
    f = split(buffer, fields)
    f["from_lane"][:] = -1
    f["targets"][:] = -1
    f["lanes"][:] = num_lanes
    f["steps"][0] = plan.steps
    at = 0
    for s, row in enumerate(plan.rows):
        end = at + row.count
        if row.tokens is None:
            f["from_lane"][at] = row.lane
        else:
            f["tokens"][at:end] = row.tokens
        f["positions"][at:end] = np.arange(row.start, row.start + row.count)
        f["query_start"][s] = at
        f["context_lens"][s] = row.start + row.count
        f["block_tables"][:, s] = row.table
        f["lanes"][s] = row.lane
        f["samples"][s] = row.steps > 0
        if row.targets is not None:
            f["targets"][at : at + len(row.targets)] = row.targets
            f["score"][0] = 1
        at = end
    f["query_start"][len(plan.rows) :] = at
    f["num_decode"][0] = plan.num_decode
    if plan.copies:
        _fill_copies(f["copies"], plan.copies)
    return buffer


def pack_lane(entry: Entry, fields: Fields) -> np.ndarray:
    """i32 buffer of one lane."""
    buffer = np.zeros(size(fields), np.int32)
    f = split(buffer, fields)
    request, params = entry.request, entry.request.params
    prompt_len = len(request.prompt)
    f["length"][...] = len(entry.tokens)
    f["history"][: len(entry.tokens)] = entry.tokens
    f["prompt_len"][...] = prompt_len
    f["min_len"][...] = prompt_len + params.min_tokens
    f["max_len"][...] = entry.max_len
    f["temperature"][...] = params.temperature
    f["top_k"][...] = params.top_k
    f["top_p"][...] = params.top_p
    f["min_p"][...] = params.min_p
    f["typical_p"][...] = params.typical_p
    f["presence"][...] = params.presence_penalty
    f["frequency"][...] = params.frequency_penalty
    f["repetition"][...] = params.repetition_penalty
    f["seed"][:] = request.seed >> 32, request.seed & 0xFFFFFFFF
    f["sample"][...] = entry.index
    _fill(f["stop_ids"], () if params.beam_width else request.stop_ids)  # beams end on the host
    _fill(f["bias_ids"], tuple(params.logit_bias))
    f["bias_values"][: len(params.logit_bias)] = tuple(params.logit_bias.values())
    f["bad_words"][:] = -1
    for i, word in enumerate(request.bad_words):
        f["bad_words"][i, BAD_WORD_TOKENS - len(word) :] = word
    if params.allowed_token_ids is not None:
        f["masked"][...] = 1
        ids = np.asarray(params.allowed_token_ids, np.uint32)
        np.bitwise_or.at(f["mask"], ids // 32, np.uint32(1) << (ids % np.uint32(32)))
    if entry.mask is not None:
        f["masked"][...] = 1
        f["mask"][:] = pack_mask(entry.mask, len(f["mask"]))
    f["num_logprobs"][...] = -1 if params.logprobs_needed is None else params.logprobs_needed
    return buffer


def pack_mask(mask: np.ndarray, words: int) -> np.ndarray:
    """u32[words]: the mask with zeros behind it; what it says of ids that the model has not is cut off."""
    out = np.zeros(words, np.uint32)
    out[: len(mask)] = mask[:words]
    return out


def _fill_copies(target: np.ndarray, copies: tuple[Copy, ...]) -> None:
    assert len(copies) <= len(target), f"{len(copies)} copies in a bucket with room for {len(target)}"
    target[: len(copies)] = copies


def _fill(target: np.ndarray, values: tuple[int, ...]) -> None:
    target[:] = -1
    target[: len(values)] = values
