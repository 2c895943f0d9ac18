"""kv_write against NumPy, both ways of writing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write
from pallas_kernels.kv_write import reference
from pallas_kernels.kv_write.cases import CASES


@pytest.mark.parametrize("backend", ["xla_tokens", "xla_blocks"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_numpy(case, backend):
    rng = np.random.default_rng(len(case.name))
    kv = rng.standard_normal((3, case.blocks, 2, case.kv_heads, case.block_size, case.stored_width)).astype(jnp.dtype(case.dtype))
    slots = case.slots()
    k, v = rng.standard_normal((2, len(slots), case.kv_heads, case.width)).astype(np.float32)

    @jax.jit
    def op(kv, k, v, layer, slots):
        return kv_write(kv, k, v, layer, slots, num_rows=len(case.rows), backend=backend)

    got = np.asarray(op(kv, k, v, jnp.int32(1), slots))
    want = reference(kv, k.astype(kv.dtype), v.astype(kv.dtype), 1, slots)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
    np.testing.assert_array_equal(got[[0, 2], 0], want[[0, 2], 0])
