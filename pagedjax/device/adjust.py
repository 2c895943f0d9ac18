"""What a request does to its logits before a token is drawn: tokens it forbids, biases, penalties.

Every function takes logits f32[S, V] and the rows' LaneState, works on all rows at once, and leaves a row without the setting
bit for bit as it was. `length` i32[S] is the number of known tokens, prompt and output: history[s, :length[s]].
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pagedjax.state import LaneState


def _spread(values: jax.Array, ids: jax.Array, width: int) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """(indices for .at[], values) that put values [S, n] at tokens ids i32[S, n]; ids below 0 go out of range and are dropped."""
    row = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 0)
    return (row, jnp.where(ids < 0, width, ids)), values


def allow_only(logits: jax.Array, rows: LaneState) -> jax.Array:
    """-inf where the row's bit mask has no 1."""
    words = rows.mask
    bits = (words[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(words.shape[0], -1)[:, : logits.shape[1]].astype(bool)
    allowed = jnp.pad(allowed, ((0, 0), (0, logits.shape[1] - allowed.shape[1])))
    return jnp.where(allowed | (rows.masked == 0)[:, None], logits, -jnp.inf)


def ban(logits: jax.Array, rows: LaneState, length: jax.Array) -> jax.Array:
    """-inf for the last token of each bad word whose other tokens end the history, prompt included, and for the stop ids of rows
    that are shorter than min_len."""
    words = rows.bad_words  # [S, words, tokens], right-aligned
    back = words.shape[2] - 1
    at = length[:, None] - back + jnp.arange(back)
    tail = jnp.where(at < 0, -2, jnp.take_along_axis(rows.history, jnp.maximum(at, 0), axis=1))  # -2 equals no token
    completed = jnp.all((words[:, :, :-1] < 0) | (words[:, :, :-1] == tail[:, None]), axis=-1)
    last = jnp.where(completed, words[:, :, -1], -1)
    stops = jnp.where((length < rows.min_len)[:, None], rows.stop_ids, -1)
    ids = jnp.concatenate([last, stops], axis=1)
    where, value = _spread(jnp.full(ids.shape, -jnp.inf), ids, logits.shape[1])
    return logits.at[where].set(value, mode="drop")


def add_bias(logits: jax.Array, rows: LaneState) -> jax.Array:
    """Adds each (finite) bias to its token; a forbidden token stays forbidden."""
    where, value = _spread(rows.bias_values, rows.bias_ids, logits.shape[1])
    return logits.at[where].add(value, mode="drop")


def penalize(logits: jax.Array, rows: LaneState, length: jax.Array) -> jax.Array:
    """Repetition, then presence and frequency.

    Repetition divides positive logits of tokens seen in prompt or output by the penalty, multiplies the others (Keskar et al.
    2019, arXiv 1909.05858, as in vLLM and Transformers). The others subtract frequency * count + presence * (count > 0), counted
    in the output only (OpenAI's definition).
    """
    width = logits.shape[1]
    at = jnp.arange(rows.history.shape[1])
    of_output = jnp.where(at >= rows.prompt_len[:, None], width, 0)  # counts of the output stand behind those of the prompt
    ids = jnp.where(at < length[:, None], rows.history + of_output, -1)
    where, ones = _spread(jnp.ones_like(ids), ids, 2 * width)
    counts = jnp.zeros((ids.shape[0], 2 * width), jnp.int32).at[where].add(ones, mode="drop")
    seen, count = counts[:, :width] + counts[:, width:] > 0, counts[:, width:]

    repetition = rows.repetition[:, None]
    changed = jnp.where(logits > 0, logits * (1 / rows.repetition)[:, None], logits * repetition)  # the reciprocal: see `scaled`
    logits = jnp.where(seen & (repetition != 1), changed, logits)
    penalty = rows.frequency[:, None] * count + rows.presence[:, None] * (count > 0)
    return jnp.where(penalty != 0, logits - penalty, logits)


def adjusted(logits: jax.Array, rows: LaneState, length: jax.Array) -> jax.Array:
    """All of it in order: allowed mask; bad words and min_len; biases; penalties.

    Each is computed only in steps in which some row wants it.
    """

    def either(flag: jax.Array, f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.cond(jnp.any(flag), f, lambda v: v, x)

    short = (length < rows.min_len)[:, None] & (rows.stop_ids >= 0)
    banned = jnp.any(rows.bad_words[:, :, -1] >= 0, axis=1) | jnp.any(short, axis=1)
    biased = jnp.any(rows.bias_ids >= 0, axis=1)

    def restrict(x):
        x = either(rows.masked != 0, lambda v: allow_only(v, rows), x)
        x = either(banned, lambda v: ban(v, rows, length), x)
        return either(biased, lambda v: add_bias(v, rows), x)

    x = either((rows.masked != 0) | banned | biased, restrict, logits)
    penalized = (rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)
    return either(penalized, lambda v: penalize(v, rows, length), x)
