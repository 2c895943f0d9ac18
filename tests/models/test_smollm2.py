"""A real model: SmolLM2-135M-Instruct from a GGUF file, against transformers on the same dequantized weights."""

import json
from pathlib import Path

import numpy as np
import pytest

from checkpoints import open_checkpoint
from pagedjax.device.sharding import make_mesh
from tests.models.goldens import FOLDER, load
from tests.models.paging import compiled_pass, run, shuffled_tables

GGUF = Path(__file__).parents[2] / ".models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
GOLDEN = json.loads((FOLDER / "smollm2_logits.json").read_text(encoding="utf-8"))
TOLERANCE = 2e-4  # absolute, on logits that vary by 8 units, after 30 layers


@pytest.mark.skipif(not GGUF.exists(), reason=f"needs .models/{GGUF.name}, which `make models` fetches")
def test_logits_of_smollm2():
    mesh = make_mesh(1)
    params, cfg = load(open_checkpoint(GGUF), mesh, stacked=True)
    prompts = GOLDEN["prompts"]
    ids = [prompt["ids"] for prompt in prompts]
    steps = [[len(x) - 3 for x in ids], [1, 1, 1], [1, 1, 1], [1, 1, 1]]
    got = run(compiled_pass(cfg), params, cfg, mesh, ids, steps, tables=shuffled_tables(cfg, ids, 4))
    for prompt, logits in zip(prompts, got, strict=True):
        logits = logits.astype(np.float64)
        best = np.take_along_axis(logits, np.asarray(prompt["best_ids"]), axis=1)
        assert np.abs(best - np.asarray(prompt["best_logits"])).max() < TOLERANCE
        assert np.abs(np.log(np.exp(logits).sum(1)) - np.asarray(prompt["logsumexp"])).max() < TOLERANCE
        assert list(logits.argmax(1)) == [row[0] for row in prompt["best_ids"]]
