"""What bench/kernels.py runs beside the ops: gathering the whole context (the control), weights that are not quantized, JAX's own
kernels where this version of JAX has them, and PyTorch's attention where PyTorch is installed. Each takes a call and returns a
function that makes one, or None where it cannot."""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.workload import Attention, Load, array, fill
from pallas_kernels.workload_matmul import Grouped, Quantized

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention as gpu_kernels
except ImportError:
    gpu_kernels = None
try:
    from jax.experimental.pallas.ops.tpu import paged_attention as tpu_kernels
    from jax.experimental.pallas.ops.tpu import ragged_paged_attention as ragged_kernels
except ImportError:
    tpu_kernels = ragged_kernels = None
try:
    from jax.experimental.pallas.ops.tpu.megablox import gmm
except ImportError:
    gmm: Any = None
try:
    import torch  # pyright: ignore[reportMissingImports]
    from torch.nn.attention import bias  # pyright: ignore[reportMissingImports]
except ImportError:
    torch: Any = None
    bias: Any = None

Run = Callable[[], Any]


def plain(load: Load) -> Attention | None:
    """The load, if it is attention to a pool that anybody can read: no scales, no window."""
    if not isinstance(load, Attention) or load.scales != "none" or load.window is not None or load.dtype.startswith("float8"):
        return None
    return load


def gathered(
    load: Attention, kv: jax.Array, q: jax.Array, tables: jax.Array, lens: jax.Array, *, wide: Any = jnp.float32
) -> jax.Array:
    """Attention to a copy of each row's whole context, f32[rows, new, H, D]; queries are the last tokens of their rows. wide: of
    the products' results."""
    rows, heads = load.rows, (load.kv_heads, load.group)
    taken = kv[0][tables]  # [S, B, 2, K, P, D]
    k, v = (taken[:, :, i].transpose(0, 2, 1, 3, 4).reshape(rows, load.kv_heads, -1, load.width) for i in (0, 1))
    q = q.reshape(rows, load.new, *heads, load.width)
    s = jnp.einsum("sqkgd,sktd->skgqt", q, k, preferred_element_type=wide).astype(jnp.float32) * load.width**-0.5
    last = lens[:, None] - load.new + jnp.arange(load.new)
    seen = jnp.arange(k.shape[2]) <= last[..., None]
    p = jax.nn.softmax(jnp.where(seen[:, None, None], s, -jnp.inf), axis=-1)
    out = jnp.einsum("skgqt,sktd->sqkgd", p.astype(v.dtype), v, preferred_element_type=wide).astype(jnp.float32)
    return out.reshape(rows, load.new, -1, load.width)


def gather_all(load: Load, args: tuple[Any, ...], platform: str) -> Run | None:
    call = plain(load)
    # Scores of all queries at once: beyond this they are larger than most memories.
    if call is None or call.tokens * call.kv_heads * call.group * call.context > 1 << 31:
        return None
    some = args[:4]
    wide = call.dtype if platform == "cpu" else jnp.float32  # XLA:CPU has no products of these shapes from bfloat16 to float32
    f = jax.jit(lambda *args: gathered(call, *args, wide=wide)).lower(*some).compile()
    return lambda: f(*some)


def jax_kernel(load: Load, args: tuple[Any, ...], platform: str) -> Run | None:
    """JAX's paged attention for GPU (Triton, deprecated) or TPU, on a pool of its own layout."""
    call = plain(load)
    if call is None or call.window is not None or platform not in ("cuda", "tpu"):
        return None
    kv, q, tables, lens = args[:4]
    if call.op == "paged_attention":
        if platform != "tpu" or ragged_kernels is None:
            return None
        pages = jax.jit(lambda kv: kv[0].transpose(0, 3, 2, 1, 4).reshape(kv.shape[1], call.block_size, -1, call.width))(kv)
        kernel = ragged_kernels.ragged_paged_attention
        f = jax.jit(lambda q, kv, lens, tables, starts, n: kernel(q, kv, lens, tables, starts, n, sm_scale=call.width**-0.5))
        some = q, pages, lens, tables, args[4], jnp.full(1, call.rows, jnp.int32)
    elif platform == "tpu" and tpu_kernels is not None:
        k, v = (jax.jit(lambda kv, i=i: kv[0, :, i].transpose(1, 0, 2, 3))(kv) for i in (0, 1))
        kernel, fetch = tpu_kernels.paged_attention, min(8, call.blocks & -call.blocks)
        f = jax.jit(lambda q, k, v, lens, tables: kernel(q * call.width**-0.5, k, v, lens, tables, pages_per_compute_block=fetch))
        some = q, k, v, lens, tables
    elif platform == "cuda" and gpu_kernels is not None:
        k, v = (jax.jit(lambda kv, i=i: kv[0, :, i].transpose(1, 0, 2, 3))(kv) for i in (0, 1))
        kernel, splits = gpu_kernels.paged_attention, min(16, call.blocks & -call.blocks)
        fetch = max(1, 128 // call.block_size)  # more do not fit into shared memory
        f = jax.jit(
            lambda q, k, v, tables, lens: kernel(
                q * call.width**-0.5, k, v, tables, lens, k_splits=splits, pages_per_compute_block=fetch
            )
        )
        some = q, k, v, tables, lens
    else:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled = f.lower(*some).compile()
    return lambda: compiled(*some)


def torch_sdpa(load: Load, args: tuple[Any, ...], platform: str) -> Run | None:
    """scaled_dot_product_attention over keys and values that lie side by side, without blocks: less than what a pool asks for."""
    call = plain(load)
    if call is None or torch is None or bias is None or platform not in ("cpu", "cuda"):
        return None
    device = "cuda" if platform == "cuda" else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        return None
    make = lambda heads, tokens: torch.randn(call.rows, heads, tokens, call.width, dtype=getattr(torch, call.dtype), device=device)
    q, k, v = make(call.kv_heads * call.group, call.new), make(call.kv_heads, call.context), make(call.kv_heads, call.context)
    mask = None if call.new == 1 else bias.causal_lower_right(call.new, call.context)
    attend = torch.nn.functional.scaled_dot_product_attention

    def run() -> Any:
        with torch.no_grad():
            return attend(q, k, v, attn_mask=mask, enable_gqa=True)

    return run


def whole_weights(load: Load, args: tuple[Any, ...], platform: str) -> Run | None:
    """A product with weights in the dtype of the activations."""
    if not isinstance(load, Quantized):
        return None
    some = args[1], fill(array(load.dtype, load.outputs, load.inputs), 0)
    f = jax.jit(lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ())))).lower(*some).compile()
    return lambda: f(*some)


def ragged_dot(load: Load, args: tuple[Any, ...], platform: str) -> Run | None:
    """XLA's product of groups, with weights [experts, in, out]."""
    if not isinstance(load, Grouped):
        return None
    some = args[1], jax.jit(lambda w: w.swapaxes(1, 2))(args[0]), args[2]
    f = jax.jit(lax.ragged_dot).lower(*some).compile()
    return lambda: f(*some)


def megablox(load: Load, args: tuple[Any, ...], platform: str) -> Run | None:
    """JAX's product of groups for TPU."""
    if not isinstance(load, Grouped) or platform != "tpu" or gmm is None or load.tokens % 128:
        return None
    rhs, lhs, sizes = args
    f = jax.jit(lambda *args: gmm(*args, preferred_element_type=load.dtype, transpose_rhs=True)).lower(lhs, rhs, sizes).compile()
    return lambda: f(lhs, rhs, sizes)


def wait(result: Any) -> None:
    """Until it is there, whoever made it."""
    if torch is not None and isinstance(result, torch.Tensor):
        if result.is_cuda:
            torch.cuda.synchronize()
    else:
        jax.block_until_ready(result)


RIVALS: dict[str, Callable[[Load, tuple[Any, ...], str], Run | None]] = {
    "gather all": gather_all,
    "jax": jax_kernel,
    "torch sdpa": torch_sdpa,
    "whole weights": whole_weights,
    "ragged dot": ragged_dot,
    "megablox": megablox,
}
