"""kv_write against NumPy, both ways of writing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write
from pallas_kernels.common.quantized import quantize, token_scales
from pallas_kernels.kv_write import reference
from pallas_kernels.kv_write.cases import CASES


@pytest.mark.parametrize("backend", ["xla_tokens", "xla_blocks"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_agrees_with_numpy(case, backend):
    rng = np.random.default_rng(len(case.name))
    shape = 3, case.blocks, 2, case.kv_heads, case.block_size
    dtype = jnp.dtype(case.dtype)
    kv = (rng.standard_normal((*shape, case.stored_width)) * 20).astype(dtype)
    kv_scales = {"none": None, "tensor": np.array([0.02, 0.4], np.float32), "token": rng.random(shape, np.float32)}[case.scales]
    slots = case.slots()
    k, v = rng.standard_normal((2, len(slots), case.kv_heads, case.width)).astype(np.float32)
    k[0, 0] = 0
    k[0, -1] = 300  # too large for some of the scales

    @jax.jit
    def op(kv, k, v, layer, slots, kv_scales):
        return kv_write(kv, k, v, layer, slots, num_rows=len(case.rows), backend=backend, kv_scales=kv_scales)

    got = op(kv, k, v, jnp.int32(1), slots, kv_scales)
    want, want_scales = reference(kv, k, v, 1, slots, kv_scales)
    if case.scales == "token":
        got, scales = got
        np.testing.assert_allclose(np.asarray(scales)[:, 1:], want_scales[:, 1:], rtol=1e-6)
    got = np.asarray(got)
    assert got.dtype == want.dtype
    if case.scales == "none":
        np.testing.assert_array_equal(got[:, 1:], want[:, 1:])
    else:  # x / scale may be rounded differently: by one step of the stored numbers, in few places
        got, want = (x.astype(np.float32) for x in (got, want))
        off = got[:, 1:] != want[:, 1:]
        assert off.mean() < 0.01
        np.testing.assert_allclose(got[:, 1:], want[:, 1:], rtol=0.125, atol=1 if case.dtype == "int8" else 2.0**-9)
    np.testing.assert_array_equal(got[[0, 2], 0], want[[0, 2], 0])


def test_values_come_back_within_half_a_step():
    """Stored times scale, against what was written: int8 by token is off by at most half of max|x| / 127."""
    x = np.random.default_rng(0).standard_normal((5, 3, 16)).astype(np.float32)
    made = token_scales(jnp.asarray(x), jnp.dtype("int8"))
    back = np.asarray(quantize(jnp.asarray(x), made[..., None], jnp.dtype("int8")), np.float32) * np.asarray(made)[..., None]
    assert (np.abs(back - x) <= np.abs(x).max(-1, keepdims=True) / 127 * 0.501).all()
