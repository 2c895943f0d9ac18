"""The lanes of DeviceState: their shapes, and the one function that writes a whole lane."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pagedjax.state import DeviceState, LaneState
from pagedjax.wire import lane_fields, split


def abstract_lanes(num_lanes: int, max_model_len: int, vocab: int) -> LaneState:
    """LaneState as ShapeDtypeStructs."""
    fields: dict[str, Any] = {
        name: jax.ShapeDtypeStruct((num_lanes, *shape), dtype)
        for name, (shape, dtype) in lane_fields(max_model_len, vocab).items()
        if name != "length"
    }
    fields["last_tokens"] = jax.ShapeDtypeStruct((num_lanes,), jnp.int32)
    fields["stopped"] = jax.ShapeDtypeStruct((num_lanes,), jnp.bool_)
    return LaneState(**fields)


def set_lane(state: DeviceState, lane: jax.Array, buffer: jax.Array, *, max_model_len: int, vocab: int) -> DeviceState:
    """lane i32[1], buffer i32[…] of `wire.lane_fields`. The lane belongs to a new sequence: it has not stopped."""
    values = split(buffer, lane_fields(max_model_len, vocab))
    length = values.pop("length")
    values["last_tokens"] = values["history"][jnp.maximum(length - 1, 0)]
    values["stopped"] = jnp.zeros((), jnp.bool_)
    old = {name: getattr(state.lanes, name) for name in values}
    return replace(state, lanes=LaneState(**{name: old[name].at[lane[0]].set(value) for name, value in values.items()}))


def set_mask(state: DeviceState, lane: jax.Array, mask: jax.Array) -> DeviceState:
    """lane i32[1], mask u32[ceil(V / 32)]: the tokens that the lane may sample next."""
    lanes = replace(state.lanes, mask=state.lanes.mask.at[lane[0]].set(mask))
    return replace(state, lanes=lanes)
