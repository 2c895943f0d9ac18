"""The whole step of a Llama 3 8B compiled to machine code for an H200 without one: the kernels are in it, the pool is written in
place."""

import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from pagedjax.buckets import Bucket
from pagedjax.config import EngineConfig, ModelConfig, with_options
from pagedjax.device.compile import lower_step
from pagedjax.device.lanes import abstract_lanes
from pagedjax.device.params import abstract_params, shard_layout
from pagedjax.device.sharding import state_shardings
from pagedjax.device.step import StepSpec
from pagedjax.memory import abstract_pool
from pagedjax.models import model_for
from pagedjax.state import DeviceState
from pallas_kernels.aot.targets import devices_for, missing
from tests.test_aot_tpu import HLO_NAMES, LLAMA_3_8B

pytestmark = [
    pytest.mark.aot_gpu,
    pytest.mark.skipif(missing("sm_90a") is not None, reason=str(missing("sm_90a"))),
]


def abstract_state(mesh: Mesh, cfg: ModelConfig, num_blocks: int, kv_dtype: str) -> DeviceState:
    config = with_options(EngineConfig(), {"dtype": "bfloat16", "block_size": 64, "cache.kv_dtype": kv_dtype})
    layout = shard_layout(cfg, 1)
    state = DeviceState(kv=abstract_pool(config, layout.cfg, "cuda", num_blocks), lanes=abstract_lanes(64, 8192, layout.vocab))
    shardings = state_shardings(state, mesh)
    return jax.tree.map(lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), state, shardings)


POOLS = "bfloat16", "int8", "float8_e4m3fn"
# Up to half a minute each: the first is what CI runs.
STEPS = [(bucket, count, dtype) for bucket, count in ((Bucket(64, 64), 2), (Bucket(512, 64), 3)) for dtype in POOLS]


@pytest.mark.parametrize(
    ("bucket", "kernels", "kv_dtype"),
    [pytest.param(*step, marks=[pytest.mark.kernels_full][: i > 0]) for i, step in enumerate(STEPS)],
    ids=str,
)
def test_a_whole_step_attends_by_kernels_and_writes_the_pool_in_place(bucket: Bucket, kernels: int, kv_dtype: str) -> None:
    """A decode bucket has two kernels in its scan over the layers, which write and attend; one of mixed rows has the one for tiles
    of queries besides. Temporaries stay below one layer's K and V."""
    devices = np.asarray(devices_for("sm_90a")[:1]).reshape(1, 1)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    layout, model = shard_layout(LLAMA_3_8B, 1), model_for(LLAMA_3_8B.architecture)
    params = abstract_params(model.param_specs(layout.cfg, "bfloat16", layout.vocab), layout.cfg, mesh, stacked=True)
    state = abstract_state(mesh, LLAMA_3_8B, 2048 if kv_dtype == "bfloat16" else 4096, kv_dtype)
    compiled = lower_step(StepSpec(model, layout.cfg, mesh, 1), bucket, params, state, 8192 // 64).compile()
    text, memory = compiled.as_text() or "", compiled.memory_analysis()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == kernels
    pool = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.kv))
    for leaf in jax.tree.leaves(state.kv):  # the pool, and where it has 8 bits its scales
        of_pool = f"{HLO_NAMES[leaf.dtype.name]}[{','.join(str(n) for n in leaf.shape)}]"
        lines = [line for line in text.splitlines() if of_pool in line]
        assert lines and not [line for line in lines if re.search(r" copy(-start)?\(", line)]
    assert memory is not None
    assert memory.alias_size_in_bytes >= pool
    assert memory.temp_size_in_bytes < pool // LLAMA_3_8B.num_layers, f"{memory.temp_size_in_bytes >> 20} MiB"
