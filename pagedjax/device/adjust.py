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


def ban_bad_words(logits: jax.Array, rows: LaneState, length: jax.Array) -> jax.Array:
    """-inf for the last token of each bad word whose other tokens end the history, prompt included."""
    words = rows.bad_words  # [S, words, tokens], right-aligned
    back = words.shape[2] - 1
    at = length[:, None] - back + jnp.arange(back)
    tail = jnp.where(at < 0, -2, jnp.take_along_axis(rows.history, jnp.maximum(at, 0), axis=1))  # -2 equals no token
    completed = jnp.all((words[:, :, :-1] < 0) | (words[:, :, :-1] == tail[:, None]), axis=-1)
    where, value = _spread(jnp.full(completed.shape, -jnp.inf), jnp.where(completed, words[:, :, -1], -1), logits.shape[1])
    return logits.at[where].set(value, mode="drop")


def ban_stops(logits: jax.Array, rows: LaneState, length: jax.Array) -> jax.Array:
    """-inf for the stop ids of rows that are shorter than min_len."""
    ids = jnp.where((length < rows.min_len)[:, None], rows.stop_ids, -1)
    where, value = _spread(jnp.full(ids.shape, -jnp.inf), ids, logits.shape[1])
    return logits.at[where].set(value, mode="drop")


def add_bias(logits: jax.Array, rows: LaneState) -> jax.Array:
    """Adds each (finite) bias to its token; a forbidden token stays forbidden."""
    where, value = _spread(rows.bias_values, rows.bias_ids, logits.shape[1])
    return logits.at[where].add(value, mode="drop")


def _counts(rows: LaneState, start: jax.Array, end: jax.Array, width: int) -> jax.Array:
    """i32[S, V]: how often each token stands in history[s, start[s]:end[s]]."""
    at = jnp.arange(rows.history.shape[1])
    ids = jnp.where((at >= start[:, None]) & (at < end[:, None]), rows.history, -1)
    where, ones = _spread(jnp.ones_like(ids), ids, width)
    return jnp.zeros((ids.shape[0], width), jnp.int32).at[where].add(ones, mode="drop")


def penalize_repetition(logits: jax.Array, rows: LaneState, length: jax.Array) -> jax.Array:
    """Divides positive logits of tokens seen in prompt or output by the penalty, multiplies the others (Keskar et al. 2019,
    arXiv 1909.05858, as in vLLM and Transformers)."""
    seen = _counts(rows, jnp.zeros_like(length), length, logits.shape[1]) > 0
    penalty = rows.repetition[:, None]
    changed = jnp.where(logits > 0, logits * (1 / rows.repetition)[:, None], logits * penalty)  # the reciprocal: see `scaled`
    return jnp.where(seen & (penalty != 1), changed, logits)


def penalize_output(logits: jax.Array, rows: LaneState, length: jax.Array) -> jax.Array:
    """Subtracts frequency * count + presence * (count > 0), counted in the output only (OpenAI's definition)."""
    count = _counts(rows, rows.prompt_len, length, logits.shape[1])
    penalty = rows.frequency[:, None] * count + rows.presence[:, None] * (count > 0)
    return jnp.where(penalty != 0, logits - penalty, logits)


def adjusted(logits: jax.Array, rows: LaneState, length: jax.Array) -> jax.Array:
    """All of it in order: allowed mask, bad words, min_len; biases; repetition, then presence and frequency.

    Each is computed only in steps in which some row wants it.
    """

    def either(flag: jax.Array, f: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return jax.lax.cond(jnp.any(flag), f, lambda v: v, x)

    def ban_and_bias(x):
        x = either(rows.masked != 0, lambda v: allow_only(v, rows), x)
        x = either(rows.bad_words[:, :, -1] >= 0, lambda v: ban_bad_words(v, rows, length), x)
        x = either((length < rows.min_len)[:, None] & (rows.stop_ids >= 0), lambda v: ban_stops(v, rows, length), x)
        return either(rows.bias_ids >= 0, lambda v: add_bias(v, rows), x)

    def penalize(x):
        x = either(rows.repetition != 1, lambda v: penalize_repetition(v, rows, length), x)
        return either((rows.presence != 0) | (rows.frequency != 0), lambda v: penalize_output(v, rows, length), x)

    banned = (rows.masked != 0) | jnp.any(rows.bad_words[:, :, -1] >= 0, axis=1) | (length < rows.min_len)
    penalized = (rows.repetition != 1) | (rows.presence != 0) | (rows.frequency != 0)
    x = either(banned | jnp.any(rows.bias_ids >= 0, axis=1), ban_and_bias, logits)
    return either(penalized, penalize, x)
