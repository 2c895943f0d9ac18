"""lm-eval, as a program, against the server: its loglikelihoods are those of a plain forward pass in NumPy float64."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_server import Server, chat_model, running
from reference_llama import ReferenceLlama

from pagedjax import SamplingParams

CHOICES = [
    ("Once upon a", [" time", " dog", " very long time ago"]),
    ("Lily and Tom went to the", [" park", " moon. It was cold", " store to buy a red ball."]),
    ("The 😀 said: naïve", [" 漢字", " é!", " no"]),
]
STARTS = ["Once upon a time", "Tom saw a big", "The little dog"]
TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "label",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "tiny_text": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "label",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 24, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, compile_cache: str) -> Iterator[Server]:
    with chat_model(tmp_path_factory.mktemp("chat"), compile_cache) as llm, running(llm) as server:
        yield server


@pytest.fixture(scope="module")
def samples(server: Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What lm-eval logged of each document, by task."""
    folder = tmp_path_factory.mktemp("lm-eval")
    documents = {
        "tiny_choice": [{"question": question, "choices": choices, "label": 0} for question, choices in CHOICES],
        "tiny_text": [{"question": question, "label": "?"} for question in STARTS],
    }
    for name, task in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(d) + "\n" for d in documents[name]), encoding="utf-8")
        source = {"task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps(source | task), encoding="utf-8")  # JSON is YAML, too
    model = {"model": "stories", "base_url": f"{server.url}/v1/completions", "tokenizer_backend": "remote", "max_length": 128}
    arguments = ",".join(f"{name}={value}" for name, value in model.items())
    command = [
        sys.executable,
        "-m",
        "lm_eval",
        "run",
        "--model",
        "local-completions",
        "--model_args",
        arguments,
        "--batch_size",
        "4",
    ]
    command += ["--tasks", ",".join(TASKS), "--include_path", str(folder), "--output_path", str(folder / "out"), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1"}
    done = subprocess.run(command, env={**os.environ, **offline}, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    files = {name: list((folder / "out").rglob(f"samples_{name}_*.jsonl")) for name in TASKS}
    return {name: _read(found) for name, found in files.items()}


def _read(files: list[Path]) -> list[Any]:
    (file,) = files
    return sorted((json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()), key=lambda s: s["doc_id"])


def test_loglikelihoods_are_those_of_a_plain_forward(server: Server, samples: dict[str, list[Any]]):
    reference, tokenizer = ReferenceLlama(), server.llm.tokenizer
    assert tokenizer is not None
    pairs = 0
    for (question, choices), sample in zip(CHOICES, samples["tiny_choice"], strict=True):
        for choice, ((loglikelihood, greedy),) in zip(choices, sample["resps"], strict=True):
            ids, start = tokenizer.encode(question + choice, add_special=False), len(tokenizer.encode(question, add_special=False))
            logits = reference.logits(ids)
            logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            expected = sum(logprobs[i - 1, ids[i]] for i in range(start, len(ids)))
            assert float(loglikelihood) == pytest.approx(expected, abs=1e-3), (question, choice)
            assert (str(greedy) == "True") == all(logits[i - 1].argmax() == ids[i] for i in range(start, len(ids)))
            pairs += 1
    assert pairs == 9


def test_texts_are_the_offline_ones(server: Server, samples: dict[str, list[Any]]):
    tokenizer = server.llm.tokenizer
    assert tokenizer is not None
    prompts = [tokenizer.encode(start, add_special=False) for start in STARTS]
    offline = server.llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24, stop=(".", "</s>")))
    assert [sample["resps"][0][0] for sample in samples["tiny_text"]] == [output.outputs[0].text for output in offline]
