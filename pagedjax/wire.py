"""How a step's plan and a lane's contents travel: as one i32 buffer each, cut into fields by one table that both sides read.

One transfer instead of a dozen: on every backend the cost of a small array is its call, not its bytes.
"""

import math
from collections.abc import Mapping
from typing import Any

from pagedjax.buckets import Bucket
from pagedjax.limits import BAD_WORD_TOKENS, NUM_BAD_WORDS, NUM_BIASES, NUM_STOP_IDS

Fields = Mapping[str, tuple[tuple[int, ...], str]]  # name -> (shape, dtype of 4 bytes), in the order of the buffer


def step_fields(bucket: Bucket, groups: int, table_width: int) -> Fields:
    """The fields of StepInput."""
    t, s = bucket.tokens, bucket.rows
    shapes = {
        "tokens": (t,),
        "from_lane": (t,),
        "positions": (t,),
        "query_start": (s + 1,),
        "num_decode": (1,),
        "context_lens": (s,),
        "block_tables": (groups, s, table_width),
        "lanes": (s,),
        "samples": (s,),
        "steps": (1,),
        "score": (1,),
        "targets": (t,),
        "copies": (groups * s, 2),
    }
    return {name: (shape, "int32") for name, shape in shapes.items()}


def lane_fields(max_model_len: int, vocab: int) -> Fields:
    """The fields of one lane of LaneState, but for `stopped` and `last_tokens`, which follow from the others; `length` is the
    number of known tokens. `vocab` counts padding."""
    i, f, u = "int32", "float32", "uint32"
    return {
        "length": ((), i),
        "history": ((max_model_len,), i),
        "prompt_len": ((), i),
        "min_len": ((), i),
        "max_len": ((), i),
        "temperature": ((), f),
        "top_k": ((), i),
        "top_p": ((), f),
        "min_p": ((), f),
        "typical_p": ((), f),
        "presence": ((), f),
        "frequency": ((), f),
        "repetition": ((), f),
        "seed": ((2,), u),
        "sample": ((), i),
        "stop_ids": ((NUM_STOP_IDS,), i),
        "bias_ids": ((NUM_BIASES,), i),
        "bias_values": ((NUM_BIASES,), f),
        "bad_words": ((NUM_BAD_WORDS, BAD_WORD_TOKENS), i),
        "masked": ((), i),
        "mask": ((-(-vocab // 32),), u),
        "num_logprobs": ((), i),
    }


def size(fields: Fields) -> int:
    """Entries of the buffer."""
    return sum(math.prod(shape) for shape, _ in fields.values())


def split(buffer: Any, fields: Fields) -> dict[str, Any]:
    """The buffer's fields: views of a NumPy array, slices of a JAX array."""
    out, at = {}, 0
    for name, (shape, dtype) in fields.items():
        count = math.prod(shape)
        out[name] = buffer[at : at + count].view(dtype).reshape(shape)
        at += count
    return out
