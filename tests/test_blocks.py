"""Blocks that a plan copies, moves to host memory and brings back, by the engine that runs the plan: what every block of the pool
holds afterwards."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pagedjax.buckets import Bucket
from pagedjax.config import CacheConfig
from pagedjax.device.blocks import copy_blocks
from pagedjax.device.compile import lower_write_block
from pagedjax.device.sharding import block_in_host_memory
from pagedjax.engine import Engine
from pagedjax.errors import UserError
from pagedjax.host.plan import Copy, Entry, Plan, Row, Swap
from pagedjax.host.request import Request, SamplingParams
from pagedjax.pack import pack
from pagedjax.wire import size, split, step_fields

BLOCK_BYTES = 5 * 2 * 4 * 16 * 8 * 4  # of stories260K with 16 tokens in a block
LOOP = {"schedule.decode_steps": 16, "cache.swap_memory": 6 * BLOCK_BYTES + 5}
SHARDS = LOOP | {"tensor_parallel_size": 2, "stacked": True}


def fill(engine: Engine, seed: int = 0) -> np.ndarray:
    """Random values in the whole pool; a copy of them."""
    pool = engine.state.kv
    values = np.random.default_rng(seed).standard_normal(pool.shape, np.float32)
    put(engine, values)
    return values


def put(engine: Engine, values: np.ndarray) -> None:
    engine.state = replace(engine.state, kv=jnp.array(values, device=engine.state.kv.sharding, copy=True))


def pool_of(engine: Engine) -> np.ndarray:
    return np.array(engine.state.kv)  # a copy: a view would keep the pool from being written in place


def dispatch(engine: Engine, **parts: Any) -> list[tuple[int, ...]]:
    """Runs a plan that the scheduler does not know of; the tokens of its rows."""
    engine._dispatch(Plan(**{"rows": (), "entries": (), "steps": 1} | parts))
    return [result.tokens for result in engine._results(engine._in_flight.pop())]


def two_rows(count: int, steps: int) -> dict[str, Any]:
    """Two sequences from position 20: one writes block 3, the other block 9. Both begin with block 1."""
    rows, entries = [], []
    for lane, block in enumerate((3, 9)):
        ids = tuple(range(300 + 50 * lane, 320 + 50 * lane + count))
        entries.append(Entry(lane, Request(str(lane), ids, SamplingParams(temperature=0)), 0, ids, 60))
        table = np.array([1, block, *[0] * 6], np.int32)
        rows.append(Row(str(lane), 0, 0, lane, 20, count, ids[-count:], table, steps, None, None))
    return {"rows": tuple(rows), "entries": tuple(entries), "steps": steps}


@pytest.mark.parametrize(
    ("options", "count", "steps"),
    [
        ({}, 1, 1),
        ({}, 3, 1),
        (LOOP, 1, 4),
        (SHARDS, 1, 4),
        (SHARDS, 3, 1),
    ],
    ids=["decode", "prefill", "several steps", "several steps on two shards", "prefill on two shards"],
)
def test_a_copy_comes_before_the_step(stories_engine: Callable[..., Engine], options: dict, count: int, steps: int) -> None:
    """Row 0 goes on writing to the source while row 1 writes to the target: tokens and every bit of the pool are those of a plan
    without copies on a pool where the blocks were copied before."""
    engine = stories_engine(**options)
    plan = two_rows(count, steps)
    values = fill(engine)
    tokens = dispatch(engine, **plan, copies=(Copy(3, 9), Copy(5, 10), Copy(5, 12)))
    found = pool_of(engine)

    uncopied = values.copy()
    values[:, [9, 10, 12]] = values[:, [3, 5, 5]]
    put(engine, values)
    assert dispatch(engine, **plan) == tokens and [len(t) for t in tokens] == [steps, steps]
    np.testing.assert_array_equal(found, pool_of(engine))

    # What the test rests on: the source was written afterwards, the target by its own row, and nothing else changed.
    written = slice(4, 4 + count + steps - 1)
    assert (found[:, 3, :, :, written] != values[:, 3, :, :, written]).any(axis=(0, 1, 2, 4)).all()
    assert (found[:, 9, :, :, written] != found[:, 3, :, :, written]).any(axis=(0, 1, 2, 4)).all()
    changed = (found != uncopied).any(axis=(0, 2, 3, 4, 5))
    assert np.flatnonzero(changed[1:]).tolist() == [2, 8, 9, 11]


def test_nothing_is_copied_unasked(stories_engine: Callable[..., Engine]) -> None:
    engine = stories_engine()
    values = fill(engine)
    dispatch(engine)
    np.testing.assert_array_equal(values[:, 1:], pool_of(engine)[:, 1:])


@pytest.mark.parametrize("options", [LOOP, SHARDS], ids=["one device", "two shards"])
def test_what_was_swapped_out_comes_back(stories_engine: Callable[..., Engine], options: dict) -> None:
    """Bit for bit, to any block, as often as asked for; whatever happened to the block meanwhile."""
    engine = stories_engine(**options)
    assert engine.host_tier is not None and engine.host_tier.num_places == 6
    first = fill(engine)
    dispatch(engine, swap_out=(Swap(3, 0), Swap(4, 5)))
    assert engine.host_tier.bytes_held == 2 * BLOCK_BYTES
    second = fill(engine, seed=1)
    dispatch(engine, **two_rows(3, 1), swap_out=(Swap(7, 0),), swap_in=(Swap(4, 5), Swap(11, 5)))
    found = pool_of(engine)
    np.testing.assert_array_equal(found[:, 4], first[:, 4])
    np.testing.assert_array_equal(found[:, 11], first[:, 4])
    dispatch(engine, swap_in=(Swap(2, 0),))
    np.testing.assert_array_equal(pool_of(engine)[:, 2], second[:, 7])
    assert not (first[:, 3:5] == second[:, 3:5]).any(), "the control: the pool was overwritten"
    assert engine.compilations_after_start == 0


def test_the_parts_of_a_plan_have_an_order(stories_engine: Callable[..., Engine]) -> None:
    """Out, in, copies, step: a block goes out before it is written and comes in before it is copied."""
    engine = stories_engine(**LOOP)
    plan = two_rows(1, 4)
    values = fill(engine)
    dispatch(engine, **plan, swap_out=(Swap(3, 1),), swap_in=(Swap(5, 1),), copies=(Copy(5, 6),))
    found = pool_of(engine)
    assert (found[:, 3] != values[:, 3]).any(), "row 0 wrote there"
    np.testing.assert_array_equal(found[:, 5], values[:, 3])
    np.testing.assert_array_equal(found[:, 6], values[:, 3])


def test_places_are_in_host_memory(stories_engine: Callable[..., Engine]) -> None:
    """Each shard keeps its own heads."""
    engine = stories_engine(**SHARDS)
    dispatch(engine, swap_out=(Swap(3, 2),))
    assert engine.host_tier is not None
    held = engine.host_tier.places[2]
    assert held is not None and held.sharding.memory_kind == "pinned_host"
    assert [s.data.shape for s in held.addressable_shards] == [(5, 2, 2, 16, 8)] * 2


def test_the_pool_stays_in_place(stories_engine: Callable[..., Engine]) -> None:
    """When a block is written, and when blocks are copied; a gather over the blocks, the control, needs the pool twice."""
    engine = stories_engine(**LOOP)
    pool, mesh = engine.state.kv, engine.mesh
    write = lower_write_block(engine.state, mesh).compile().memory_analysis()
    assert write is not None and write.alias_size_in_bytes == pool.nbytes and write.temp_size_in_bytes <= BLOCK_BYTES

    def memory(function: Callable, second: jax.ShapeDtypeStruct) -> Any:
        return jax.jit(function, donate_argnums=0).lower(pool, second).compile().memory_analysis()

    copied = memory(copy_blocks, jax.ShapeDtypeStruct((4, 2), jnp.int32))
    assert copied.alias_size_in_bytes == pool.nbytes and copied.temp_size_in_bytes < BLOCK_BYTES
    control = memory(lambda kv, order: kv[:, order], jax.ShapeDtypeStruct((pool.shape[1],), jnp.int32))
    assert control.temp_size_in_bytes >= pool.nbytes


class Compiling(Exception):
    """Raised instead of compiling."""


@pytest.mark.parametrize(
    ("memory", "programs"), [(0, set()), (BLOCK_BYTES, {"read_block", "write_block"})], ids=["none", "one block"]
)
def test_no_host_memory_no_programs(
    stories_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, memory: int, programs: set[str]
) -> None:
    compiled: list[Any] = []

    def listed(lowerings: list, *_: Any) -> None:
        compiled.extend(key for key, _ in lowerings)
        raise Compiling

    monkeypatch.setattr("pagedjax.engine.compile_all", listed)
    with pytest.raises(Compiling):
        stories_engine(**{"cache.swap_memory": memory, "schedule.max_queued": 3})
    named = {key for key in compiled if not isinstance(key, Bucket)} - {"zero_state"}  # which may run beside the others
    assert named == {"set_lane", "set_mask"} | programs


def test_swaps_without_host_memory(stories_engine: Callable[..., Engine]) -> None:
    engine = stories_engine()
    assert engine.host_tier is None
    with pytest.raises(AssertionError, match="there is no host memory"):
        dispatch(engine, swap_out=(Swap(3, 0),))


def test_a_place_that_holds_nothing(stories_engine: Callable[..., Engine]) -> None:
    engine = stories_engine(**LOOP)
    with pytest.raises(AssertionError, match="place 4 of host memory holds nothing"):
        dispatch(engine, swap_in=(Swap(3, 4),))


def test_copies_that_cannot_be_packed() -> None:
    bucket = Bucket(2, 2)
    with pytest.raises(AssertionError, match="3 copies in a bucket with room for 2"):
        pack(Plan((), (), 1, (Copy(1, 5), Copy(1, 6), Copy(1, 7))), bucket, step_fields(bucket, 1, 4), 4)


def test_copies_come_before_their_padding() -> None:
    """One block may be copied to several; each group of layers has room for a copy a row."""
    bucket = Bucket(8, 2)
    fields = step_fields(bucket, 2, 4)
    buffer = pack(Plan((), (), 1, (Copy(5, 9), Copy(5, 7))), bucket, fields, 4)
    assert len(buffer) == size(fields)
    assert split(buffer, fields)["copies"].tolist() == [[5, 9], [5, 7], [0, 0], [0, 0]]


def test_rules_of_swap_memory(stories_engine: Callable[..., Engine]) -> None:
    with pytest.raises(UserError, match=r"swap_memory must be a number of bytes \(or 0: none\); got -1"):
        CacheConfig(swap_memory=-1)
    with pytest.raises(UserError, match=f"swap_memory must be 0 or hold at least one block of {BLOCK_BYTES} bytes; got 5 bytes"):
        stories_engine(**{"cache.swap_memory": 5})
    device = SimpleNamespace(device_kind="a stone", addressable_memories=lambda: [SimpleNamespace(kind="device")])
    mesh = SimpleNamespace(devices=np.array([[device]], object))
    with pytest.raises(UserError, match="swap_memory must be 0 on devices without pinned_host memory; a stone has device"):
        block_in_host_memory(mesh)  # pyright: ignore[reportArgumentType]
