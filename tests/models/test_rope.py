"""Rope scalings against the numbers transformers computes (tests/golden/models.json)."""

import numpy as np
import pytest

from checkpoints.hf_config import model_config, rope_config
from pagedjax.config import RopeConfig
from pagedjax.device.layers import rope_frequencies
from tests.golden.tiny_models import ROPES
from tests.models.goldens import GOLDENS, NAMES


def agrees(cfg: RopeConfig, head_width: int, golden: dict) -> bool:
    """transformers rounds the exponent and the power to float32: 1e-6 relative."""
    freq, factor = rope_frequencies(cfg, head_width)
    wanted = np.asarray(golden["inv_freq"])
    return freq.shape == wanted.shape and np.allclose(freq, wanted, rtol=2e-6, atol=0) and abs(factor - golden["factor"]) < 1e-9


def real_rope(name: str) -> RopeConfig:
    raw = ROPES[name]
    return rope_config(raw["rope_theta"], raw["rope_scaling"], raw["max_position_embeddings"], name)


@pytest.mark.parametrize("name", NAMES)
def test_ropes_of_the_tiny_models(name):
    golden = GOLDENS["models"][name]
    cfg = model_config(golden["config"], name)
    ropes = golden["ropes"]
    if cfg.local_rope is None:
        assert agrees(cfg.rope, cfg.head_width, ropes[""])
    else:
        assert agrees(cfg.rope, cfg.head_width, ropes["full_attention"])
        assert agrees(cfg.local_rope, cfg.head_width, ropes["sliding_attention"])
        assert not agrees(cfg.rope, cfg.head_width, ropes["sliding_attention"])


@pytest.mark.parametrize("name", ROPES)
def test_ropes_of_real_models(name):
    assert agrees(real_rope(name), ROPES[name]["head_dim"], GOLDENS["ropes"][name])


def test_another_scaling_does_not_agree():
    """Control: the comparison tells the scalings from each other."""
    others = [name for name in ROPES if name != "llama_3.1_8b"]
    assert not any(agrees(real_rope(name), 128, GOLDENS["ropes"]["llama_3.1_8b"]) for name in others)
