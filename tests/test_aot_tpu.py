"""The whole step of a Llama 3 8B and of a model of full and window layers, compiled to machine code for TPU without one: our
kernels are in it, and the pool is written in place."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from pagedjax.buckets import Bucket
from pagedjax.config import EngineConfig, ModelConfig, RopeConfig, with_options
from pagedjax.device.compile import lower_read_block, lower_step, lower_write_block
from pagedjax.device.lanes import abstract_lanes
from pagedjax.device.params import abstract_params, shard_layout
from pagedjax.device.sharding import block_in_host_memory, replicated, state_shardings
from pagedjax.device.step import StepSpec
from pagedjax.memory import abstract_pool
from pagedjax.models import model_for
from pagedjax.state import DeviceState
from pallas_kernels.aot.targets import devices_for, missing

pytestmark = [
    pytest.mark.aot_tpu,
    pytest.mark.skipif(missing("v5e") is not None, reason=str(missing("v5e"))),
]

LLAMA_3_8B = ModelConfig(
    architecture="llama",
    vocab_size=128256,
    model_width=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_width=128,
    ffn_width=14336,
    max_positions=8192,
    rope=RopeConfig(theta=500_000.0),
)

# The layers of Gemma 3 4B, 34 of them in 7 groups of 5, with fewer weights and token ids.
WINDOWED = ModelConfig(
    architecture="gemma3",
    vocab_size=8192,
    model_width=2560,
    num_layers=34,
    num_heads=8,
    num_kv_heads=4,
    head_width=256,
    ffn_width=2560,
    max_positions=8192,
    layer_pattern=("window",) * 5 + ("full",),
    window=1024,
    tied_embeddings=True,
)


HLO_NAMES = {"bfloat16": "bf16", "float32": "f32", "int8": "s8", "float8_e4m3fn": "f8e4m3fn"}


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    return mesh_of("v5e")


def mesh_of(chip: str) -> Mesh:
    """Four chips of a host, as libtpu describes them to the compiler."""
    devices = devices_for(chip)
    return Mesh(np.asarray(devices[:4]).reshape(1, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def abstract_state(mesh: Mesh, cfg: ModelConfig, num_blocks: int, kv_dtype: str = "auto") -> DeviceState:
    config = with_options(EngineConfig(), {"dtype": "bfloat16", "block_size": 128, "cache.kv_dtype": kv_dtype})
    layout = shard_layout(cfg, 4)
    state = DeviceState(kv=abstract_pool(config, layout.cfg, "tpu", num_blocks), lanes=abstract_lanes(64, 8192, layout.vocab))
    shardings = state_shardings(state, mesh)
    return jax.tree.map(lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), state, shardings)


def bytes_of_a_chip(state: DeviceState) -> int:
    """Of the pool."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.kv)) // 4


def without_renamed_tiles(text: str) -> str:
    """XLA reads arrays of 8 bits as if their tiles had other heights: by fusions of a copy whose output is their operand in place,
    which move nothing."""
    for name in re.findall(r"^%(copy_fusion\S*) \(", text, re.MULTILINE):
        calls = [line for line in text.splitlines() if re.search(rf"calls=%{re.escape(name)}\b(?!\.)", line)]
        if calls and all("output_to_operand_aliasing={{}: (0, {})}" in line for line in calls):
            text = re.sub(rf"^%{re.escape(name)} \(.*?^}}$", "", text, flags=re.MULTILINE | re.DOTALL)
    return text


@pytest.mark.parametrize(
    ("chip", "cfg", "bucket", "steps", "kv_dtype"),
    [
        ("v5e", LLAMA_3_8B, Bucket(64, 64), 8, "bfloat16"),
        ("v5e", LLAMA_3_8B, Bucket(512, 64), 8, "bfloat16"),
        ("v5e", LLAMA_3_8B, Bucket(512, 64), 1, "int8"),
        ("v5e", WINDOWED, Bucket(64, 64), 1, "bfloat16"),
        ("v6e", LLAMA_3_8B, Bucket(512, 64), 1, "bfloat16"),
        pytest.param("v6e", LLAMA_3_8B, Bucket(64, 64), 8, "float8_e4m3fn", marks=pytest.mark.kernels_full),
    ],
    ids=lambda x: x.architecture if isinstance(x, ModelConfig) else str(x),
)
def test_a_whole_step_uses_the_kernels_and_writes_the_pool_in_place(
    chip: str, cfg: ModelConfig, bucket: Bucket, steps: int, kv_dtype: str
) -> None:
    """Temporaries below one layer's K and V, on each chip; the alias covers the pool, and nothing copies it. With 8 steps a decode
    bucket is a loop around the step."""
    mesh, layout = mesh_of(chip), shard_layout(cfg, 4)
    model = model_for(cfg.architecture)
    params = abstract_params(model.param_specs(layout.cfg, "bfloat16", layout.vocab), layout.cfg, mesh, stacked=True)
    state = abstract_state(mesh, cfg, 2048 if kv_dtype == "bfloat16" else 4096, kv_dtype)
    compiled = lower_step(StepSpec(model, layout.cfg, mesh, steps), bucket, params, state, 8192 // 128).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    pool = bytes_of_a_chip(state)
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool // cfg.layer_groups.size, f"{memory.temp_size_in_bytes >> 20} MiB"
    text = without_renamed_tiles(compiled.as_text() or "")
    kernels = {name for name in ("kv_write", "paged_decode", "paged_attention") if f"%{name}" in text}
    assert kernels == {"kv_write", "paged_decode"} | ({"paged_attention"} if bucket.tokens > bucket.rows else set())
    for leaf in jax.tree.leaves(state.kv):  # the pool, and where it has 8 bits its scales
        shape = ",".join(str(n) for n in (*leaf.shape[:3], leaf.shape[3] // 4, *leaf.shape[4:]))
        of_a_chip = f"{HLO_NAMES[leaf.dtype.name]}[{shape}]"
        assert of_a_chip in text
        assert not re.search(rf"= {re.escape(of_a_chip)}\S* (copy|copy-start|transpose)\(", text)


def test_a_block_moves_alone(mesh: Mesh) -> None:
    """To host memory and back, without the pool. The control: data that is written from where it is."""
    blocks = 256
    state = abstract_state(mesh, LLAMA_3_8B, blocks)
    pool = bytes_of_a_chip(state)
    out, back = lower_read_block(state, mesh).compile(), lower_write_block(state, mesh).compile()
    memory = out.memory_analysis()
    assert memory is not None
    assert memory.host_output_size_in_bytes == pool // blocks and memory.output_size_in_bytes == 0
    assert memory.temp_size_in_bytes < 2 * pool // blocks
    memory = back.memory_analysis()
    assert memory is not None
    assert memory.host_argument_size_in_bytes == pool // blocks and memory.alias_size_in_bytes == pool
    assert memory.temp_size_in_bytes < 2 * pool // blocks

    def write(kv: jax.Array, block: jax.Array, data: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(kv, data, block[0], axis=1)

    kv, everywhere, host = state.kv.sharding, replicated(mesh), block_in_host_memory(mesh)
    control = jax.jit(write, donate_argnums=0, in_shardings=(kv, everywhere, host), out_shardings=kv)
    data = jax.ShapeDtypeStruct((state.kv.shape[0], *state.kv.shape[2:]), state.kv.dtype)  # JAX refuses if told where it is
    memory = control.lower(state.kv, jax.ShapeDtypeStruct((1,), np.int32), data).compile().memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes >= pool
