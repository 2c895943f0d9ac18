"""The layout of the pool, and checks that every op makes on it.

Axes: J layers, N blocks, K kv heads, P tokens per block, D' stored head width, D head width, H query heads, G = H / K, S rows,
T tokens, B blocks per row.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer

MASKED = -1e30  # a score that counts for nothing; finite, so that the difference of two of them is no NaN
LOWEST = -1e29  # where running maxima start: so far above MASKED that exp(MASKED - maximum) is 0 even when nothing was seen


POOL_DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")


class PoolShape(NamedTuple):
    layers: int
    blocks: int
    kv_heads: int
    block_size: int
    width: int


def check(ok: bool, message: str) -> None:
    """Raises ValueError(message) unless ok."""
    if not ok:
        raise ValueError(message)


def check_pool(kv: jax.Array) -> PoolShape:
    """The axes of kv[J, N, 2, K, P, D'], or ValueError."""
    check(
        kv.ndim == 6 and kv.shape[2] == 2 and min(kv.shape) >= 1,
        f"kv must be [layers, blocks, 2, kv heads, block size, width], none of them 0; got {kv.shape}",
    )
    check(kv.dtype.name in POOL_DTYPES, f"kv must hold {', '.join(POOL_DTYPES)}; got {kv.dtype}")
    layers, blocks, _, kv_heads, block_size, width = kv.shape
    return PoolShape(layers, blocks, kv_heads, block_size, width)


def check_ints(name: str, x: jax.Array, shape: tuple[int, ...]) -> None:
    """ValueError unless x is i32 of this shape."""
    check(x.shape == shape and x.dtype == jnp.int32, f"{name} must be i32{list(shape)}; got {x.dtype}{list(x.shape)}")


def check_layer(layer: jax.Array | int, layers: int) -> jax.Array:
    """layer as an i32 scalar; ValueError unless it is one, or when it is known and outside the pool."""
    traced = isinstance(layer, Tracer)
    one = layer if traced else np.asarray(layer)
    check(
        one.shape == () and jnp.issubdtype(one.dtype, jnp.integer),
        f"layer must be an i32 scalar; got {one.dtype}{list(one.shape)}",
    )
    check(traced or 0 <= int(one) < layers, f"layer must be 0 to {layers - 1}; got {layer}")
    return jnp.asarray(one, jnp.int32)


def check_floats(name: str, x: jax.Array) -> None:
    """ValueError unless x holds floats."""
    check(jnp.issubdtype(x.dtype, jnp.floating), f"{name} must hold floats; got {x.dtype}")


def result_dtype(out_dtype: Any, default: Any) -> str:
    """The dtype that a product is asked for, None being the default; ValueError unless it is float32 or bfloat16."""
    try:
        name = jnp.dtype(default if out_dtype is None else out_dtype).name
    except TypeError:
        name = ""
    check(name in ("float32", "bfloat16"), f"out_dtype must be float32 or bfloat16; got {out_dtype or default}")
    return name


def check_queries(
    q: jax.Array,
    pool: PoolShape,
    block_tables: jax.Array,
    context_lens: jax.Array,
    window: int | None,
    soft_cap: float | None,
    sinks: jax.Array | None,
) -> None:
    """What paged_decode and paged_attention ask of their inputs, or ValueError."""
    check(q.ndim == 3 and min(q.shape) >= 1, f"q must be [tokens, heads, width], none of them 0; got {q.shape}")
    check_floats("q", q)
    heads, width = q.shape[1:]
    check(heads % pool.kv_heads == 0, f"query heads must be a multiple of the {pool.kv_heads} kv heads; got {heads}")
    check(width <= pool.width, f"the head width of q must be at most the pool's {pool.width}; got {width}")
    check(
        block_tables.ndim == 2 and min(block_tables.shape) >= 1,
        f"block_tables must be [rows, blocks], none of them 0; got {block_tables.shape}",
    )
    check_ints("block_tables", block_tables, block_tables.shape)
    check_ints("context_lens", context_lens, block_tables.shape[:1])
    whole = window is None or (isinstance(window, int | np.integer) and 1 <= window < 1 << 31)
    check(whole, f"window must be an integer from 1 to {(1 << 31) - 1}, or None; got {window}")
    check(soft_cap is None or 0 < soft_cap < math.inf, f"soft_cap must be positive and finite, or None; got {soft_cap}")
    if sinks is not None:
        check(sinks.shape == (heads,), f"sinks must be [{heads}]; got {sinks.shape}")
        check_floats("sinks", sinks)


def precision_of(dtype: Any) -> lax.Precision | None:
    """Of products: those of f32 are f32, where TPUs by default round to bf16, and GPUs to TF32."""
    return lax.Precision.HIGHEST if dtype == jnp.float32 else None


def einsum_f32(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Products of one dtype, summed in f32."""
    return jnp.einsum(subscripts, a, b, precision=precision_of(a.dtype), preferred_element_type=jnp.float32)


def ceil_div(a: jax.Array, b: int) -> jax.Array:
    """a / b rounded up, for a that is not negative."""
    return lax.div(a + (b - 1), jnp.int32(b))


def pad_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """x with zeros behind it along the axis, up to `size`."""
    if x.shape[axis] == size:
        return x
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, widths)


def flat_blocks(kv: jax.Array) -> jax.Array:
    """[J, N, 2, K, P, D'] -> [J * N * 2, K, P, D'], without a copy. Keys of (layer, block) are at 2 * (layer * N + block)."""
    return kv.reshape(-1, *kv.shape[3:])


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index] along the first axis; every index must be inside."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def take_blocks(flat: jax.Array, index: jax.Array) -> jax.Array:
    """flat_blocks(kv)[index], [..., K, P, D']; every index must be inside."""
    return take(flat, index)


def scores(raw: jax.Array, scale: float, soft_cap: float | None) -> jax.Array:
    """The softmax's logits from f32 dot products: scaled, and capped as in Gemma 2 (arXiv 2408.00118)."""
    s = raw * scale
    return s if soft_cap is None else jnp.tanh(s / soft_cap) * soft_cap
