"""The traces that are stored with the benchmarks, unchanged but for compression; licences and sources lie beside them."""

from collections.abc import Iterable
from pathlib import Path

from pagedjax.traces import Traced

DATA = Path(__file__).parent / "data"
AZURE = {name: DATA / "azure-llm-2023" / f"AzureLLMInferenceTrace_{name}.csv.xz" for name in ("code", "conv")}
MOONCAKE = {name: DATA / "mooncake-fast25" / f"{name}_trace.jsonl.xz" for name in ("conversation", "synthetic")}
SHAREGPT_MEANS = 161.31, 337.99  # tokens in and out, as the PagedAttention paper (Kwon et al. 2023, section 6.1) gives them


def ideal_hit_rate(trace: Iterable[Traced]) -> float:
    """The share of the prompts' blocks that an earlier request had, too: what a cache without a bound would find."""
    seen: set[int] = set()
    found = total = 0
    for request in trace:
        found += sum(block in seen for block in request.hashes)
        total += len(request.hashes)
        seen.update(request.hashes)
    return found / total


def with_means(trace: Iterable[Traced], prompt: float, output: float) -> tuple[Traced, ...]:
    """The trace with all prompts longer or shorter by one factor and all outputs by another, so that their means are these, but
    for rounding and for the one token that each has at least."""
    trace = tuple(trace)
    mean_prompt = sum(r.prompt for r in trace) / len(trace)
    mean_output = sum(r.output for r in trace) / len(trace)
    return tuple(
        r._replace(prompt=max(1, round(r.prompt * prompt / mean_prompt)), output=max(1, round(r.output * output / mean_output)))
        for r in trace
    )
