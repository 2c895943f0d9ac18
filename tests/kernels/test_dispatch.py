"""What the tables of backends say is what the ops do."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import OPS, kv_write
from pallas_kernels.common.dispatch import Backend, choose, run


@pytest.mark.parametrize(("platform", "name"), [("cpu", "xla_tokens"), ("cuda", "xla_tokens"), ("tpu", "xla_blocks")])
def test_kv_write_lowers_to_the_backend_that_is_chosen(platform: str, name: str):
    pool = jax.ShapeDtypeStruct((1, 4, 2, 1, 8, 8), jnp.float32)
    new, slots = jax.ShapeDtypeStruct((4, 1, 8), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    traced = jax.jit(lambda kv, k, slots: kv_write(kv, k, k, 0, slots, num_rows=2)).trace(pool, new, slots)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert choose(OPS["kv_write"], platform).name == name
    assert ("stablehlo.dynamic_update_slice" in text) == (name == "xla_blocks")


def test_every_op_has_one_backend_for_other_platforms():
    for op, backends in OPS.items():
        assert sum(not backend.platforms for backend in backends) == 1, op
        assert len({backend.name for backend in backends}) == len(backends), op


def test_run_takes_the_named_backend_or_the_platforms():
    backends = (Backend("a", ("tpu",), ""), Backend("b", (), ""))
    functions = {"a": lambda x: x + 1, "b": lambda x: x + 2}
    assert run(backends, functions, (jnp.int32(0),), "a") == 1
    assert run(backends, functions, (jnp.int32(0),), None) == 2
