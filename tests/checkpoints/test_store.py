"""Our Orbax folder: what was written comes back bit by bit, on any mesh; nothing is half-written; damage is one sentence."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from checkpoints import load_params, open_checkpoint
from checkpoints.convert import convert
from checkpoints.store import save_store
from pagedjax.errors import UserError

STORIES = Path(__file__).parents[1] / "golden" / "stories260K"


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("store") / "stories"
    convert(STORIES, folder)
    return folder


def assert_same(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype and a.sharding == b.sharding
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


@pytest.mark.parametrize(
    ("shards", "dtype", "stacked"),
    [(n, dtype, False) for n in (1, 2, 4, 8) for dtype in ("float32", "bfloat16")] + [(2, "float32", True), (8, "bfloat16", True)],
)
def test_a_round_trip_is_exact_on_every_mesh(shards, dtype, stacked, stored, mesh_of):
    """On 8 devices it is padded (one kv head becomes two, 172 becomes 176), so read weight by weight; else restored at once."""
    options = {"dtype": dtype, "mesh": mesh_of(shards), "stacked": stacked}
    ours, layout = load_params(open_checkpoint(stored), **options)
    theirs, expected = load_params(open_checkpoint(STORIES), **options)
    assert layout == expected
    assert_same(ours, theirs)


def test_what_needs_no_padding_is_restored_into_its_shards(stored, mesh_of):
    checkpoint = open_checkpoint(stored)
    assert checkpoint.restore is not None
    seen = {}

    def restore(abstract):
        seen.update(abstract)
        return checkpoint.restore(abstract)

    def read(path):
        raise AssertionError(path)

    told = []
    params, _ = load_params(
        type(checkpoint)(**{**vars(checkpoint), "restore": restore, "read": read}),
        dtype="float32",
        mesh=mesh_of(4),
        stacked=False,
        progress=lambda done, total: told.append((done, total)),
    )
    assert seen["layers.3.q"].sharding == params["layers"][3]["q"].sharding
    assert len(params["layers"][3]["q"].addressable_shards) == 4
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert told == [(size, size)]


def test_everything_but_the_weights_comes_back_too(stored):
    ours, theirs = open_checkpoint(stored), open_checkpoint(STORIES)
    assert (ours.config, ours.defaults, ours.weights_dtype) == (theirs.config, theirs.defaults, "float32")
    assert isinstance(ours.tokenizer_source, Path)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (ours.tokenizer_source / name).read_bytes() == (STORIES / name).read_bytes()
    np.testing.assert_array_equal(ours.read("layers.4.o"), theirs.read("layers.4.o"))


@pytest.mark.parametrize("architecture", ["mistral", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_every_architecture_round_trips(architecture, hf_folder, tmp_path, mesh_of):
    folder, _ = hf_folder(architecture, generation={"temperature": 0.7, "eos_token_id": [3, 4]})
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    checkpoint = convert(folder, tmp_path / "out")
    original = open_checkpoint(folder)
    assert isinstance(checkpoint.tokenizer_source, Path)
    assert (checkpoint.tokenizer_source / "additional_chat_templates" / "tools.jinja").read_text() == "{{ messages }}"
    assert (checkpoint.config, checkpoint.defaults) == (original.config, original.defaults)
    options = {"dtype": "float32", "mesh": mesh_of(2), "stacked": False}
    assert_same(load_params(checkpoint, **options)[0], load_params(original, **options)[0])


def test_a_gguf_file_keeps_its_tokenizer(gguf_file, tmp_path, mesh_of):
    path, _ = gguf_file("llama")
    told = []
    checkpoint = convert(path, tmp_path / "out", dtype="bfloat16", progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 0
    assert checkpoint.weights_dtype == "bfloat16"
    assert str(checkpoint.read("embed").dtype) == "bfloat16" and checkpoint.read("final_norm").dtype == np.float32
    original = open_checkpoint(path).tokenizer_source
    assert isinstance(original, dict)
    kept = {key: value for key, value in original.items() if not key.startswith("llama.")}
    assert checkpoint.tokenizer_source == kept
    options = {"dtype": "bfloat16", "mesh": mesh_of(1), "stacked": False}
    assert_same(load_params(checkpoint, **options)[0], load_params(open_checkpoint(path), **options)[0])


def test_an_existing_folder_is_never_touched(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="the folder to write must not exist; .*out does"):
        convert(STORIES, tmp_path / "out")
    with pytest.raises(UserError, match="must be in an existing folder; .*nowhere does not exist"):
        convert(STORIES, tmp_path / "nowhere" / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and not list((tmp_path / "out").iterdir())


def test_a_failure_leaves_nothing_behind(tmp_path):
    checkpoint = open_checkpoint(STORIES)
    broken = type(checkpoint)(**{**vars(checkpoint), "tokenizer_source": {"tokenizer.ggml.x": object()}})
    with pytest.raises(TypeError):
        save_store(tmp_path / "out", broken, {"embed": checkpoint.read("embed")})
    assert not list(tmp_path.iterdir())
    with pytest.raises(UserError, match="does not exist"):
        convert(tmp_path / "no-model", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_damaged_folder_is_one_sentence(stored, tmp_path):
    def copy():
        folder = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(stored, folder)
        return folder, json.loads((folder / "pagedjax.json").read_text())

    def write(folder, card):
        (folder / "pagedjax.json").write_text(json.dumps(card))
        return folder

    folder, card = copy()
    with pytest.raises(UserError, match="format of .*pagedjax.json must be 1; got 2"):
        open_checkpoint(write(folder, card | {"format": 2}))
    with pytest.raises(UserError, match="pagedjax.json must hold what pagedjax writes there; got 'defaults'"):
        open_checkpoint(write(folder, {"format": 1, "config": card["config"]}))
    with pytest.raises(
        UserError, match="pagedjax.json must hold what pagedjax writes there; got .*unexpected keyword argument 'depth'"
    ):
        open_checkpoint(write(folder, card | {"config": card["config"] | {"depth": 3}}))
    with pytest.raises(
        UserError, match=r"weight layers.0.gate of .* must have the shape \(173, 64\) \(ffn x embed\); got \(172, 64\)"
    ):
        open_checkpoint(write(folder, card | {"config": card["config"] | {"ffn_width": 173}}))
    with pytest.raises(UserError, match="must hold the weight layers.5.attention_norm; it does not"):
        open_checkpoint(write(folder, card | {"config": card["config"] | {"num_layers": 6}}))
    with pytest.raises(UserError, match="must hold only weights its configuration asks for; got layers.4.attention_norm"):
        open_checkpoint(write(folder, card | {"config": card["config"] | {"num_layers": 4}}))

    folder, _ = copy()
    data = max((folder / "weights").rglob("d/*"), key=lambda path: path.stat().st_size)
    whole = data.read_bytes()
    data.write_bytes(whole[:-50])
    with pytest.raises(
        UserError, match=rf"{data.name} is truncated or changed: it must have {len(whole)} bytes; got {len(whole) - 50}"
    ):
        open_checkpoint(folder)
    data.unlink()
    with pytest.raises(UserError, match=rf"{data.name} must be a file; it does not exist"):
        open_checkpoint(folder)
    data.write_bytes(whole)
    about = folder / "weights" / "_METADATA"
    about.write_text(" " * about.stat().st_size)
    with pytest.raises(UserError, match="weights must be a complete Orbax folder; its metadata cannot be read"):
        open_checkpoint(folder)
    shutil.rmtree(folder / "weights")
    with pytest.raises(UserError, match="weights must be a folder; it does not exist"):
        open_checkpoint(folder)
