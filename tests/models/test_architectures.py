"""The table of architectures, and types in bfloat16 (no arithmetic: abstract values only)."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pagedjax.config import ModelConfig
from pagedjax.device.attention import Rows
from pagedjax.device.params import ParamSpec, Stacked, map_specs
from pagedjax.device.sharding import make_mesh
from pagedjax.errors import UserError
from pagedjax.models import ARCHITECTURES, model_for
from tests.models.paging import BLOCK, ROWS


def config(architecture: str) -> ModelConfig:
    return ModelConfig(architecture, 64, 32, 3, 4, 2, 8, 48, 128, layer_pattern=("window", "full"), window=16, attention_bias=True)


def test_an_unknown_architecture_is_refused():
    with pytest.raises(UserError, match="architecture must be one of llama, mistral, .*; got bert"):
        model_for("bert")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tokens", [ROWS, 16])
def test_activations_are_float32_and_the_pool_keeps_its_dtype(architecture, tokens):
    cfg, model = config(architecture), model_for(architecture)

    def abstract(path: str, spec: ParamSpec, lead: tuple[int, ...] = ()) -> Any:
        return jax.ShapeDtypeStruct((*lead, *spec.shape), jnp.dtype(spec.dtype))

    specs = model.param_specs(cfg, "bfloat16", 64)
    layer = specs["layers"][0]
    unit = {name: abstract(name, spec, (1,)) for name, spec in layer.items()}
    rest = {name: abstract(name, spec) for name, spec in layer.items()}
    params = map_specs(abstract, specs)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    groups = cfg.layer_groups
    slots, tables = ints(groups.count, tokens), ints(groups.count, ROWS, 2)
    rows = Rows(slots, ints(tokens), ints(ROWS + 1), ints(1), ints(ROWS), tables, mesh=make_mesh(1))
    kv = jax.ShapeDtypeStruct((groups.size, 6, 2, cfg.num_kv_heads, BLOCK, cfg.head_width), jnp.bfloat16)
    for layers in (params["layers"], Stacked(unit=(unit, unit), rest=(rest,))):
        whole = {**params, "layers": layers}
        hidden, pool = jax.eval_shape(lambda *a: model.forward(*a, cfg), whole, ints(tokens), kv, rows)
        assert (hidden.shape, hidden.dtype) == ((tokens, cfg.model_width), jnp.float32)
        assert (pool.shape, pool.dtype) == (kv.shape, kv.dtype)
        scores = jax.eval_shape(lambda p, h: model.logits(p, h, cfg), whole, hidden)
        assert (scores.shape, scores.dtype) == ((tokens, 64), jnp.float32)
