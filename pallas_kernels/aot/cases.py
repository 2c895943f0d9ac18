"""What is compiled for every chip, whatever was tuned."""

import math
from collections.abc import Sequence
from dataclasses import replace

import jax.numpy as jnp

from pallas_kernels.common.dispatch import Backend, Op
from pallas_kernels.common.targets import Chip
from pallas_kernels.common.tuning import Entry, config_of
from pallas_kernels.workload import Attention, Load, Write
from pallas_kernels.workload_matmul import Grouped, Quantized

# Four layers: pools of more than 2**32 bytes, also of 8 bits; fewer, where that is more than a v5e has.
LARGEST = 12 << 30
DECODE, PREFILL, WRITE = Attention(64, 8192, layers=4), Attention(64, 8192, layers=4, new=32), Write(64, 8192, layers=4)
POOL: dict[str, tuple[Attention | Write, ...]] = {
    "paged_decode": (DECODE, replace(DECODE, dtype="float8_e4m3fn", scales="token")),
    "paged_attention": (PREFILL, replace(PREFILL, dtype="int8", scales="tensor", window=1024)),
    "kv_write": (WRITE, replace(WRITE, dtype="int8", scales="token", new=32), replace(WRITE, new=128)),
}
INT8 = Quantized(64, 4096, 14336)
PRODUCTS: dict[str, tuple[Quantized | Grouped, ...]] = {
    "quant_matmul": (INT8, Quantized(256, 4096, 4096, group=32, zeros=True)),
    "grouped_matmul": (Grouped(16, 2048, 768, experts=128),),
}
MORE_PRODUCTS: dict[str, tuple[Quantized | Grouped, ...]] = {
    "quant_matmul": (
        replace(INT8, int8_activations=True),
        Quantized(1, 4096, 4096),
        Quantized(2048, 4096, 4096),
        Quantized(64, 4096, 4096, "float32"),
        Quantized(17, 200, 77),
        Quantized(1, 4096, 4096, group=128),
        Quantized(64, 14336, 4096, group=128),
        Quantized(64, 4096, 4096, group=64, zeros=True),
        Quantized(2048, 4096, 4096, group=128, zeros=True),
        Quantized(1, 4096, 4096, int8_activations=True),
    ),
    "grouped_matmul": (
        Grouped(512, 4096, 14336),
        Grouped(4096, 4096, 2048),
        Grouped(1, 2048, 768, experts=128),
        Grouped(512, 768, 2048, experts=128),
        Grouped(512, 1024, 2048, "float32"),
        Grouped(100, 200, 77),
    ),
}
SIZES = (
    *({"width": width, "group": group} for width, group in ((64, 8), (80, 1), (96, 5), (192, 2), (256, 2))),
    {"kv_heads": 32, "group": 1},
    {"kv_heads": 1, "group": 32},
    {"kv_heads": 1, "group": 7, "width": 64},
    *({"block_size": size} for size in (16, 32, 64, 128, 256)),
    {"rows": 1},
    {"window": 1024},
    {"dtype": "float32"},
    {"dtype": "float16"},
    *({"dtype": "int8", "scales": scales} for scales in ("tensor", "token")),
    *({"dtype": "float8_e4m3fn", "scales": scales} for scales in ("none", "tensor", "token")),
    {"dtype": "float8_e4m3fn", "scales": "token", "width": 256, "group": 2},
)


def loads_of(op: Op, short: bool, platform: str) -> Sequence[Load]:
    """Of an op, one of each kind; [] for an op that is not known here. Blocks are of 64 tokens, on TPU of 128."""
    if op.name in PRODUCTS:
        return [*PRODUCTS[op.name], *(() if short else MORE_PRODUCTS[op.name])]
    size = 128 if platform == "tpu" else 64
    some = [replace(load, block_size=size) for load in POOL.get(op.name, ())]  # pyright: ignore[reportArgumentType]
    if short or not some:
        return list(some)
    base, found = some[0], list(some)
    for size in SIZES:
        if isinstance(base, Write):
            size = {name: value for name, value in size.items() if name not in ("group", "window")}
        load = replace(base, **size)
        while math.prod(load.pool) * 2 * jnp.dtype(load.dtype).itemsize > LARGEST:
            load = replace(load, layers=load.layers // 2)
        if load not in found:
            found.append(load)
    return found


def load_of_entry(op: Op, entry: Entry) -> Load | None:
    """A call that looks up this entry of the op's tuned.json; None where it holds no sizes of a call."""
    kind = {"paged_decode": Attention, "paged_attention": Attention, "kv_write": Write}.get(op.name)
    product = {"quant_matmul": Quantized, "grouped_matmul": Grouped}.get(op.name)
    try:
        size, shape = 1 << entry["bucket"], dict(entry["shape"])
        if product is not None:
            return product(tokens=size, **shape)
        if kind is Write:
            return Write(rows=1, context=max(8 * size, 8192), new=size, **shape)  # a pool that is larger than what is written
        context = min(size, 32768)
        new = {"ragged": True, "new": min(256, context)} if op.name == "paged_attention" else {}
        return None if kind is None else Attention(rows=max(1, size // context), context=context, **new, **shape)
    except (KeyError, TypeError):
        return None


def most_temporary(load: Quantized | Grouped) -> int:
    """Bytes of temporaries that a product may have, so few that a copy of the weights would be seen where tokens are few: the
    activations again, by groups or in int8, f32 sums in up to 8 parts, scales laid out anew."""
    scales = load.weight.scales.size if isinstance(load, Quantized) and load.group else 0
    return 4 * max(64, load.tokens) * (load.inputs + 8 * load.outputs) + 10 * scales + (1 << 20)


def config_of_entry(entry: Entry, backend: Backend, load: Load, chip: Chip) -> object | None:
    """The config that the entry means, or None."""
    some = backend.candidates(load.spec, chip)
    return config_of(entry, some[0]) if some else None
