"""Calls of the ops on the pool with everything that they need, of any size: for tuners, benchmarks and compilers
(workload_matmul.py has those of products). Random numbers are made on the device, blocks lie in random order, nothing is empty."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.common.layout import PoolShape
from pallas_kernels.common.quantized import compute_dtype
from pallas_kernels.common.spec import AttentionSpec, Scales, WriteSpec
from pallas_kernels.common.tuning import Key, attention_key, write_key
from pallas_kernels.kv_write import kv_write
from pallas_kernels.paged_attention import paged_attention
from pallas_kernels.paged_decode import paged_decode


class Load(Protocol):
    """A call of an op."""

    @property
    def op(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def spec(self) -> Any: ...
    @property
    def key(self) -> Key: ...
    @property
    def bytes_floor(self) -> int:
        """What must be read and written, each once."""
        ...

    @property
    def flops(self) -> int:
        """Of its products."""
        ...

    @property
    def donate(self) -> tuple[int, ...]:
        """The arguments that its results are written into."""
        ...

    def shapes(self) -> tuple[Any, ...]:
        """Of the arguments of `function`."""
        ...

    def function(self, backend: str | None) -> Callable[..., Any]: ...
    def arguments(self) -> tuple[Any, ...]:
        """As `shapes`, on the device at hand."""
        ...


def fill(shape: jax.ShapeDtypeStruct, seed: int) -> jax.Array:
    """Numbers without a pattern, made on the device: int8 of the whole range, floats from -2 to 2. By a hash of their places:
    jax.random takes seconds to compile for a CPU."""

    def make() -> jax.Array:
        bits = jnp.zeros(shape.shape, jnp.uint32)
        for axis in range(len(shape.shape)):
            bits = (bits + lax.broadcasted_iota(jnp.uint32, shape.shape, axis) + jnp.uint32(seed + 1)) * jnp.uint32(2654435761)
            bits ^= bits >> 15
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):  # the last mix of MurmurHash3
            bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
        bits ^= bits >> 16
        if shape.dtype == jnp.int8:
            return (bits >> 24).astype(jnp.int8)
        return ((bits >> 8).astype(jnp.float32) * 2.0**-22 - 2).astype(shape.dtype)

    return jax.jit(make)()


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@dataclass(frozen=True)
class Rows:
    """What the ops on the pool have in common: rows of one length, each in blocks of its own."""

    rows: int
    context: int  # tokens of a row, the new ones among them
    kv_heads: int = 8
    group: int = 4
    width: int = 128
    block_size: int = 64
    dtype: str = "bfloat16"
    scales: Scales = "none"
    window: int | None = None
    layers: int = 1
    new: int = 1  # tokens of a row

    @property
    def tokens(self) -> int:
        return self.rows * self.new

    @property
    def blocks(self) -> int:
        """Of a row."""
        return -(-self.context // self.block_size)

    @property
    def pool(self) -> PoolShape:
        return PoolShape(self.layers, 1 + self.rows * self.blocks, self.kv_heads, self.block_size, self.width)

    @property
    def name(self) -> str:
        new = f"{self.new} new, " if self.new > 1 else ""
        kind = self.dtype + {"none": "", "tensor": " scaled", "token": " scaled by token"}[self.scales]
        window = "" if self.window is None else f" window {self.window}"
        sizes = f"K {self.kv_heads} G {self.group} D {self.width} P {self.block_size}"
        return f"{self.rows} x {self.context}, {new}{sizes} {kind}{window}"

    @property
    def wide(self) -> jnp.dtype:
        """Of queries and new keys and values."""
        return compute_dtype(self.dtype)

    @property
    def head_bytes(self) -> int:
        """A key or a value of one head."""
        return self.width * jnp.dtype(self.dtype).itemsize + (4 if self.scales == "token" else 0)

    def pool_shapes(self) -> tuple[jax.ShapeDtypeStruct, tuple[jax.ShapeDtypeStruct, ...]]:
        """(the pool, its scales)."""
        pool = self.pool
        size = pool.layers, pool.blocks, 2, pool.kv_heads, pool.block_size
        scales = {"none": (), "tensor": (array("float32", 2),), "token": (array("float32", *size),)}[self.scales]
        return array(self.dtype, *size, pool.width), scales

    def pool_arrays(self) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        kv, scales = self.pool_shapes()
        return fill(kv, 0), tuple(jnp.full(x.shape, 0.02, x.dtype) for x in scales)

    def tables(self) -> np.ndarray:
        """i32[rows, blocks]: every block but the scrap block, once."""
        order = np.random.default_rng(0).permutation(self.rows * self.blocks)
        return (1 + order).reshape(self.rows, self.blocks).astype(np.int32)


@dataclass(frozen=True)
class Attention(Rows):
    """Of paged_decode, and of paged_attention where rows have more than one new token (or `ragged` says so)."""

    ragged: bool = False
    soft_cap: float | None = None
    sinks: bool = False  # from -1 to 1

    donate = ()

    @property
    def op(self) -> str:
        return "paged_attention" if self.ragged or self.new > 1 else "paged_decode"

    @property
    def spec(self) -> AttentionSpec:
        heads = self.kv_heads * self.group
        sizes = self.tokens, self.rows, self.blocks, heads, self.width, self.pool, self.dtype
        return AttentionSpec(*sizes, self.window, self.soft_cap, self.sinks, self.scales)

    @property
    def name(self) -> str:
        cap = "" if self.soft_cap is None else f" soft cap {self.soft_cap}"
        return super().name + cap + (" sinks" if self.sinks else "")

    @property
    def key(self) -> Key:
        return attention_key(self.spec)

    @property
    def bytes_floor(self) -> int:
        """Whole blocks that are seen, queries, f32 results, tables."""
        first = 0 if self.window is None else max(0, self.context - self.window - self.new + 1) // self.block_size
        blocks = 2 * self.rows * (self.blocks - first) * self.block_size * self.kv_heads * self.head_bytes
        return (
            blocks + self.tokens * self.kv_heads * self.group * self.width * (self.wide.itemsize + 4) + 4 * self.rows * self.blocks
        )

    @property
    def flops(self) -> int:
        """What the causal mask leaves."""
        seen = sum(min(n, self.window or n) for n in range(self.context - self.new + 1, self.context + 1))
        return 4 * self.rows * self.kv_heads * self.group * self.width * seen

    def shapes(self) -> tuple[Any, ...]:
        kv, scales = self.pool_shapes()
        q = array(self.wide, self.tokens, self.kv_heads * self.group, self.width)
        starts = (array("int32", self.rows + 1), array("int32", 1)) if self.op == "paged_attention" else ()
        return kv, q, array("int32", self.rows, self.blocks), array("int32", self.rows), *starts, *scales

    def function(self, backend: str | None) -> Callable[..., Any]:
        scaled = self.scales != "none"
        options: dict[str, Any] = {"scale": self.width**-0.5, "window": self.window, "soft_cap": self.soft_cap, "backend": backend}

        def more(rest):
            sinks = jnp.linspace(-1, 1, self.kv_heads * self.group, dtype=jnp.float32) if self.sinks else None
            return options | {"sinks": sinks, "kv_scales": rest[-1] if scaled else None}

        def decode(kv, q, tables, lens, *rest):
            return paged_decode(q, kv, 0, tables, lens, return_lse=True, **more(rest))

        def attend(kv, q, tables, lens, starts, num_decode, *rest):
            return paged_attention(q, kv, 0, tables, lens, starts, num_decode, **more(rest))

        return attend if self.op == "paged_attention" else decode

    def arguments(self) -> tuple[Any, ...]:
        kv, scales = self.pool_arrays()
        q, lens = fill(self.shapes()[1], 1), jnp.full(self.rows, self.context, jnp.int32)
        starts = ()
        if self.op == "paged_attention":
            num_decode = jnp.full(1, self.rows if self.new == 1 else 0, jnp.int32)
            starts = jnp.arange(self.rows + 1, dtype=jnp.int32) * self.new, num_decode
        return kv, q, jnp.asarray(self.tables()), lens, *starts, *scales


@dataclass(frozen=True)
class Write(Rows):
    """Of kv_write: the last tokens of each row."""

    op = "kv_write"

    @property
    def donate(self) -> tuple[int, ...]:
        return (0, 4) if self.scales == "token" else (0,)

    @property
    def spec(self) -> WriteSpec:
        return WriteSpec(self.tokens, self.rows, self.width, self.pool, self.dtype, self.scales)

    @property
    def key(self) -> Key:
        return write_key(self.spec)

    @property
    def bytes_floor(self) -> int:
        """The new keys and values, read and written."""
        return 2 * self.tokens * self.kv_heads * (self.width * self.wide.itemsize + self.head_bytes) + 4 * self.tokens

    @property
    def flops(self) -> int:
        return 0

    def shapes(self) -> tuple[Any, ...]:
        kv, scales = self.pool_shapes()
        new = array(self.wide, self.tokens, self.kv_heads, self.width)
        return kv, new, new, array("int32", self.tokens), *scales

    def function(self, backend: str | None) -> Callable[..., Any]:
        def write(kv, k, v, slots, *scales):
            return kv_write(kv, k, v, 0, slots, num_rows=self.rows, kv_scales=scales[0] if scales else None, backend=backend)

        return write

    def arguments(self) -> tuple[Any, ...]:
        kv, scales = self.pool_arrays()
        place = self.context - self.new + np.arange(self.new)
        slots = self.tables()[:, place // self.block_size] * self.block_size + place % self.block_size
        new = self.shapes()[1]
        return kv, fill(new, 1), fill(new, 2), jnp.asarray(slots.reshape(-1).astype(np.int32)), *scales
