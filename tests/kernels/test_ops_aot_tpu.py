"""The ops compiled ahead of time for TPU v5e on this machine: no temporary the size of one layer's KV."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import kv_write, paged_attention, paged_decode
from pallas_kernels.aot.compile import compile_for
from pallas_kernels.aot.targets import missing
from pallas_kernels.aot.worker import Report

pytestmark = [
    pytest.mark.aot_tpu,
    pytest.mark.skipif(missing("v5e") is not None, reason=str(missing("v5e"))),
]

LAYERS, BLOCKS, KV_HEADS, GROUP, BLOCK, WIDTH = 8, 512, 8, 4, 128, 128
POOL = (LAYERS, BLOCKS, 2, KV_HEADS, BLOCK, WIDTH)
POOL_BYTES = 2 * int(np.prod(POOL))


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


def compiled(tokens: int, rows: int, backend: str | None = None) -> Report:
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    bf16, i32 = jnp.bfloat16, jnp.int32
    new = array(bf16, tokens, KV_HEADS, WIDTH)
    heads = array(bf16, tokens, KV_HEADS * GROUP, WIDTH)
    table = array(i32, tokens), array(i32, rows, 32), array(i32, rows), array(i32, rows + 1), array(i32, 1)
    return compile_for("v5e", steps(tokens == rows, backend), array(bf16, *POOL), heads, new, new, *table, donate=0)


@pytest.mark.parametrize(("tokens", "rows"), [(32, 32), (1, 1), (256, 16)])
def test_the_pool_is_not_copied(tokens, rows):
    report = compiled(tokens, rows)
    assert report.alias_bytes >= POOL_BYTES
    assert report.temp_bytes < POOL_BYTES / LAYERS


def test_a_copy_would_be_seen():
    """The control: the same step with a scatter of tokens does copy the pool on TPU."""
    assert compiled(32, 32, "xla_tokens").temp_bytes >= POOL_BYTES
