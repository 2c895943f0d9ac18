"""Writes models.json and models_logits.npz: what transformers computes for the models of tiny_models.py.

    python -m tests.golden.make_model_goldens

in the root of the repository, with torch and transformers 5. Per model: the configuration as transformers saves it, the tensors'
shapes and a checksum of their values, the rope's inverse wavelengths and factor of each kind of layer; the same of the ropes of
real models; and the logits of each text in float32 with eager attention.
"""

import datetime
import json
import re
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.golden.tiny_models import CONFIGS, ROPES, texts, weights

HERE = Path(__file__).parent


def build(name: str) -> tuple[transformers.PreTrainedModel, dict[str, list[int]], float]:
    """(the model with its weights, shapes of the weights, sum of their absolute values)."""
    raw = dict(CONFIGS[name])
    config = transformers.CONFIG_MAPPING[raw.pop("model_type")](**raw)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    state = model.state_dict()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    shapes = {key: list(value.shape) for key, value in state.items()}
    values = weights(name, shapes)
    left = model.load_state_dict({key: torch.from_numpy(value) for key, value in values.items()}, strict=False)
    assert not left.unexpected_keys and left.missing_keys in ([], ["lm_head.weight"]), left
    model.tie_weights()
    return model, shapes, sum(float(np.abs(value.astype(np.float64)).sum()) for value in values.values())


def rope_numbers(rope: torch.nn.Module) -> dict[str, dict[str, object]]:
    """What a rotary embedding holds, per kind of layer ("" where all share one)."""
    kinds = [name.removesuffix("inv_freq") for name in dict(rope.named_buffers()) if not name.endswith("original_inv_freq")]
    return {
        kind.removesuffix("_"): {
            "inv_freq": [float(f"{x:.9g}") for x in getattr(rope, f"{kind}inv_freq").tolist()],
            "factor": float(getattr(rope, f"{kind}attention_scaling")),
        }
        for kind in kinds
    }


def main() -> None:
    described, logits = {}, {}
    for name in CONFIGS:
        model, shapes, total = build(name)
        with torch.no_grad():
            for i, ids in enumerate(texts(name)):
                logits[f"{name}.{i}"] = model(torch.tensor([ids])).logits[0].numpy()
        described[name] = {
            "config": json.loads(model.config.to_json_string()),
            "shapes": shapes,
            "sum": total,
            "ropes": rope_numbers(model.model.rotary_emb),
        }
        values = logits[f"{name}.0"]
        print(f"{name}: logits {values.shape}, standard deviation {values.std():.2f}, largest {np.abs(values).max():.2f}")
    made = {"torch": torch.__version__, "transformers": transformers.__version__, "date": datetime.date.today().isoformat()}
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
    real = {name: rope_numbers(rotary(transformers.LlamaConfig(**config)))[""] for name, config in ROPES.items()}
    text = json.dumps({"made": made, "models": described, "ropes": real}, indent=1)
    text = re.sub(r"\[[^][{}]*\]", lambda found: " ".join(found[0].split()), text)  # lists of numbers on one line
    (HERE / "models.json").write_text(text + "\n", encoding="utf-8")
    np.savez_compressed(HERE / "models_logits.npz", **logits)


if __name__ == "__main__":
    main()
