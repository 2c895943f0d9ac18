"""Writes smollm2_logits.json: what transformers computes for a few prompts on the dequantized weights of SmolLM2-135M-Instruct.

    python -m tests.golden.make_smollm2_goldens .models/SmolLM2-135M-Instruct.Q4_1.gguf

in the root of the repository, with torch, transformers 5 and gguf; transformers reads the file by itself, nothing of ours is used.
Per prompt: token ids, and for each position the logarithm of the sum of exponentials of all logits and the 32 largest logits.
"""

import datetime
import hashlib
import json
import re
import sys
from pathlib import Path

import torch
import transformers

PROMPTS = (
    "The capital of France is",
    'def fibonacci(n):\n    """Returns the n-th number."""\n',
    "<|im_start|>user\nWhy is the sky blue? Answer in one sentence.<|im_end|>\n<|im_start|>assistant\n",
)
BEST = 32


def main(path: Path) -> None:
    options = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**options)
    model = transformers.AutoModelForCausalLM.from_pretrained(**options, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = []
    for text in PROMPTS:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        values, best = logits.topk(BEST)
        total = [round(x, 5) for x in logits.double().logsumexp(-1).tolist()]
        rounded = [[round(x, 5) for x in row] for row in values.tolist()]
        prompts.append({"text": text, "ids": ids, "logsumexp": total, "best_ids": best.tolist(), "best_logits": rounded})
        print(repr(text), len(ids), "tokens, next:", repr(tokenizer.decode(best[-1, :1])))
    made = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.date.today().isoformat(),
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "rope": model.config.rope_parameters,
        "logits_deviation": round(float(logits.std()), 3),
    }
    text = json.dumps({"made": made, "prompts": prompts}, indent=1)
    text = re.sub(r"\[[-\d.,\s]*\]", lambda found: " ".join(found[0].split()), text)  # lists of numbers on one line
    (Path(__file__).parent / "smollm2_logits.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
