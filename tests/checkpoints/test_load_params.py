"""Checkpoints onto meshes: padding, replication, dtypes, stacking, progress."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import load_params, open_checkpoint
from checkpoints.load import resolve_dtype
from pagedjax.device.params import Stacked
from pagedjax.errors import UserError

STORIES = Path(__file__).parents[1] / "golden" / "stories260K"


def load(source, mesh, dtype="float32", stacked=False, progress=None):
    return load_params(open_checkpoint(source), dtype=dtype, mesh=mesh, stacked=stacked, progress=progress)


def test_one_device_holds_the_file_as_it_is(mesh_of, hf_folder, check_weights):
    folder, tensors = hf_folder("gemma3")
    params, layout = load(folder, mesh_of(1))
    assert not layout.maps

    def at(path):
        node = params
        for key in path.split("."):
            node = node[int(key) if isinstance(node, list) else key]
        return np.asarray(node)

    check_weights(at, tensors, "gemma3")


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_padding_adds_zeros_and_copies_of_kv_heads(shards, mesh_of):
    """stories260K: 8 heads in 4 kv groups, feed-forward 172 = 4 * 43."""
    whole, _ = load(STORIES, mesh_of(1))
    padded, layout = load(STORIES, mesh_of(shards))
    width = -(-172 // shards) * shards
    assert layout.cfg.ffn_width == width
    for one, many in zip(whole["layers"], padded["layers"], strict=True):
        plain = {name: np.asarray(value) for name, value in one.items()}
        laid = {name: np.asarray(value) for name, value in many.items()}
        for name in ("gate", "up"):
            np.testing.assert_array_equal(laid[name][:172], plain[name])
            assert laid[name].shape == (width, 64) and not laid[name][172:].any()
        np.testing.assert_array_equal(laid["down"][:, :172], plain["down"])
        assert laid["down"].shape == (64, width) and not laid["down"][:, 172:].any()
        copies = max(1, shards // 4)
        for name in ("k", "v"):
            np.testing.assert_array_equal(laid[name], np.repeat(plain[name], copies, 0))
        np.testing.assert_array_equal(laid["q"], plain["q"])  # two heads in a group, one to each copy
        np.testing.assert_array_equal(laid["o"], plain["o"])
        for name, axis in [("q", 0), ("k", 0), ("gate", 0), ("o", 1), ("down", 1)]:
            shard = many[name].addressable_shards[0].data
            assert shard.shape[axis] * shards == many[name].shape[axis], name
    np.testing.assert_array_equal(np.asarray(padded["embed"]), np.asarray(whole["embed"]))


def test_padded_heads_and_vocabulary(mesh_of, hf_folder):
    """2 kv heads of 2 query heads each on 3 devices: one kv head more, of zeros, and its two query heads."""
    folder, tensors = hf_folder("qwen2")
    params, layout = load(folder, mesh_of(3))
    assert (layout.cfg.num_heads, layout.cfg.num_kv_heads, layout.vocab, layout.cfg.vocab_size) == (6, 3, 42, 40)
    layer = {name: np.asarray(value) for name, value in params["layers"][1].items()}
    prefix = "model.layers.1.self_attn."
    for name, heads in [("q", 4), ("k", 2), ("v", 2)]:
        np.testing.assert_array_equal(layer[name][:heads], tensors[f"{prefix}{name}_proj.weight"].reshape(heads, 8, 32))
        np.testing.assert_array_equal(layer[f"{name}_bias"][:heads], tensors[f"{prefix}{name}_proj.bias"].reshape(heads, 8))
        assert not layer[name][heads:].any() and not layer[f"{name}_bias"][heads:].any()
    np.testing.assert_array_equal(layer["o"][:, :4], tensors[f"{prefix}o_proj.weight"].reshape(32, 4, 8))
    assert layer["o"].shape == (32, 6, 8) and not layer["o"][:, 4:].any()
    embed = np.asarray(params["embed"])
    np.testing.assert_array_equal(embed[:40], tensors["model.embed_tokens.weight"])
    assert embed.shape == (42, 32) and not embed[40:].any()


@pytest.mark.parametrize("shards", [1, 4])
def test_stacked_layers_are_the_same_numbers(shards, mesh_of, hf_folder):
    """Gemma 3: units of two window layers and a full one; five layers leave two over."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    folder, _ = hf_folder("gemma3", num_hidden_layers=5, layer_types=kinds[:5])
    plain, _ = load(folder, mesh_of(shards))
    stacked, layout = load(folder, mesh_of(shards), stacked=True)
    layers = stacked["layers"]
    assert isinstance(layers, Stacked) and (len(layers.unit), len(layers.rest)) == (3, 2)
    for i, expected in enumerate(plain["layers"]):
        for name, value in expected.items():
            found = layers.unit[i][name][0] if i < 3 else layers.rest[i - 3][name]
            np.testing.assert_array_equal(np.asarray(found), np.asarray(value))
    assert layers.unit[0]["q"].sharding.spec == jax.sharding.PartitionSpec(None, *plain["layers"][0]["q"].sharding.spec)


def test_dtypes(mesh_of):
    mesh = mesh_of(1)
    params, _ = load(STORIES, mesh, "bfloat16")
    single, _ = load(STORIES, mesh, "float32")
    assert params["embed"].dtype == params["layers"][0]["q"].dtype == jnp.bfloat16
    assert params["final_norm"].dtype == params["layers"][0]["attention_norm"].dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(params["embed"]), np.asarray(single["embed"].astype(jnp.bfloat16)))


class Platform:
    """A mesh of one device of a platform, as far as resolve_dtype looks."""

    def __init__(self, name):
        self.devices = np.array([type("Device", (), {"platform": name})()])


def test_auto_is_float32_on_cpu_and_the_file_s_dtype_elsewhere():
    checkpoint = replace(open_checkpoint(STORIES), weights_dtype="bfloat16")
    assert resolve_dtype(checkpoint, "auto", Platform("cpu")) == "float32"
    assert resolve_dtype(checkpoint, "auto", Platform("tpu")) == "bfloat16"
    assert resolve_dtype(checkpoint, "bfloat16", Platform("cpu")) == "bfloat16"


def test_progress_counts_bytes_up_to_the_total(mesh_of):
    seen = []
    params, _ = load(STORIES, mesh_of(2), progress=lambda done, total: seen.append((done, total)))
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert len(seen) == len(jax.tree.leaves(params))
    assert all(a[0] < b[0] for a, b in zip(seen, seen[1:], strict=False))
    assert seen[-1] == (size, size)


def test_weights_do_not_change_with_the_file(mesh_of, hf_folder):
    folder, tensors = hf_folder("llama")
    params, _ = load(folder, mesh_of(1))
    file = folder / "model.safetensors"
    with file.open("r+b") as data:  # in place: a mapped file would show it
        data.seek(-4000, 2)
        data.write(b"\0" * 4000)
    np.testing.assert_array_equal(np.asarray(params["final_norm"]), tensors["model.norm.weight"])
    np.testing.assert_array_equal(np.asarray(params["head"]), tensors["lm_head.weight"])


def test_a_reader_that_gives_the_wrong_shape_is_found_out(mesh_of):
    checkpoint = replace(open_checkpoint(STORIES), read=lambda path: np.zeros((3, 3), np.float32))
    with pytest.raises(UserError, match=r"weight embed of .* must have the shape \(512, 64\); got \(3, 3\)"):
        load_params(checkpoint, dtype="float32", mesh=mesh_of(1), stacked=False)
