"""Three offline workloads and the start, as one JSON line: python -m bench.offline MODEL [--dtype float32] [--only ab] [--runs 5]

(a) one request, (b) 32 mixed requests, (c) 32 requests with a common prefix (bench/workloads.py); greedy, stop ids ignored.
Figures are medians over the runs, after one that is not counted. Bandwidth is weight bytes over the time of a decode step of one
row, as a share of what this machine reads (bench/machine.py). Start is from the start of the process to the first token: cold
with an empty compilation cache, warm with the one the cold start left.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from typing import Any

import jax

from bench.machine import peak_memory, read_bandwidth, seconds_since_process_start
from bench.workloads import WORKLOADS, Job
from pagedjax import LLM, SamplingParams


def timed(llm: LLM, jobs: list[Job]) -> tuple[float, float]:
    """(seconds until all are done, seconds to the first token of the first)."""
    params = [SamplingParams(max_tokens=new, temperature=0, ignore_eos=True) for _, new in jobs]
    start = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in jobs], params)
    seconds = time.perf_counter() - start
    for output, (_, new) in zip(outputs, jobs, strict=True):
        assert len(output.outputs[0].token_ids) == new
    return seconds, outputs[0].time_to_first_token or 0.0


def measure(llm: LLM, only: str, runs: int) -> dict[str, Any]:
    vocab, result = llm.engine.model.vocab_size, {}
    for name, make in WORKLOADS.items():
        if name not in only:
            continue
        timed(llm, make(0, vocab))
        samples = [timed(llm, make(r, vocab)) for r in range(1, runs + 1)]
        seconds = statistics.median(s for s, _ in samples)
        out = sum(new for _, new in make(1, vocab))
        row: dict[str, Any] = {"seconds": round(seconds, 3), "out_tokens": out, "out_tok_s": round(out / seconds, 1)}
        if name == "a":
            first = statistics.median(f for _, f in samples)
            decode = statistics.median((out - 1) / (s - f) for s, f in samples)
            row |= {"ttft_ms": round(first * 1e3, 1), "decode_tok_s": round(decode, 2)}
        result[name] = row | {"samples_s": [round(s, 3) for s, _ in samples]}
    return result


def start_up(argv: list[str]) -> dict[str, float]:
    """Seconds from process start to first token, cold and warm, each in a process of its own."""
    seconds = {}
    with tempfile.TemporaryDirectory() as cache:
        for name in ("cold", "warm"):
            command = [sys.executable, "-m", "bench.offline", *argv, "--first-token-only", "--compile-cache", cache]
            line = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
            seconds[name] = json.loads(line)["first_token_s"]
    return seconds


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(
        prog="bench.offline", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "float32", "bfloat16", "int8", "float8_e4m3fn"])
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--kv-memory", type=int, default=1 << 30, help="bytes")
    parser.add_argument(
        "--reserve", default="paged", choices=["paged", "oracle", "pow2", "max"], help="how sequences hold the pool"
    )
    parser.add_argument("--only", default="abcs", help="workloads, and s for the start (default: abcs)")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--compile-cache", default="~/.cache/pagedjax")
    parser.add_argument("--first-token-only", action="store_true", help="start, answer one token, print the time")
    args = parser.parse_args(argv)
    start = start_up(argv) if "s" in args.only and not args.first_token_only else {}
    options = {"dtype": args.dtype, "max_model_len": args.max_model_len, "cache.kv_memory": args.kv_memory}
    options |= {"cache.reserve": args.reserve, "cache.kv_dtype": args.kv_dtype}
    with LLM(args.model, compile_cache=args.compile_cache, **options) as llm:
        if args.first_token_only:
            timed(llm, [(WORKLOADS["a"](0, llm.engine.model.vocab_size)[0][0], 1)])
            print(json.dumps({"first_token_s": round(seconds_since_process_start(), 2)}))
            return
        result = measure(llm, args.only, args.runs)
        weights, pool = llm.engine.weight_bytes, llm.engine.pool_bytes
        peak = peak_memory()
        if "a" in result:
            bandwidth = read_bandwidth()
            used = weights * result["a"]["decode_tok_s"] / 1e9
            result["a"] |= {"weights_gb_s": round(used, 1), "read_gb_s": round(bandwidth, 1), "share": round(used / bandwidth, 3)}
        line = {
            "engine": "pagedjax",
            "model": os.path.basename(os.path.normpath(args.model)),
            "dtype": llm.engine.config.dtype,
            "reserve": args.reserve,
            "device": jax.devices()[0].device_kind,
            "cores": os.cpu_count(),
            "versions": {name: version(name) for name in ("jax", "jaxlib", "numpy")},
            "date": time.strftime("%Y-%m-%d"),
            "load_1min": round(os.getloadavg()[0], 2),
            **result,
            "start_s": start,
            "compilations_after_start": llm.engine.compilations_after_start,
            "memory_mib": {
                "weights": weights >> 20,
                "pool": pool >> 20,
                "peak": peak >> 20,
                "beside": (peak - weights - pool) >> 20,
            },
        }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
