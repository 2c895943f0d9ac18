"""config.json -> ModelConfig, against values worked out by hand and against transformers' own configuration classes."""

import math

import pytest
import transformers

from checkpoints.hf_config import model_config, repeating_unit
from pagedjax.config import RopeConfig
from pagedjax.errors import UserError


def parse(configs, architecture, **changes):
    config = {key: value for key, value in (configs[architecture] | changes).items() if value != "absent"}
    return model_config(config, "config.json")


def test_llama(configs):
    cfg = parse(configs, "llama")
    sizes = (cfg.vocab_size, cfg.model_width, cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.head_width, cfg.ffn_width)
    assert sizes == (40, 32, 2, 4, 2, 8, 44)
    assert (cfg.max_positions, cfg.norm_eps, cfg.rope, cfg.activation) == (64, 1e-5, RopeConfig(1000.0), "silu")
    assert (cfg.layer_pattern, cfg.window, cfg.attention_bias, cfg.tied_embeddings) == (("full",), None, False, False)
    cfg = parse(configs, "llama", head_dim="absent", num_key_value_heads="absent", tie_word_embeddings=True)
    assert (cfg.head_width, cfg.num_kv_heads, cfg.tied_embeddings) == (8, 4, True)


def test_mistral_sees_a_window_or_not(configs):
    cfg = parse(configs, "mistral")
    assert (cfg.layer_pattern, cfg.window) == (("window",), 9)
    cfg = parse(configs, "mistral", sliding_window=None)
    assert (cfg.layer_pattern, cfg.window) == (("full",), None)


def test_qwen2_windows_begin_at_max_window_layers(configs):
    assert parse(configs, "qwen2").attention_bias
    cfg = parse(configs, "qwen2", use_sliding_window=False, sliding_window=7, max_window_layers=0)
    assert (cfg.layer_pattern, cfg.window) == (("full",), None)
    cfg = parse(configs, "qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=2)
    assert (cfg.layer_pattern, cfg.window) == (("full",), None)
    cfg = parse(configs, "qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=0)
    assert (cfg.layer_pattern, cfg.window) == (("window",), 7)
    cfg = parse(configs, "qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=3, num_hidden_layers=5)
    assert cfg.layer_kinds == ("full", "full", "full", "window", "window")
    with pytest.raises(UserError, match="use_sliding_window must be true; got false"):
        parse(configs, "qwen2", layer_types=["full_attention", "sliding_attention"])


def test_gemma2(configs):
    cfg = parse(configs, "gemma2", num_hidden_layers=4, attn_logit_softcapping=20.0)
    assert cfg.layer_kinds == ("window", "full", "window", "full") and cfg.window == 5
    assert (cfg.attention_scale, cfg.embedding_scale, cfg.activation) == (0.25, math.sqrt(32), "gelu_tanh")
    assert (cfg.attention_soft_cap, cfg.logit_soft_cap, cfg.tied_embeddings, cfg.local_rope) == (20.0, 30.0, True, None)
    assert parse(configs, "gemma2", attn_logit_softcapping=None).attention_soft_cap is None


def test_gemma3(configs):
    scaling = {"rope_type": "linear", "factor": 8.0}
    cfg = parse(configs, "gemma3", rope_local_base_freq=100.0, rope_scaling=scaling)
    assert cfg.layer_pattern == ("window", "window", "full")
    assert (cfg.rope, cfg.local_rope) == (RopeConfig(1000.0, "linear", 8.0), RopeConfig(100.0))
    assert cfg.max_positions == 64  # the file says the scaled length already
    assert (cfg.attention_soft_cap, cfg.logit_soft_cap) == (None, None)
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        cfg = parse(configs, "gemma3", layer_types="absent", num_hidden_layers=8, **{name: 4})
        assert cfg.layer_kinds == ("window", "window", "window", "full") * 2
    cfg = parse(configs, "gemma3", layer_types="absent", num_hidden_layers=7)
    assert cfg.layer_kinds == ("window",) * 5 + ("full", "window")
    both = {"full_attention": {"rope_theta": 5e5, **scaling}, "sliding_attention": {"rope_theta": 50.0, "rope_type": "default"}}
    cfg = parse(configs, "gemma3", rope_theta="absent", rope_parameters=both)
    assert (cfg.rope, cfg.local_rope) == (RopeConfig(5e5, "linear", 8.0), RopeConfig(50.0))


def test_a_multimodal_gemma_leaves_defaults_out():
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34}
    raw = {
        "model_type": "gemma3",
        "text_config": {**text, "sliding_window": 1024, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    }
    cfg = model_config(raw, "config.json")
    assert (cfg.vocab_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_width, cfg.window) == (262_208, 8, 4, 256, 1024)
    assert (cfg.rope, cfg.local_rope) == (RopeConfig(1e6, "linear", 8.0), RopeConfig(1e4))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
FACTOR = 0.1 * math.log(4) + 1


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rope_scalings(key, configs):
    rope = lambda **scaling: parse(configs, "llama", rope_scaling=scaling).rope
    assert rope(**{key: "linear"}, factor=2.5) == RopeConfig(1000.0, "linear", 2.5)
    assert rope(**{key: "llama3"}, **LLAMA3) == RopeConfig(1000.0, "llama3", 8.0, 16)
    assert rope(**{key: "default"}) == RopeConfig(1000.0)
    assert rope(**{key: "yarn"}, **YARN) == RopeConfig(1000.0, "yarn", 4.0, 32, attention_factor=FACTOR)
    given = rope(**{key: "yarn"}, **YARN, beta_fast=16, beta_slow=2, attention_factor=0.5)
    assert given == RopeConfig(1000.0, "yarn", 4.0, 32, beta_fast=16.0, beta_slow=2.0, attention_factor=0.5)
    ratio = rope(**{key: "yarn"}, **YARN, mscale=1.0, mscale_all_dim=0.8).attention_factor
    assert ratio == FACTOR / (0.08 * math.log(4) + 1)


def test_rope_parameters_of_transformers_5(configs):
    parameters = {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}
    cfg = parse(configs, "llama", rope_theta="absent", rope_parameters=parameters)
    assert cfg.rope == RopeConfig(500.0, "llama3", 8.0, 16)
    cfg = parse(configs, "qwen3", rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 70.0})
    assert cfg.rope == RopeConfig(70.0)


def test_the_longest_context_is_the_scaled_one(configs):
    longest = lambda **scaling: parse(configs, "llama", rope_scaling=scaling).max_positions
    assert longest(type="linear", factor=2.5) == 160
    assert longest(type="yarn", **YARN) == 128
    assert longest(type="llama3", **LLAMA3) == 64


@pytest.mark.parametrize("architecture", ["Llama", "Mistral", "Qwen2", "Qwen3", "Gemma2", "Gemma3Text"])
def test_what_transformers_writes_is_understood(architecture):
    theirs = getattr(transformers, f"{architecture}Config")()
    raw = theirs.to_dict()
    cfg = model_config(raw, "config.json")
    assert cfg.layer_kinds == tuple(
        "window" if kind == "sliding_attention" else "full" for kind in raw.get("layer_types") or []
    ) or (cfg.layer_kinds == (("window",) if architecture == "Mistral" else ("full",)) * cfg.num_layers)
    assert (cfg.vocab_size, cfg.model_width, cfg.head_width) == (
        theirs.vocab_size,
        theirs.hidden_size,
        getattr(theirs, "head_dim", 128),
    )
    ropes = raw["rope_parameters"]
    if architecture == "Gemma3Text":
        assert (cfg.rope.theta, cfg.local_rope) == (1e6, RopeConfig(1e4))
    else:
        assert cfg.rope == RopeConfig(ropes["rope_theta"])
    assert cfg.tied_embeddings == theirs.tie_word_embeddings


@pytest.mark.parametrize(
    ("architecture", "changes", "rule"),
    [
        ("llama", {"model_type": "mamba"}, "model_type of config.json must be one of llama, .*; got mamba"),
        ("llama", {"model_type": "absent"}, "model_type of config.json must be one of llama, .*; got None"),
        ("llama", {"hidden_size": "absent"}, "config.json must name hidden_size; it does not"),
        ("llama", {"hidden_size": None}, "config.json holds a value of the wrong type"),
        ("llama", {"hidden_size": "wide"}, "config.json holds a value of the wrong type"),
        ("llama", {"hidden_act": "relu"}, "hidden_act of config.json must be one of silu, .*; got relu"),
        ("llama", {"attention_bias": True}, "attention_bias of config.json must be false for llama; got True"),
        ("qwen3", {"attention_bias": True}, "attention_bias of config.json must be false for qwen3; got True"),
        ("llama", {"mlp_bias": True}, "mlp_bias of config.json must be false for llama; got True"),
        ("llama", {"quantization_config": {"quant_method": "gptq"}}, "weights of config.json must not be quantized; got gptq"),
        (
            "llama",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "must be of type default, linear, llama3 or yarn; got dynamic",
        ),
        ("llama", {"rope_scaling": {"type": "linear"}}, "config.json must name factor; it does not"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope scaling factor must be at least 1; got 0.5"),
        (
            "llama",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "partial_rotary_factor of config.json must be 1 .*; got 0.5",
        ),
        (
            "qwen2",
            {"rope_scaling": {"type": "yarn", "truncate": False, **YARN}},
            "truncate of the yarn scaling .* must be true; got False",
        ),
        (
            "gemma2",
            {"layer_types": ["full_attention"]},
            "layer_types of config.json must have one entry for each of 3 layers; got 1",
        ),
        (
            "gemma2",
            {"layer_types": ["chunked_attention"] * 3},
            "layer_types of config.json must be among .*; got chunked_attention",
        ),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention of config.json must be false; got true"),
        ("llama", {"num_attention_heads": 3}, "num_heads must be a multiple of num_kv_heads; got 3 and 2"),
    ],
)
def test_what_the_engine_does_not_have_is_refused(architecture, changes, rule, configs):
    with pytest.raises(UserError, match=rule):
        parse(configs, architecture, **changes)


def test_repeating_unit():
    assert repeating_unit(("full",) * 4) == ("full",)
    assert repeating_unit(("window", "full") * 2 + ("window",)) == ("window", "full")
    assert repeating_unit(("full", "window", "window")) == ("full", "window", "window")
