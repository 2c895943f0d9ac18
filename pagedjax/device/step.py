"""One step: (params, DeviceState, StepInput) -> (DeviceState, StepOutput). Everything a step does is here, in order."""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pagedjax.config import ModelConfig
from pagedjax.device.attention import Rows
from pagedjax.device.blocks import copy_blocks
from pagedjax.device.sample import Sampled, gather_lanes, sample, score
from pagedjax.device.sharding import by_vocab, replicated
from pagedjax.limits import NUM_LOGPROBS
from pagedjax.state import DeviceState, StepInput, StepOutput

SCORE_TILE = 32  # positions whose logits exist at once while prompts are scored


@dataclass(frozen=True)
class StepSpec:
    """What a step is compiled for, beside its shapes."""

    model: ModuleType  # of pagedjax.models
    cfg: ModelConfig  # padded for the shards
    mesh: Mesh
    max_steps: int  # W: the most decode steps of one dispatch


def run_step(params: Any, state: DeviceState, batch: StepInput, spec: StepSpec) -> tuple[DeviceState, StepOutput]:
    """Copies blocks, once; then a decode bucket runs batch.steps passes (all but the first take their tokens from the lanes) and
    scores no prompt; any other runs one."""
    state = replace(state, kv=copy_blocks(state.kv, batch.copies))
    decodes, width = batch.tokens.shape[0] == batch.lanes.shape[0], spec.max_steps
    out = empty_output(batch, width)
    if width == 1 or not decodes:
        state, hidden, sampled = one_pass(params, state, batch, spec)
        out = record(out, sampled, 0)
        return state, out if decodes else score_prompt(params, hidden, batch, out, spec)

    def body(carry):
        i, state, out, batch = carry
        state, _, sampled = one_pass(params, state, batch, spec)
        return i + 1, state, record(out, sampled, i), advance(batch)

    def more(carry):
        i, state, _, batch = carry
        stopped = state.lanes.stopped.at[batch.lanes].get(mode="fill", fill_value=True)
        return (i < batch.steps[0]) & ((i == 0) | ~jnp.all(stopped))

    _, state, out, _ = jax.lax.while_loop(more, body, (jnp.int32(0), state, out, batch))
    return state, out


def one_pass(params: Any, state: DeviceState, batch: StepInput, spec: StepSpec) -> tuple[DeviceState, jax.Array, Sampled]:
    """Writes K and V, attends, samples the next token of the rows that want one. Rows whose lane has stopped write to the
    scrap block and emit -1."""
    lanes = state.lanes
    num_lanes = lanes.last_tokens.shape[0]
    stopped = lanes.stopped.at[batch.lanes].get(mode="fill", fill_value=True)
    context = jnp.where(stopped, 0, batch.context_lens)
    from_lane = lanes.last_tokens[jnp.clip(batch.from_lane, 0, num_lanes - 1)]
    tokens = jnp.where(batch.from_lane >= 0, from_lane, batch.tokens)
    rows = Rows(
        slots=find_slots(batch, context, jax.tree.leaves(state.kv)[0].shape[4]),
        positions=batch.positions,
        query_start=batch.query_start,
        num_decode=batch.num_decode,
        context_lens=context,
        block_tables=batch.block_tables,
        mesh=spec.mesh,
    )
    hidden, kv = spec.model.forward(params, tokens, state.kv, rows, spec.cfg)
    last = hidden[jnp.clip(batch.query_start[1:] - 1, 0, hidden.shape[0] - 1)]
    logits = whole_logits(params, last, spec)

    own = gather_lanes(lanes, batch.lanes)
    sampled = sample(logits, own, context, vocab_size=spec.cfg.vocab_size)
    active = (batch.samples == 1) & (context > 0)
    token = jnp.where(active, sampled.tokens, -1)
    ends = jnp.any(own.stop_ids == token[:, None], axis=1) & (context >= own.min_len)
    ends |= context + 1 >= own.max_len
    target = jnp.where(active, batch.lanes, num_lanes)  # an index out of bounds is dropped
    lanes = replace(
        lanes,
        last_tokens=lanes.last_tokens.at[target].set(token, mode="drop"),
        stopped=lanes.stopped.at[target].set(ends, mode="drop"),
        history=lanes.history.at[target, context].set(token, mode="drop"),
    )
    return DeviceState(kv=kv, lanes=lanes), hidden, replace(sampled, tokens=token)


def whole_logits(params: Any, hidden: jax.Array, spec: StepSpec) -> jax.Array:
    """f32[S, V] on every device: sums over a vocabulary in shards would depend on the mesh, and with them the tokens. Sharded
    first, so that XLA gathers logits and not the weights of the head."""
    logits = jax.lax.with_sharding_constraint(spec.model.logits(params, hidden, spec.cfg), by_vocab(spec.mesh))
    return jax.lax.with_sharding_constraint(logits, replicated(spec.mesh))


def find_slots(batch: StepInput, context_lens: jax.Array, block_size: int) -> jax.Array:
    """i32[G, T]: the slot of each token in each layer group; 0, in the scrap block, for padding and for rows of length 0."""
    count = batch.tokens.shape[0]
    token = jnp.arange(count, dtype=jnp.int32)
    if count == batch.lanes.shape[0]:
        row = token
    else:
        row = jnp.sum(token[:, None] >= batch.query_start[None, 1:], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, batch.lanes.shape[0] - 1)
    block = batch.block_tables[:, row, batch.positions // block_size]
    real = (token < batch.query_start[-1]) & (context_lens[row] > 0)
    # Kept apart, or each layer's write computes all of it again.
    return jax.lax.optimization_barrier(jnp.where(real, block * block_size + batch.positions % block_size, 0))


def advance(batch: StepInput) -> StepInput:
    """The next decode step of the same rows: one position on, tokens from the lanes."""
    one = (batch.context_lens > 0).astype(jnp.int32)
    return replace(
        batch,
        from_lane=jnp.where(one == 1, batch.lanes, -1),
        positions=batch.positions + one,
        context_lens=batch.context_lens + one,
    )


def empty_output(batch: StepInput, width: int) -> StepOutput:
    s, t = batch.lanes.shape[0], batch.tokens.shape[0]
    zeros = jnp.zeros
    return StepOutput(
        tokens=jnp.full((s, width), -1, jnp.int32),
        logprob=zeros((s, width), jnp.float32),
        rank=zeros((s, width), jnp.int32),
        top_ids=zeros((s, width, NUM_LOGPROBS), jnp.int32),
        top_logprobs=zeros((s, width, NUM_LOGPROBS), jnp.float32),
        prompt_logprob=zeros((t,), jnp.float32),
        prompt_rank=zeros((t,), jnp.int32),
        prompt_top_ids=zeros((t, NUM_LOGPROBS), jnp.int32),
        prompt_top_logprobs=zeros((t, NUM_LOGPROBS), jnp.float32),
    )


def record(out: StepOutput, sampled: Sampled, i: jax.Array | int) -> StepOutput:
    """Column i of the output."""
    return replace(
        out,
        tokens=out.tokens.at[:, i].set(sampled.tokens),
        logprob=out.logprob.at[:, i].set(sampled.logprob),
        rank=out.rank.at[:, i].set(sampled.rank),
        top_ids=out.top_ids.at[:, i].set(sampled.top_ids),
        top_logprobs=out.top_logprobs.at[:, i].set(sampled.top_logprobs),
    )


def score_prompt(params: Any, hidden: jax.Array, batch: StepInput, out: StepOutput, spec: StepSpec) -> StepOutput:
    """Fills the prompt logprobs where the step is to score; the logits of a tile of positions exist at a time."""
    count = hidden.shape[0]
    tile = min(SCORE_TILE, count)
    tiles = -(-count // tile)
    pad = tiles * tile - count

    def scored(out: StepOutput) -> StepOutput:
        h = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(tiles, tile, -1)
        targets = jnp.pad(batch.targets, (0, pad), constant_values=-1).reshape(tiles, tile)
        parts = jax.lax.map(lambda x: score(whole_logits(params, x[0], spec), x[1]), (h, targets))
        logprob, rank, top_ids, top_logprobs = (p.reshape(tiles * tile, *p.shape[2:])[:count] for p in parts)
        return replace(out, prompt_logprob=logprob, prompt_rank=rank, prompt_top_ids=top_ids, prompt_top_logprobs=top_logprobs)

    return jax.lax.cond(batch.score[0] == 1, scored, lambda out: out, out)
