"""What lives on the device, as pytrees: a shape comment per field, no logic.

One letter, one meaning: T tokens in a step, S rows in a step, B blocks per row, N blocks in the pool, P tokens per block,
G layer groups, J layers in a group, K kv heads, D' stored head width, V vocabulary (with padding for shards), R lanes,
C longest sequence. The capitals NUM_… are those of limits.py.
"""

from typing import NamedTuple

import jax
from flax import struct


class QuantizedPool(NamedTuple):
    """A pool of 8 bits: what is stored times the scale of its token and head is the value."""

    data: jax.Array  # int8 or float8_e4m3fn[J, N, 2, K, P, D']
    scales: jax.Array  # f32[J, N, 2, K, P]


Pool = jax.Array | QuantizedPool  # the array alone: dtype[J, N, 2, K, P, D']


def split_pool(kv: Pool) -> tuple[jax.Array, jax.Array | None]:
    """(the data, the scales or None)."""
    return (kv.data, kv.scales) if isinstance(kv, QuantizedPool) else (kv, None)


@struct.dataclass
class LaneState:
    """What a lane keeps for the life of the sequence that holds it. `set_lane` writes a whole lane at once; the step reads the
    lanes of its rows. Constants of a request are here and not in StepInput, so that a step sends only what changes."""

    last_tokens: jax.Array  # i32[R]: the newest token, possibly not yet seen by the host
    stopped: jax.Array  # bool[R]: the sequence ended by a stop id or by its length
    history: jax.Array  # i32[R, C]: prompt and output; entries past the current length are undefined
    prompt_len: jax.Array  # i32[R]
    min_len: jax.Array  # i32[R]: stop ids are not sampled while prompt and output together are shorter
    max_len: jax.Array  # i32[R]: the row stops when prompt and output together are this long
    temperature: jax.Array  # f32[R]; 0: greedy
    top_k: jax.Array  # i32[R]; 0: off
    top_p: jax.Array  # f32[R]; 1: off
    min_p: jax.Array  # f32[R]; 0: off
    typical_p: jax.Array  # f32[R]; 1: off
    presence: jax.Array  # f32[R]; 0: off
    frequency: jax.Array  # f32[R]; 0: off
    repetition: jax.Array  # f32[R]; 1: off
    seed: jax.Array  # u32[R, 2]
    sample: jax.Array  # i32[R]: index among the n samples of a request
    stop_ids: jax.Array  # i32[R, NUM_STOP_IDS]; -1: none
    bias_ids: jax.Array  # i32[R, NUM_BIASES]; -1: none
    bias_values: jax.Array  # f32[R, NUM_BIASES]
    bad_words: jax.Array  # i32[R, NUM_BAD_WORDS, BAD_WORD_TOKENS]; right-aligned, -1 before the first token, all -1: none
    masked: jax.Array  # i32[R]: 1 where `mask` limits the tokens
    mask: jax.Array  # u32[R, ceil(V / 32)]: bit t % 32 of word t // 32 is 1 where token t is allowed
    num_logprobs: jax.Array  # i32[R]: best tokens to report; -1: no logprobs at all


@struct.dataclass
class DeviceState:
    """Donated to every step."""

    kv: Pool  # block 0 is the scrap block that padding is written to
    lanes: LaneState


@struct.dataclass
class StepInput:
    """One step's plan as arrays. Rows are sorted, decode rows (one token each) first."""

    tokens: jax.Array  # i32[T]: ignored where from_lane is set
    from_lane: jax.Array  # i32[T]: take the lane's last token; -1: use `tokens`
    positions: jax.Array  # i32[T]
    query_start: jax.Array  # i32[S+1]: row s owns tokens query_start[s]:query_start[s+1]; padding rows are empty
    num_decode: jax.Array  # i32[1]: rows with one token, at the front
    context_lens: jax.Array  # i32[S]: tokens of the row in the cache once this step has written its own; 0: padding row
    block_tables: jax.Array  # i32[G, S, B]; 0: a block that no layer of the group reads or writes in this step
    lanes: jax.Array  # i32[S]; R: a row that has no lane to write to (padding)
    samples: jax.Array  # i32[S]: 1 where the row's last token is the newest of its sequence, so that a token is sampled
    steps: jax.Array  # i32[1]: decode steps to run in this dispatch
    score: jax.Array  # i32[1]: 1 where prompt logprobs are wanted
    targets: jax.Array  # i32[T]: the token whose logprob is wanted at this position (the next one of the prompt); -1: none
    copies: jax.Array  # i32[G * S, 2]: (source, target) blocks to copy before anything is written; (0, 0): none, after the others


@struct.dataclass
class StepOutput:
    """What the host fetches. W: the most decode steps a dispatch can run."""

    tokens: jax.Array  # i32[S, W]; -1: the row sampled none (it had stopped, or is padding)
    logprob: jax.Array  # f32[S, W]: of the sampled token
    rank: jax.Array  # i32[S, W]
    top_ids: jax.Array  # i32[S, W, NUM_LOGPROBS]
    top_logprobs: jax.Array  # f32[S, W, NUM_LOGPROBS]
    prompt_logprob: jax.Array  # f32[T]: of `targets`
    prompt_rank: jax.Array  # i32[T]
    prompt_top_ids: jax.Array  # i32[T, NUM_LOGPROBS]
    prompt_top_logprobs: jax.Array  # f32[T, NUM_LOGPROBS]
