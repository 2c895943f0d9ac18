"""Every architecture against transformers in float32: as a list of layers and stacked, prefilled at once and in chunks."""

from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.hf_config import model_config
from pagedjax.config import RopeConfig
from pagedjax.device.sharding import make_mesh
from tests.golden.tiny_models import CONFIGS, LENGTHS, texts
from tests.models.goldens import GOLDENS, NAMES, TOLERANCE, distance, expected, load, open_golden
from tests.models.paging import compiled_pass, run, shuffled_tables

WHOLE = [LENGTHS]
# Prefill in chunks beside decode rows, in either order, then decode steps of both texts, then of one alone.
CHUNKED = [(13, 0), (1, 11), (9, 1), (1, 1), (1, 1), (12, 3), *[(1, 1)] * 8, *[(0, 1)] * 4]
ONLY_LIST = ("llama_linear", "qwen2_yarn")  # their architectures are tested stacked with other ropes

# A weight that only some architectures have, taken away: the comparison must see it.
WITHOUT_WEIGHT = {
    "qwen2": ("k_bias", jnp.zeros_like),
    "qwen3": ("k_norm", jnp.ones_like),
    "gemma2": ("mlp_post_norm", jnp.ones_like),
    "gemma3": ("q_norm", jnp.ones_like),
}
# The same with what only the configuration says.
WITHOUT_FIELD = {
    "llama_llama3": {"rope": RopeConfig(1000.0)},
    "mistral": {"window": 12},
    "gemma2": {"attention_soft_cap": None},
    "gemma3": {"local_rope": None},
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(1)


@pytest.mark.parametrize("name", NAMES)
def test_both_forms_of_a_configuration_mean_the_same(name):
    assert model_config(CONFIGS[name], "older") == model_config(GOLDENS["models"][name]["config"], "newer")


@pytest.mark.parametrize("name", NAMES)
def test_logits_agree_with_transformers(name, mesh, tmp_path):
    checkpoint = open_golden(name, tmp_path)
    wanted, ids = expected(name), texts(name)
    params, cfg = load(checkpoint, mesh, stacked=False)
    tables = shuffled_tables(cfg, ids, 1)
    one_pass = compiled_pass(cfg)
    forward = partial(run, one_pass, params, cfg, mesh, ids)
    whole = forward(WHOLE, tables=tables)
    assert distance(whole, wanted) < TOLERANCE
    assert distance(forward(CHUNKED, tables=shuffled_tables(cfg, ids, 2)), wanted) < TOLERANCE

    wrong = tables.copy()  # control: attention reads the second block of the first text from another place
    wrong[:, 0, 1] = tables[:, 1, 0]
    assert distance(forward(WHOLE, tables=tables, read=lambda *_: wrong), wanted) > 100 * TOLERANCE
    if name in WITHOUT_WEIGHT:
        weight, blank = WITHOUT_WEIGHT[name]
        last = params["layers"][-1]
        less = {**params, "layers": [*params["layers"][:-1], {**last, weight: blank(last[weight])}]}
        assert distance(run(one_pass, less, cfg, mesh, ids, WHOLE, tables=tables), wanted) > 100 * TOLERANCE

    if name in ONLY_LIST:
        return
    params, cfg = load(checkpoint, mesh, stacked=True)
    forward = partial(run, compiled_pass(cfg), params, cfg, mesh, ids)
    assert distance(forward(WHOLE, tables=tables), whole) < 1e-5
    if name in ("llama_llama3", "gemma3"):  # of one kind of layer, and of several with an incomplete last unit
        assert distance(forward(CHUNKED, tables=shuffled_tables(cfg, ids, 3)), wanted) < TOLERANCE


@pytest.mark.parametrize("name", WITHOUT_FIELD)
def test_a_changed_configuration_is_seen(name, mesh, tmp_path):
    params, cfg = load(open_golden(name, tmp_path), mesh, stacked=True)
    cfg = replace(cfg, **WITHOUT_FIELD[name])
    ids = texts(name)
    got = run(compiled_pass(cfg), params, cfg, mesh, ids, WHOLE, tables=shuffled_tables(cfg, ids, 1))
    assert distance(got, expected(name)) > 100 * TOLERANCE


def test_the_layers_of_gemma3_end_in_an_incomplete_unit(tmp_path):
    cfg = open_golden("gemma3", tmp_path).config
    assert cfg.layer_pattern == ("window", "window", "full") and cfg.num_layers % 3 == 1
    assert np.count_nonzero([kind == "full" for kind in cfg.layer_kinds]) == 2
