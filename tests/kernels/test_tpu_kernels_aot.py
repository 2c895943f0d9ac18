"""The kernels for TPU compiled to machine code for each chip, on a machine without one."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import pallas_kernels as ops
from pallas_kernels.aot.targets import devices_for, missing
from pallas_kernels.common.spec import TYPICAL_ATTENTION, TYPICAL_DECODE
from pallas_kernels.common.targets import CHIPS, MIB, chip
from pallas_kernels.kv_write import mosaic_tpu as kv_write
from pallas_kernels.paged_attention import mosaic_tpu as paged_attention
from pallas_kernels.paged_decode import mosaic_tpu as paged_decode
from pallas_kernels.quant_matmul import Int8Weight

pytestmark = [
    pytest.mark.aot_tpu,
    pytest.mark.skipif(missing("v5e") is not None, reason=str(missing("v5e"))),
]

LAYERS, BLOCKS, ROWS, TABLE = 16, 512, 64, 64


@pytest.fixture(params=[c.name for c in CHIPS if c.platform == "tpu"])
def name(request) -> str:
    return request.param


def compiled(name: str, op, *shapes, donate=()):
    """op, called with arrays of these (dtype, *shape), compiled for one chip."""
    place = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices_for(name)[:1]), ("x",)), jax.P())
    args = [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=place) for dtype, *shape in shapes]
    return jax.jit(op, donate_argnums=donate).trace(*args).lower(lowering_platforms=("tpu",)).compile()


def size(dtype: str, *shape: int) -> int:
    return int(np.prod(shape)) * jnp.dtype(dtype).itemsize


@pytest.mark.parametrize(("dtype", "scales"), [("bfloat16", "none"), ("int8", "token"), ("float8_e4m3fn", "tensor")])
def test_attention_compiles_and_copies_nothing(name, dtype, scales):
    """Both kernels, the prefill one with decode rows: no temporary as large as a layer of the pool."""
    tokens, kv_heads, group, block, width = 256, 2, 4, 128, 128
    pool = (dtype, LAYERS, BLOCKS, 2, kv_heads, block, width)
    kv_scales = {"none": [], "tensor": [("float32", 2)], "token": [("float32", *pool[1:-1])]}[scales]
    options = {"scale": 0.1, "window": 1000 if scales == "token" else None, "soft_cap": None, "chip": chip(name)}

    def attend(q, kv, layer, tables, lens, start, num_decode, *kv_scales):
        given = kv_scales[0] if kv_scales else None
        return paged_attention.attend(q, kv, layer, tables, lens, start, num_decode, sinks=None, kv_scales=given, **options)

    i32 = "int32"
    rows = (i32, ROWS, TABLE), (i32, ROWS), (i32, ROWS + 1), (i32, 1)
    program = compiled(name, attend, ("bfloat16", tokens, kv_heads * group, width), pool, (i32,), *rows, *kv_scales)
    text = program.as_text()
    assert "%paged_decode" in text and "%paged_attention" in text
    assert program.memory_analysis().temp_size_in_bytes < size(dtype, *pool[2:])


def test_large_calls_compile_with_the_sizes_chosen_by_rule(name):
    """The kernels' own limit of VMEM is kept: the compiler would refuse."""
    pool = TYPICAL_DECODE.pool._replace(blocks=BLOCKS, kv_heads=8, block_size=64, width=256)
    for kernel, spec in ((paged_decode, TYPICAL_DECODE), (paged_attention, TYPICAL_ATTENTION)):
        assert kernel.supports(replace(spec, pool=pool), chip(name)) is None
    q, kv = ("bfloat16", 512, 32, 256), ("bfloat16", 4, BLOCKS, 2, 8, 64, 256)

    def attend(q, kv, layer, tables, lens, start, num_decode):
        return paged_attention.attend(
            q,
            kv,
            layer,
            tables,
            lens,
            start,
            num_decode,
            scale=0.1,
            window=None,
            soft_cap=30.0,
            sinks=None,
            kv_scales=None,
            chip=chip(name),
        )

    i32 = "int32"
    assert compiled(name, attend, q, kv, (i32,), (i32, ROWS, 128), (i32, ROWS), (i32, ROWS + 1), (i32, 1))


@pytest.mark.parametrize(("dtype", "tokens", "width"), [("bfloat16", 64, 128), ("bfloat16", 64, 256), ("int8", 512, 128)])
def test_kv_write_is_in_place(name, dtype, tokens, width):
    """Its alias is the whole pool, and the scales, and all that it takes beside them is the new tokens in another order."""
    shape = LAYERS, BLOCKS, 2, 8, 128
    pool, new = (dtype, *shape, width), ("float32", tokens, 8, width)
    kv_scales = [("float32", *shape)] if dtype == "int8" else []

    def write(kv, k, v, layer, slots, *kv_scales):
        return kv_write.write(kv, k, v, layer, slots, kv_scales=kv_scales[0] if kv_scales else None, chip=chip(name))

    arrays = pool, new, new, ("int32",), ("int32", tokens), *kv_scales
    memory = compiled(name, write, *arrays, donate=(0, *([5] if kv_scales else []))).memory_analysis()
    assert memory.alias_size_in_bytes == size(*pool) + sum(size(*x) for x in kv_scales)
    assert memory.temp_size_in_bytes <= (0 if chip(name).fast_memory == 128 * MIB else 8 * size(*new)), "0 where VMEM has room"


def test_kv_write_alone_takes_no_memory(name):
    """The kernel without what prepares its tokens: no temporaries at all."""
    pool, window = ("bfloat16", LAYERS, BLOCKS, 2, 8, 128, 128), 64

    def write(kv, new, layer, slots):
        return kv_write.write_runs(kv, new, layer, slots, window=window, of_scales=False, interpret=False)

    new = ("float32", 1, 2, 8, window + 32, 128)
    memory = compiled(name, write, pool, new, ("int32",), ("int32", window), donate=0).memory_analysis()
    assert memory.alias_size_in_bytes == size(*pool)
    assert memory.temp_size_in_bytes <= (32768 if chip(name).cores > 1 else 0)  # two cores have something of the compiler's own


def test_a_long_write_takes_little_memory(name):
    """8192 tokens of 8 heads, 32 MiB: what a call of the kernel prepares is of 2048."""
    pool, new = ("bfloat16", LAYERS, BLOCKS, 2, 8, 128, 128), ("bfloat16", 8192, 8, 128)

    def write(kv, k, v, layer, slots):
        return kv_write.write(kv, k, v, layer, slots, kv_scales=None, chip=chip(name))

    memory = compiled(name, write, pool, new, new, ("int32",), ("int32", 8192), donate=0).memory_analysis()
    assert memory.alias_size_in_bytes == size(*pool)
    assert memory.temp_size_in_bytes <= 2 * size(*new) * 2048 // 8192 * 6  # in f32, with margins, twice


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_ops_wrap_themselves_under_a_mesh(name, kind):
    """A kernel for each shard, nothing gathered, and the shard of the pool in place."""
    mesh = Mesh(np.array(devices_for(name)), ("x",), axis_types=(kind,))

    def array(dtype: str, *shape: int, spec: P | None = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec or P()))

    def told(*spec) -> dict:
        return {"platform": "tpu"} | ({"sharding": NamedSharding(mesh, P(*spec))} if kind == AxisType.Auto else {})

    heads, by_head = P(None, None, None, "x"), P(None, "x")
    kv, new = array("bfloat16", 2, 64, 2, 8, 128, 128, spec=heads), array("bfloat16", 4, 8, 128, spec=by_head)
    q, tables, lens = array("bfloat16", 4, 32, 128, spec=by_head), array("int32", 4, 16), array("int32", 4)
    weight = Int8Weight(array("int8", 4096, 4096, spec=P("x")), array("float32", 4096, spec=P("x")))  # pyright: ignore[reportArgumentType]
    experts = array("bfloat16", 8, 2048, 1024, spec=P("x"))
    calls = {
        "decode": (lambda q, kv, t, n: ops.paged_decode(q, kv, 0, t, n, scale=1.0, **told(*heads)), (q, kv, tables, lens)),
        "write": (lambda kv, new, slots: ops.kv_write(kv, new, new, 0, slots, num_rows=4, **told(*heads)), (kv, new, lens)),
        "quantized": (lambda x, w: ops.quant_matmul(x, w, **told("x")), (array("bfloat16", 16, 4096), weight)),
        "experts": (
            lambda x, w, sizes: ops.grouped_matmul(x, w, sizes, **told("x")),
            (array("bfloat16", 512, 1024), experts, array("int32", 8)),
        ),
    }
    for what, (f, args) in calls.items():
        program = jax.jit(f, donate_argnums=0 if what == "write" else ()).lower(*args).compile()
        text, memory = program.as_text(), program.memory_analysis()
        assert "tpu_custom_call" in text and "all-gather" not in text, what
        assert memory is not None and memory.temp_size_in_bytes < 5 << 20, what  # less than a shard of a pool or weight
        assert what != "write" or memory.alias_size_in_bytes == size("bfloat16", *kv.shape) // mesh.size
