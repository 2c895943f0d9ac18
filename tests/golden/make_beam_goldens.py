"""Writes beam_search.json: what transformers' beam search returns for toy models.

    python -m tests.golden.make_beam_goldens

in the root of the repository, with torch and transformers 5. The models' logits are those of beam_toys.py.
"""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import transformers
from transformers.modeling_outputs import CausalLMOutput

from tests.golden.beam_toys import PROMPT, VOCAB, toy_logits

HERE = Path(__file__).parent


class Toy(transformers.PreTrainedModel, transformers.GenerationMixin):
    config_class = transformers.PretrainedConfig
    main_input_name = "input_ids"

    def __init__(self, table: np.ndarray):
        super().__init__(transformers.PretrainedConfig(vocab_size=VOCAB))
        self.table = torch.nn.Parameter(torch.tensor(table, dtype=torch.float32), requires_grad=False)

    def forward(self, input_ids: torch.Tensor, **_: object) -> CausalLMOutput:
        return CausalLMOutput(logits=self.table[input_ids[:, -2], input_ids[:, -1]][:, None])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: object) -> dict:
        return {"input_ids": input_ids}


def search(model: int, case: SimpleNamespace) -> list[dict]:
    out = Toy(toy_logits(model)).generate(
        torch.tensor([PROMPT]),
        generation_config=transformers.GenerationConfig(
            num_beams=case.width,
            num_return_sequences=case.width,
            max_new_tokens=case.max_tokens,
            min_new_tokens=case.min_tokens or None,
            length_penalty=case.length_penalty,
            early_stopping=case.early_stopping,
            eos_token_id=case.stop_ids or None,
            pad_token_id=VOCAB,  # no token
            do_sample=False,
            use_cache=False,
            output_scores=True,
            return_dict_in_generate=True,
        ),
    )
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = [token for token in row[len(PROMPT) :] if token != VOCAB]
        found.append({"tokens": tokens, "score": round(score, 5)})
    return found


def main() -> None:
    cases = []
    stops = ([], [5], [5, 11, 17])
    options = itertools.product((2, 3, 5), (1.0, 0.0, 2.0, -0.5), (False, True, "never"), stops, (0, 4))
    for model, (width, length_penalty, early_stopping, stop_ids, min_tokens) in enumerate(options):
        if min_tokens and not stop_ids:
            continue
        case = SimpleNamespace(
            width=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            stop_ids=stop_ids,
            min_tokens=min_tokens,
            max_tokens=(6, 12, 25)[model % 3],
        )
        cases.append({"model": model, **vars(case), "found": search(model, case)})
    head = {"transformers": transformers.__version__, "torch": torch.__version__, "vocab": VOCAB, "prompt": PROMPT}
    lines = ",\n".join(json.dumps(case) for case in cases)
    (HERE / "beam_search.json").write_text(json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
