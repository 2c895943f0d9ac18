"""The ops compiled ahead of time for TPU v5e on this machine: no temporary the size of one layer's KV."""

import importlib.util
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies

from pallas_kernels import kv_write, paged_attention, paged_decode

pytestmark = [
    pytest.mark.aot_tpu,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: install the extra aot-tpu"),
]

LAYERS, BLOCKS, KV_HEADS, GROUP, BLOCK, WIDTH = 8, 512, 8, 4, 128, 128
POOL = (LAYERS, BLOCKS, 2, KV_HEADS, BLOCK, WIDTH)
POOL_BYTES = 2 * int(np.prod(POOL))
SETTINGS = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
}


def steps(decode: bool, backend: str | None):
    def step(kv, q, k, v, slots, tables, lens, query_start, num_decode):
        def layer(carry, index):
            kv, q = carry
            kv = kv_write(kv, k, v, index, slots, num_rows=lens.shape[0], backend=backend)
            if decode:
                out = paged_decode(q, kv, index, tables, lens, scale=0.1)
            else:
                out = paged_attention(q, kv, index, tables, lens, query_start, num_decode, scale=0.1)
            return (kv, q + out.astype(q.dtype)), None

        return lax.scan(layer, (kv, q), jnp.arange(LAYERS))[0]

    return step


@pytest.fixture
def device(monkeypatch):
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, os.environ.get(name, value))
    return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices[0]


def compiled_memory(device, tokens: int, rows: int, backend: str | None = None):
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array([device]), ("x",)), jax.P())
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=place)
    bf16, i32 = jnp.bfloat16, jnp.int32
    new = array(bf16, tokens, KV_HEADS, WIDTH)
    heads = array(bf16, tokens, KV_HEADS * GROUP, WIDTH)
    table = array(i32, tokens), array(i32, rows, 32), array(i32, rows), array(i32, rows + 1), array(i32, 1)
    step = jax.jit(steps(tokens == rows, backend), donate_argnums=0)
    return step.trace(array(bf16, *POOL), heads, new, new, *table).lower(lowering_platforms=("tpu",)).compile().memory_analysis()


@pytest.mark.parametrize(("tokens", "rows"), [(32, 32), (1, 1), (256, 16)])
def test_the_pool_is_not_copied(device, tokens, rows):
    memory = compiled_memory(device, tokens, rows)
    assert memory.alias_size_in_bytes >= POOL_BYTES
    assert memory.temp_size_in_bytes < POOL_BYTES / LAYERS


def test_a_copy_would_be_seen(device):
    """The control: the same step with a scatter of tokens does copy the pool on TPU."""
    assert compiled_memory(device, 32, 32, "xla_tokens").temp_size_in_bytes >= POOL_BYTES
