"""GGUF files as llama.cpp's converter writes them: the same model as the Hugging Face folder, and errors for damaged ones."""

import gguf
import numpy as np
import pytest

from checkpoints import GenerationDefaults, open_checkpoint
from checkpoints.gguf_file import read_gguf
from checkpoints.hf_config import model_config
from checkpoints.names import NAMES
from pagedjax.config import RopeConfig
from pagedjax.errors import UserError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_weight_is_its_tensor(architecture, gguf_file, check_weights):
    path, tensors = gguf_file(architecture)
    checkpoint = open_checkpoint(path)
    assert checkpoint.weights_dtype == "float32"
    check_weights(checkpoint.read, tensors, architecture, rtol=1e-6)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_configuration_is_that_of_the_folder(architecture, gguf_file, configs):
    changes = {"layer_types": None, "num_hidden_layers": 8, "sliding_window_pattern": 6} if architecture == "gemma3" else {}
    if architecture.startswith("gemma"):
        changes |= {"query_pre_attn_scalar": 8}  # the head width, as in every Gemma but the largest
    path, _ = gguf_file(architecture, **changes)
    ours, theirs = open_checkpoint(path).config, model_config(configs[architecture] | changes, "config.json")
    if architecture == "gemma3":
        assert ours.layer_kinds == theirs.layer_kinds
    names = set(type(ours).__dataclass_fields__) - ({"architecture"} if architecture == "mistral" else set())
    for name in names:
        assert getattr(ours, name) == getattr(theirs, name), name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_agree_with_those_of_the_gguf_package(architecture):
    arch = gguf.MODEL_ARCH["LLAMA" if architecture == "mistral" else architecture.upper()]
    theirs = gguf.get_tensor_name_map(arch, 3)
    module = NAMES[architecture]
    for name in [*module.TOP.values(), *module.LAYER.values()]:
        if architecture == "gemma2" and name.hf == "lm_head.weight":
            continue  # always tied: the package knows no such tensor
        assert theirs.get_name(name.hf.format(n=2), try_suffixes=(".weight", ".bias")) == name.gguf.format(n=2)


def test_the_header_is_read_as_by_the_gguf_package(gguf_file):
    more = {"a.list": [1, 2], "a.words": ["x", "y"], "a.flag": True, "a.number": 0.5, "a.text": "é"}
    path, _ = gguf_file("qwen3", metadata=more)
    metadata, tensors = read_gguf(path)
    theirs = gguf.GGUFReader(path)
    expected = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert metadata == expected
    assert metadata["tokenizer.ggml.tokens"][3] == "t3é"
    assert {t.name: tuple(t.shape[::-1].tolist()) for t in theirs.tensors} == {name: t.shape for name, t in tensors.items()}
    for t in theirs.tensors:
        np.testing.assert_array_equal(tensors[t.name].read(), t.data)


def test_defaults_and_tokenizer_come_from_the_metadata(gguf_file):
    path, _ = gguf_file(
        "llama",
        metadata={
            "tokenizer.ggml.eot_token_id": 9,
            "tokenizer.ggml.eom_token_id": 8,
            "general.sampling.temp": 0.5,
            "general.sampling.top_k": 7,
        },
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.defaults == GenerationDefaults(stop_ids=(2, 8, 9), temperature=0.5, top_k=7)
    assert isinstance(checkpoint.tokenizer_source, dict)
    assert checkpoint.tokenizer_source["tokenizer.ggml.model"] == "gpt2"


def llama3_factors(factor, original, theta=1000.0, width=8):
    """By the formula of transformers: wavelengths are kept, divided, or blended between the two borders."""
    out = []
    for i in range(width // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / width)
        smooth = (original / wavelength - 1) / 3
        if wavelength < original / 4:
            out.append(1.0)
        elif wavelength > original / 1:
            out.append(factor)
        else:
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize(
    ("factor", "original", "metadata"), [(8.0, 8192, {}), (32.0, 500, {"llama.rope.scaling.original_context_length": 500})]
)
def test_llama3_scaling_is_told_from_its_factors(factor, original, metadata, gguf_file):
    factors = llama3_factors(factor, original, theta=1e6)
    assert factors[1:3].max() > 1 and factors.max() == factor  # else nothing is tested
    path, _ = gguf_file("llama", extra={"rope_freqs.weight": factors}, rope_theta=1e6, metadata=metadata)
    assert open_checkpoint(path).config.rope == RopeConfig(1e6, "llama3", factor, original)


def test_other_rope_factors_are_refused(gguf_file):
    path, _ = gguf_file("llama", extra={"rope_freqs.weight": np.ones(4, np.float32)})
    assert open_checkpoint(path).config.rope == RopeConfig(1000.0)
    path, _ = gguf_file("llama", extra={"rope_freqs.weight": np.array([1, 2, 3, 5], np.float32)})
    with pytest.raises(UserError, match="rope_freqs.weight of .* must be the factors of Llama 3 rope scaling; got 4 up to 5"):
        open_checkpoint(path)


def test_rope_scalings(gguf_file):
    rope = lambda **more: (
        open_checkpoint(gguf_file("qwen2", metadata={f"qwen2.rope.{k}": v for k, v in more.items()})[0]).config.rope
    )
    assert rope(**{"scaling.type": "linear", "scaling.factor": 2.5}) == RopeConfig(1000.0, "linear", 2.5)
    assert rope(scale_linear=2.5) == RopeConfig(1000.0, "linear", 2.5)
    assert rope(**{"scaling.type": "none", "scaling.factor": 2.5}) == RopeConfig(1000.0)
    yarn = rope(**{"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32})
    assert yarn == RopeConfig(1000.0, "yarn", 4.0, 32, attention_factor=0.1 * np.log(4) + 1)
    with pytest.raises(UserError, match="rope.scaling.type of .* must be none, linear or yarn; got longrope"):
        rope(**{"scaling.type": "longrope", "scaling.factor": 4.0})


def test_gemma_by_size_and_by_newer_keys(gguf_file):
    path, _ = gguf_file("gemma2", num_hidden_layers=46)
    assert open_checkpoint(path).config.attention_scale == (32 // 4) ** -0.5
    path, _ = gguf_file("gemma3", num_hidden_layers=62, head_dim=6)
    assert open_checkpoint(path).config.attention_scale == (32 // 4) ** -0.5
    more = {"gemma3.attention.scale": 0.25, "gemma3.rope.freq_base_swa": 50.0, "gemma3.final_logit_softcapping": 7.0}
    path, _ = gguf_file("gemma3", metadata=more | {"gemma3.attention.sliding_window_pattern": [True, False, True]})
    cfg = open_checkpoint(path).config
    assert (cfg.attention_scale, cfg.local_rope, cfg.logit_soft_cap) == (0.25, RopeConfig(50.0), 7.0)
    assert cfg.layer_kinds == ("window", "full", "window")


def test_lists_by_layer_must_agree(gguf_file):
    path, _ = gguf_file("llama", metadata={"llama.attention.clamp_kqv": 0.0})
    assert open_checkpoint(path).config.num_kv_heads == 2
    for key, value, rule in [
        ("llama.expert_count", 4, "llama.expert_count of .* must be 0 or absent; got 4"),
        ("llama.rope.dimension_count", 4, "rope.dimension_count must equal the width of a head, 8; got 4"),
        ("split.count", 2, "must hold the whole model; got one of 2 parts"),
    ]:
        path, _ = gguf_file("llama", metadata={key: value})
        with pytest.raises(UserError, match=rule):
            open_checkpoint(path)
    path, _ = gguf_file("gemma3", metadata={"gemma3.attention.sliding_window_pattern": [True]})
    with pytest.raises(UserError, match="sliding_window_pattern must have one entry for each of 3 layers; got 1"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("key", "value", "rule"),
    [
        ("rope.freq_base", "much", "llama.rope.freq_base of .* must be a number; got 'much'"),
        ("context_length", [64, 64], "llama.context_length of .* must be one number; got a list"),
        ("rope.scaling.type", 3, "llama.rope.scaling.type of .* must be a text; got 3"),
        ("rope.scaling.factor", "x", "llama.rope.scaling.factor of .* must be a number; got 'x'"),
        ("attention.head_count", 0, "must name block_count, .* head_count and .*; got .*by zero"),
    ],
)
def test_values_of_the_wrong_kind_are_named(key, value, rule, gguf_file):
    whole = {"head_dim": 0} if key == "attention.head_count" else {}
    path, _ = gguf_file("llama", metadata={f"llama.{key}": value}, **whole)
    with pytest.raises(UserError, match=rule):
        open_checkpoint(path)


def test_defaults_of_the_wrong_kind_are_named(gguf_file):
    for key, value, rule in [
        ("tokenizer.ggml.eot_token_id", "end", "tokenizer.ggml.eot_token_id must be a token id; got 'end'"),
        ("general.sampling.temp", "hot", "general.sampling.temp must be a number; got 'hot'"),
        ("split.count", "two", "must hold the whole model; got one of two parts"),
    ]:
        path, _ = gguf_file("llama", metadata={key: value})
        with pytest.raises(UserError, match=rule):
            open_checkpoint(path)


def write(path, architecture, metadata, tensors):
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        (writer.add_array if isinstance(value, list) else writer.add_uint32)(key, value)
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_unknown_and_incomplete_files_are_refused(tmp_path):
    embedding = {"token_embd.weight": np.zeros((4, 8), np.float32)}
    with pytest.raises(UserError, match="general.architecture of .* must be one of llama, .*; got mamba"):
        open_checkpoint(write(tmp_path / "a.gguf", "mamba", {}, embedding))
    with pytest.raises(UserError, match="must name block_count, embedding_length, head_count and feed_forward_length"):
        open_checkpoint(write(tmp_path / "b.gguf", "llama", {"llama.block_count": 1}, embedding))
    with pytest.raises(UserError, match="must hold the tensor token_embd.weight"):
        open_checkpoint(write(tmp_path / "c.gguf", "llama", {}, {"x": np.zeros(4, np.float32)}))
    sizes = {"block_count": 1, "embedding_length": 8, "feed_forward_length": 8}
    metadata = {f"llama.{key}": value for key, value in sizes.items()} | {"llama.attention.head_count": [2, 1]}
    with pytest.raises(UserError, match=r"num_heads must be the same in every layer; got \[1, 2\]"):
        open_checkpoint(write(tmp_path / "d.gguf", "llama", metadata, embedding))
    metadata["llama.attention.head_count"] = [2, 2]
    with pytest.raises(UserError, match="must hold the tensor blk.0.attn_norm.weight"):
        open_checkpoint(write(tmp_path / "e.gguf", "llama", metadata, embedding))


def test_a_truncated_file_is_one_sentence(gguf_file):
    path, _ = gguf_file("llama")
    whole = path.read_bytes()
    header = whole.index(b"token_embd.weight")
    for size, rule in [
        (10, "must be a GGUF file of at least 24 bytes; got 10"),
        (200, "is truncated or corrupt: its header must end within 200 bytes"),
        (whole.index(b"t30"), "is truncated or corrupt: its header must end within"),
        (header + 3, "is truncated or corrupt: its header must end within"),
        (len(whole) - 200, "is truncated: tensor .* must end within .* bytes"),
    ]:
        path.write_bytes(whole[:size])
        with pytest.raises(UserError, match=rule):
            open_checkpoint(path)


def test_a_corrupt_file_is_one_sentence(gguf_file, tmp_path):
    path, _ = gguf_file("llama")
    whole = path.read_bytes()
    key = whole.index(b"llama.block_count") + len(b"llama.block_count")
    for edited, rule in [
        (b"GGML" + whole[4:], "must begin with the bytes GGUF; got b'GGML'"),
        (whole[:4] + b"\0\0\0\3" + whole[8:], "must be of GGUF version 2 or 3, little endian; got 50331648"),
        (whole[:key] + b"\x63" + whole[key + 1 :], "a metadata value must be of type 0 to 12; got 99"),
        (whole.replace(b"t3\xc3\xa9", b"t3\xc3\xc3"), "is corrupt: its strings must be UTF-8"),
        (whole.replace(b"llama.block", b"llama.bl\xffck"), "is corrupt: its strings must be UTF-8"),
    ]:
        path.write_bytes(edited)
        with pytest.raises(UserError, match=rule):
            open_checkpoint(path)
    items = whole.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8  # kind of the value, of its items
    path.write_bytes(whole[:items] + (2**63).to_bytes(8, "little") + whole[items + 8 :])
    with pytest.raises(UserError, match="is truncated or corrupt: its header must end within"):
        open_checkpoint(path)
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(UserError, match="a model file must end in .gguf; got .*model.safetensors"):
        open_checkpoint(tmp_path / "model.safetensors")
