"""`pagedjax generate`: completes prompts, all batched together, printed in the order they were given."""

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pagedjax import terminal
from pagedjax.commands.start import start
from pagedjax.errors import UserError, check
from pagedjax.flags import parse_ids, sampling_params
from pagedjax.host.request import Logprobs, Request, SamplingParams, Usage
from pagedjax.llm import CompletionOutput, Prompt, collect, in_order
from pagedjax.stream import Stream


def run(command: Any) -> None:
    """`command` is cli.Generate."""
    prompts = read_prompts(command.prompt, command.prompt_file, command.prompt_ids)
    flags = sampling_params(command.sampling, SamplingParams())  # a wrong flag is said before the model is loaded
    shown = command.json or (flags.logprobs is None and flags.prompt_logprobs is None)
    check(shown, "--logprobs and --prompt-logprobs must go with --json, which is where they are printed")
    with start(command.model, command.engine) as llm:
        params = sampling_params(command.sampling, llm.get_default_sampling_params())
        requests = [llm.request(prompt, params) for prompt in prompts]
        begin, usages, waits = time.perf_counter(), [], []
        with contextlib.closing(in_order(llm.loop, requests)) as streams:
            for i, (request, stream) in enumerate(streams):
                if command.json:
                    usages += show_json(request, stream, prompts[i])
                else:
                    if len(prompts) > 1:
                        terminal.note(f"── {i + 1} of {len(prompts)}: {label(prompts[i])}")
                    usages += show_text(stream, params.n, live=command.stream, as_ids=llm.tokenizer is None)
                if stream.first_token is not None:
                    waits.append(stream.first_token - stream.submitted)
        terminal.note(summary(usages, waits, time.perf_counter() - begin))


def read_prompts(texts: Sequence[str], files: Sequence[str], ids: Sequence[str]) -> list[Prompt]:
    """All prompts of the command line: texts, then files, then token ids. UserError where there is none, or a file is bad."""
    prompts: list[Prompt] = [*texts]
    for file in files:
        prompts += read_file(Path(file).expanduser())
    prompts += [parse_ids(text) for text in ids]
    check(len(prompts) > 0, "at least one --prompt, --prompt-file or --prompt-ids must be given; got none")
    return prompts


def read_file(path: Path) -> list[Prompt]:
    """One prompt, the whole file but for a newline at its end; or, in a .jsonl file, one on each line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UserError(f"a prompt file must be readable UTF-8 text; got {path}: {reason}") from error
    if path.suffix != ".jsonl":
        return [text.removesuffix("\n")]
    return [line_prompt(line, f"{path}:{number}") for number, line in enumerate(text.splitlines(), 1) if line.strip()]


def line_prompt(line: str, where: str) -> Prompt:
    """The prompt of one line of JSON: a text, token ids, or an object with either as its "prompt"."""
    try:
        value: Any = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} must be JSON; {error}") from error
    prompt: Any = value.get("prompt") if isinstance(value, dict) else value
    ids = isinstance(prompt, list) and all(type(item) is int for item in prompt)
    check(
        isinstance(prompt, str) or ids, f'{where} must be a text, a list of token ids, or {{"prompt": either}}; got {line.strip()}'
    )
    return cast(Prompt, tuple(prompt) if ids else prompt)


def show_text(stream: Stream, n: int, *, live: bool, as_ids: bool) -> list[Usage]:
    """Prints the samples one after the other, each ended by a newline; the first one as it comes where `live`. A model without
    a tokenizer has no text: `as_ids` prints token ids."""
    held: list[list[str]] = [[] for _ in range(n)]
    usages: list[Usage] = []
    for delta in stream:
        text = "".join(f"{token} " for token in delta.tokens) if as_ids else delta.text
        if live and delta.index == 0:
            print(text, end="", flush=True)
        else:
            held[delta.index].append(text)
        if delta.usage is not None:
            usages.append(delta.usage)
    for pieces in held:
        print("".join(pieces), flush=True)
    return usages


def show_json(request: Request, stream: Stream, prompt: Prompt) -> list[Usage]:
    """One line: the request, and its only sample, or with n > 1 a list "outputs" of its samples."""
    output = collect(request, stream, prompt if isinstance(prompt, str) else None)
    samples = [sample_object(sample) for sample in output.outputs]
    whole: dict[str, Any] = {"prompt": output.prompt, "prompt_token_ids": output.prompt_token_ids}
    if output.prompt_logprobs is not None:
        whole["prompt_logprobs"] = [logprob_object(p) for p in output.prompt_logprobs]
    whole |= samples[0] if len(samples) == 1 else {"outputs": [{"index": i} | sample for i, sample in enumerate(samples)]}
    print(json.dumps(whole, ensure_ascii=False), flush=True)
    return [sample.usage for sample in output.outputs]


def sample_object(sample: CompletionOutput) -> dict[str, Any]:
    return {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": sample.finish_reason,
        "stop_reason": sample.stop_reason,
        "usage": dataclasses.asdict(sample.usage),
        "logprobs": None if sample.logprobs is None else [logprob_object(p) for p in sample.logprobs],
    }


def logprob_object(position: Logprobs) -> dict[str, Any]:
    """As it is, with the best tokens as objects. A token that the model rules out has the logprob null: JSON has no infinity."""
    top = [{"token": token, "logprob": finite(value)} for token, value in position.top]
    return {"token": position.token, "logprob": finite(position.logprob), "rank": position.rank, "top": top}


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def label(prompt: Prompt) -> str:
    """A prompt in at most 60 characters."""
    shown = " ".join(prompt.split()) if isinstance(prompt, str) else f"{len(prompt)} token ids"
    return shown if len(shown) <= 60 else shown[:59] + "…"


def summary(usages: Sequence[Usage], waits: Sequence[float], seconds: float) -> str:
    """One line about all requests, each sample counted."""
    given, made = sum(u.prompt for u in usages), sum(u.generated for u in usages)
    first = f", first token after {sum(waits) / len(waits):.2f} s" if waits else ""
    return f"{given} tokens in, {made} out in {seconds:.1f} s: {made / seconds:.1f} tokens a second{first}"
