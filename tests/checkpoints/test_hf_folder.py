"""Hugging Face folders: every weight arrives, and every kind of damage is one clear sentence."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from checkpoints import GenerationDefaults, open_checkpoint
from pagedjax.errors import UserError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_is_its_tensor(architecture, hf_folder, check_weights):
    folder, tensors = hf_folder(architecture)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config.architecture == architecture
    assert checkpoint.weights_dtype == "float32"
    assert checkpoint.tokenizer_source == folder
    check_weights(checkpoint.read, tensors, architecture)


def test_many_files_are_one_model(hf_folder, check_weights):
    folder, tensors = hf_folder("llama")
    places = {name: f"model-0000{i % 3 + 1}-of-00003.safetensors" for i, name in enumerate(tensors)}
    for file in set(places.values()):
        save_file({name: tensors[name] for name in tensors if places[name] == file}, folder / file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    check_weights(open_checkpoint(folder).read, tensors, "llama")

    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(UserError, match=r"model-00002-of-00003.safetensors must be a file \(the index names it\)"):
        open_checkpoint(folder)
    save_file({"other": np.zeros(1, np.float32)}, folder / "model-00002-of-00003.safetensors")
    with pytest.raises(UserError, match="must hold every tensor it names; .* is missing"):
        open_checkpoint(folder)
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(UserError, match="must hold a weight_map"):
        open_checkpoint(folder)


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_half_precision_is_read_as_it_is(kind, hf_folder, check_weights, bfloat16):
    dtype = np.float16 if kind == "float16" else bfloat16

    def halve(tensors):
        for name in tensors:
            tensors[name] = tensors[name].astype(dtype)

    folder, tensors = hf_folder("gemma2", edit=halve)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.weights_dtype == "bfloat16"
    assert checkpoint.read("embed").dtype == dtype
    assert checkpoint.read("final_norm").dtype == np.float32  # one more than the file's, and not rounded again
    check_weights(checkpoint.read, tensors, "gemma2")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_text_part_of_a_multimodal_gemma(prefix, hf_folder, configs, check_weights):
    original = {}

    def rename(tensors):
        original.update(tensors)
        for name in list(tensors):
            tensors[prefix + name.removeprefix("model.")] = tensors.pop(name)
        tensors["vision_tower.patch.weight"] = np.zeros((2, 2), np.float32)
        tensors["multi_modal_projector.weight"] = np.zeros((2, 2), np.float32)

    folder, _ = hf_folder("gemma3", edit=rename)
    text = configs["gemma3"]
    eos = {"eos_token_id": [1, 106]}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text, **eos}))
    checkpoint = open_checkpoint(folder)
    assert checkpoint.defaults.stop_ids == (1, 2, 106)
    check_weights(checkpoint.read, original, "gemma3")


def test_harmless_tensors_are_passed_over(hf_folder, check_weights):
    wanted = {}

    def add(tensors):
        wanted.update(tensors)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)

    folder, _ = hf_folder("qwen2", edit=add)  # tied embeddings, so the head is a copy
    check_weights(open_checkpoint(folder).read, wanted, "qwen2")


def test_defaults_are_the_union_of_both_files(hf_folder):
    sampling = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.1}
    folder, _ = hf_folder("llama", generation={"eos_token_id": [7, 5], "max_new_tokens": 3, **sampling}, eos_token_id=9)
    defaults = open_checkpoint(folder).defaults
    assert defaults == GenerationDefaults(stop_ids=(5, 7, 9), max_tokens=3, **sampling)
    assert defaults.sampling() == {"max_tokens": 3, **sampling}
    folder, _ = hf_folder("llama", generation={"eos_token_id": 7, "do_sample": False, **sampling}, eos_token_id=None)
    assert open_checkpoint(folder).defaults == GenerationDefaults(stop_ids=(7,), temperature=0.0, repetition_penalty=1.1)
    folder, _ = hf_folder("llama")
    assert open_checkpoint(folder).defaults == GenerationDefaults(stop_ids=(2,))


def test_bad_defaults_are_named(hf_folder):
    folder, _ = hf_folder("llama", generation={"temperature": "hot"})
    with pytest.raises(UserError, match="temperature of .*generation_config.json must be a number; got 'hot'"):
        open_checkpoint(folder)
    folder, _ = hf_folder("llama", generation={"max_new_tokens": "all"})
    with pytest.raises(UserError, match="max_new_tokens of .*generation_config.json must be a number; got 'all'"):
        open_checkpoint(folder)
    folder, _ = hf_folder("llama", eos_token_id="</s>")
    with pytest.raises(UserError, match="eos_token_id of config.json must be an integer or a list of them; got </s>"):
        open_checkpoint(folder)


def test_a_missing_tensor_is_named(hf_folder):
    folder, _ = hf_folder("llama", edit=lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(UserError, match=r"must hold the tensor model.layers.1.mlp.up_proj.weight \(for the weight layers.1.up\)"):
        open_checkpoint(folder)
    folder, _ = hf_folder("llama", edit=lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(UserError, match="must hold the tensor lm_head.weight"):
        open_checkpoint(folder)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(hf_folder):
    def cut(tensors):
        tensors["model.layers.0.self_attn.o_proj.weight"] = np.zeros((32, 31), np.float32)

    folder, _ = hf_folder("llama", edit=cut)
    rule = r"o_proj.weight of .* must have the shape \(32, 32\) \(embed x heads x head_width\); got \(32, 31\)"
    with pytest.raises(UserError, match=rule):
        open_checkpoint(folder)


def test_tensors_nobody_asked_for_are_named(hf_folder):
    def add(tensors):
        tensors["model.layers.0.mlp.gate_proj.lora_A"] = tensors["model.layers.0.mlp.gate_proj.lora_B"] = np.zeros(1, np.float32)

    folder, _ = hf_folder("llama", edit=add)
    with pytest.raises(UserError, match="must hold only tensors its configuration asks for; got .*lora_A and 1 more"):
        open_checkpoint(folder)
    folder, _ = hf_folder("qwen3")
    config = json.loads((folder / "config.json").read_text()) | {"model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="must hold only tensors .* got model.layers.0.self_attn.k_norm.weight and 3 more"):
        open_checkpoint(folder)


def test_a_truncated_file_is_one_sentence(hf_folder):
    folder, _ = hf_folder("llama")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size, rule in [
        (0, "must be a safetensors file of at least 8 bytes; got 0"),
        (100, "is truncated or corrupt: its header must fit into 92 bytes"),
        (len(whole) - 1, "is truncated: tensor .* must end within .* bytes of data"),
    ]:
        file.write_bytes(whole[:size])
        with pytest.raises(UserError, match=rule):
            open_checkpoint(folder)


def with_header(path, header, data=b"\0" * 64):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_a_corrupt_file_is_one_sentence(hf_folder):
    folder, _ = hf_folder("llama")
    name = "model.embed_tokens.weight"
    for header, rule in [
        (b"not json", "is corrupt: its header must be JSON"),
        ([1], "is corrupt: its header must be a JSON object; got list"),
        ({name: {"dtype": "F32"}}, f"entry of tensor {name} must have dtype, shape and data_offsets"),
        ({name: {"dtype": "F32", "shape": [1], "data_offsets": [8, 4]}}, "must be ascending and not negative; got 8 to 4"),
        ({name: {"dtype": "F32", "shape": [40, 32], "data_offsets": [0, 8]}}, r"of shape \(40, 32\) must have 5120 bytes; got 8"),
        (
            {name: {"dtype": "F8_E4M3", "shape": [40, 32], "data_offsets": [0, 8]}},
            "must be of type F64, F32, F16, BF16; got F8_E4M3",
        ),
    ]:
        with_header(folder / "model.safetensors", header)
        with pytest.raises(UserError, match=rule):
            open_checkpoint(folder)


def test_pickled_weights_are_refused(hf_folder):
    folder, _ = hf_folder("llama")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="must hold model.safetensors, .* got none"):
        open_checkpoint(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"must hold model.safetensors, .* got only pickled weights \(pytorch_model.bin\)"):
        open_checkpoint(folder)


def test_config_json_must_be_sound(hf_folder, tmp_path, monkeypatch):
    folder, _ = hf_folder("llama")
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json must be JSON"):
        open_checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match="config.json must hold a JSON object; got list"):
        open_checkpoint(folder)
    with monkeypatch.context() as patch:

        def refuse(*_, **__):
            raise PermissionError(13, "Permission denied")

        patch.setattr(Path, "read_text", refuse)
        with pytest.raises(UserError, match="config.json must be JSON; got .*Permission denied"):
            open_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="a model folder must hold config.json or pagedjax.json"):
        open_checkpoint(folder)
    with pytest.raises(UserError, match=f"a model must be a folder, .* {re.escape(str(tmp_path / 'nothing'))} does not exist"):
        open_checkpoint(tmp_path / "nothing")
    with pytest.raises(UserError, match="a weight to read must be one of the model's; got layers.9.q"):
        open_checkpoint(hf_folder("llama")[0]).read("layers.9.q")
