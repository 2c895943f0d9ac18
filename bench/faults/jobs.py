"""What is asked of the model, and what it answers offline."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bench.faults.records import Answer, Job
from pagedjax import LLM, SamplingParams
from pagedjax.errors import check
from pagedjax.host.constraint import StructuredOutputsParams
from pagedjax.llm import RequestOutput

TIE = 1e-4  # of two log-probabilities in float32, below which either token is right (architecture.md)
TEXTS = ("Once upon a time", "The little dog saw a", "Lily and Tom went to the park.", "One day, it was very 冷 🙂 outside and")


def make_jobs(vocab: int, context: int, seed: int, *, text: bool) -> dict[str, list[Job]]:
    """By kind of the mix. `context`: the longest prompt with its answer, tokens. `text`: the model has a tokenizer."""
    check(context >= 256, f"the context must be 256 tokens at least; got {context}")
    rng, unit = random.Random(seed), context // 64

    def prompt(tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(3, vocab) for _ in range(tokens))

    def some(kind: str, count: int, longest: int, **more: Any) -> list[Job]:
        return [
            Job(f"{kind}-{i}", prompt(rng.randint(1, longest)), max_tokens=rng.randint(1, 4 * unit), **more) for i in range(count)
        ]

    shared = prompt(8 * unit)  # a beginning that the cache can share
    answers = some("answer", 24, 8 * unit)
    answers += [replace(job, name=f"shared-{i}", prompt=shared + job.prompt) for i, job in enumerate(answers[:8])]
    answers += [replace(job, name=f"pair-{i}", n=2) for i, job in enumerate(answers[8:16])]
    answers += some("ends", 4, 8 * unit, ignore_eos=False)
    jobs = {"answer": answers, "sampled": some("sampled", 4, 8 * unit, temperature=1.0, n=3)}
    batch = [replace(job, max_tokens=2 * unit) for job in answers[:3]]
    jobs["batch"] = [replace(job, name=f"batch-{i}") for i, job in enumerate(batch)]
    longest = [Job(f"longest-{i}", prompt(context - 1), max_tokens=1) for i in range(2)]
    jobs["longest"] = [*longest, replace(longest[0], name="longest-scored", logprobs=5)]
    jobs["slow"] = [Job(f"slow-{i}", prompt(unit), max_tokens=context // 2, n=8, logprobs=20) for i in range(2)]
    jobs["long"] = [Job(f"long-{i}", prompt(unit), max_tokens=context // 2) for i in range(4)]
    if text:
        answers += [Job(f"text-{i}", (), text, max_tokens=2 * unit) for i, text in enumerate(TEXTS)]
        forms = [schema_of(names) for names in (("a",), ("size", "b"), ("one", "two"))]
        jobs["form"] = [
            Job(f"form-{i}", prompt(unit), max_tokens=8 * unit, ignore_eos=False, schema=schema) for i, schema in enumerate(forms)
        ]
    return jobs


def schema_of(names: Sequence[str]) -> str:
    """Of objects that have few values, so that an answer is short."""
    properties = {name: {"enum": [1, 2, 3]} for name in names}
    return json.dumps({"type": "object", "properties": properties, "required": list(names), "additionalProperties": False})


def offline(llm: LLM, jobs: Mapping[str, Sequence[Job]]) -> dict[str, Answer]:
    """The answers of all that are greedy."""
    greedy = [job for each in jobs.values() for job in each if job.temperature == 0]
    prompts = [list(job.prompt) if job.text is None else job.text for job in greedy]
    outputs = llm.generate(prompts, [_params(job) for job in greedy])
    return {job.name: _answer(job, output) for job, output in zip(greedy, outputs, strict=True)}


def _params(job: Job) -> SamplingParams:
    form = None if job.schema is None else StructuredOutputsParams(json=job.schema)
    return SamplingParams(max_tokens=job.max_tokens, temperature=0, ignore_eos=job.ignore_eos, logprobs=2, structured_outputs=form)


def _answer(job: Job, output: RequestOutput) -> Answer:
    """Under a form the best tokens may be ones that it rules out, so that nothing is known of ties there."""
    made = output.outputs[0]
    entries = () if job.schema is not None else made.logprobs or ()
    tie = next((i for i, entry in enumerate(entries) if entry.top[0][1] - entry.top[1][1] < TIE), None)
    return Answer(made.token_ids, made.text, str(made.finish_reason), tie)
