"""What the ops refuse, each with one sentence that names the thing, the rule and the value."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_write, paged_attention, paged_decode

KV = jnp.zeros((2, 5, 2, 2, 4, 8))
TABLES, LENS = jnp.ones((3, 2), jnp.int32), jnp.ones(3, jnp.int32)
Q = jnp.zeros((3, 4, 8))
NEW = jnp.zeros((3, 2, 8))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (
            {"kv": KV[0]},
            r"kv must be \[layers, blocks, 2, kv heads, block size, width\], none of them 0; got \(5, 2, 2, 4, 8\)",
        ),
        *(({"kv": jnp.delete(KV, slice(None), axis)}, "kv must be .*, none of them 0; got") for axis in (0, 1, 3, 4, 5)),
        *(
            ({"kv": KV.astype(dtype)}, f"kv must hold float32, bfloat16, float16, int8, float8_e4m3fn; got {dtype}")
            for dtype in ("int16", "float8_e5m2", "float8_e4m3b11fnuz", "complex64")
        ),
        ({"kv": KV.astype(jnp.int8)}, "kv_scales must be given for a pool of int8; got none"),
        ({"kv_scales": jnp.ones(2)}, "kv_scales must come with a pool of int8 or float8_e4m3fn; got one of float32"),
        (
            {"kv": KV.astype(jnp.int8), "kv_scales": jnp.ones(3)},
            r"kv_scales must be f32\[2\] or f32\[2, 5, 2, 2, 4\]; got float32\[3\]",
        ),
        *(({"layer": kind(2)}, "layer must be 0 to 1; got 2") for kind in (int, np.int64, np.int32, jnp.int32, np.array)),
        ({"layer": -1}, "layer must be 0 to 1; got -1"),
        ({"layer": 1.0}, r"layer must be an i32 scalar; got float64\[\]"),
        ({"layer": LENS}, r"layer must be an i32 scalar; got int32\[3\]"),
        ({"q": Q[:2]}, "q must have one token for each of 3 rows; got 2"),
        ({"q": Q[0]}, r"q must be \[tokens, heads, width\], none of them 0; got \(4, 8\)"),
        ({"q": Q[:, :0]}, r"q must be \[tokens, heads, width\], none of them 0; got \(3, 0, 8\)"),
        ({"q": Q.astype(jnp.int32)}, "q must hold floats; got int32"),
        ({"q": Q[:, :3]}, "query heads must be a multiple of the 2 kv heads; got 3"),
        ({"q": jnp.zeros((3, 4, 9))}, "head width of q must be at most the pool's 8; got 9"),
        ({"block_tables": LENS}, r"block_tables must be \[rows, blocks\], none of them 0; got \(3,\)"),
        ({"block_tables": TABLES[:0]}, r"block_tables must be \[rows, blocks\], none of them 0; got \(0, 2\)"),
        ({"context_lens": LENS[:2]}, r"context_lens must be i32\[3\]; got int32\[2\]"),
        ({"context_lens": LENS * 1.0}, r"context_lens must be i32\[3\]; got float32\[3\]"),
        *(
            ({"window": window}, f"window must be an integer from 1 to 2147483647, or None; got {window}")
            for window in (0, 2.5, 1 << 31)
        ),
        *(
            ({"soft_cap": cap}, f"soft_cap must be positive and finite, or None; got {cap}")
            for cap in (0.0, float("inf"), float("nan"))
        ),
        ({"sinks": jnp.zeros(3)}, r"sinks must be \[4\]; got \(3,\)"),
        ({"sinks": jnp.zeros(4, jnp.complex64)}, "sinks must hold floats; got complex64"),
        ({"backend": "none"}, "backend of paged_decode must be mosaic_tpu or .* or xla; got none"),
    ],
)
def test_paged_decode(change, match):
    args = {"q": Q, "kv": KV, "layer": 0, "block_tables": TABLES, "context_lens": LENS, "scale": 1.0}
    with pytest.raises(ValueError, match=match):
        paged_decode(**args | change)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"query_start": LENS}, r"query_start must be i32\[4\]; got int32\[3\]"),
        *(({"num_decode": one}, r"num_decode must be i32\[1\]; got int32\[\]") for one in (jnp.int32(1), 1)),
        ({"q": Q[:0]}, r"q must be \[tokens, heads, width\], none of them 0; got \(0, 4, 8\)"),
        ({"backend": "none"}, "backend of paged_attention must be mosaic_tpu or .* or xla; got none"),
    ],
)
def test_paged_attention(change, match):
    args = {"q": Q, "kv": KV, "layer": 0, "block_tables": TABLES, "context_lens": LENS, "scale": 1.0}
    args |= {"query_start": jnp.arange(4, dtype=jnp.int32), "num_decode": LENS[:1]}
    with pytest.raises(ValueError, match=match):
        paged_attention(**args | change)


@pytest.mark.parametrize("backend", [None, "xla"])
def test_every_array_may_be_numpys_or_a_list(backend):
    arrays = np.asarray(Q), np.asarray(KV), 1, TABLES.tolist(), LENS.tolist(), [0, 1, 2, 3], [3]
    assert paged_attention(*arrays, scale=1.0, backend=backend).shape == (3, 4, 8)  # pyright: ignore[reportArgumentType]
    assert kv_write(arrays[1], np.asarray(NEW), np.asarray(NEW), np.int64(1), [4, 5, 8], num_rows=2).shape == KV.shape  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"k": NEW[:, :1]}, r"k must be \[tokens, 2, width\]; got \(3, 1, 8\)"),
        ({"v": NEW[:2]}, r"k and v must have one shape; got \(3, 2, 8\) and \(2, 2, 8\)"),
        ({"k": jnp.zeros((3, 2, 9)), "v": jnp.zeros((3, 2, 9))}, "head width of k must be at most the pool's 8; got 9"),
        ({"k": NEW[:0], "v": NEW[:0]}, "k must hold at least one token, and a width"),
        ({"k": NEW.astype(jnp.complex64)}, "k must hold floats; got complex64"),
        ({"layer": np.int64(7)}, "layer must be 0 to 1; got 7"),
        ({"slots": LENS[:2]}, r"slots must be i32\[3\]; got int32\[2\]"),
        *(({"num_rows": rows}, f"num_rows must be an integer, at least 1; got {rows}") for rows in (0, 2.5)),
        ({"backend": "none"}, "backend of kv_write must be mosaic_tpu or .* or xla_tokens; got none"),
    ],
)
def test_kv_write(change, match):
    args = {"kv": KV, "k": NEW, "v": NEW, "layer": 0, "slots": LENS, "num_rows": 3}
    with pytest.raises(ValueError, match=match):
        kv_write(**args | change)
