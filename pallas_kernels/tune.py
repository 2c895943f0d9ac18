"""Measures what sizes suit an op on the device at hand, and writes them where the ops look them up:

    python -m pallas_kernels.tune paged_decode
    python -m pallas_kernels.tune paged_decode --load rows=1,context=32768,dtype=float8_e4m3fn --out tuned.json
    python -m pallas_kernels.tune quant_matmul --load tokens=64,inputs=4096,outputs=14336,group=128

Every candidate of every backend that takes the call is compiled and measured; what does not compile is told and left out. The exit
code is 1, and nothing is written, where nothing could be measured.
"""

import argparse
import dataclasses
import math
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import jax

from pallas_kernels import OPS
from pallas_kernels.common.dispatch import Backend
from pallas_kernels.common.layout import POOL_DTYPES, check
from pallas_kernels.common.quantized import is_quantized
from pallas_kernels.common.spec import Scales
from pallas_kernels.common.targets import Chip, chip_for, name_of, platform_of
from pallas_kernels.common.tuning import ROOT, Entry, check_file, chip_name, save, trying
from pallas_kernels.measure import above_zero, seconds_of, with_donation
from pallas_kernels.quant_matmul.weights import GROUPS
from pallas_kernels.workload import Attention, Load, Rows, Write
from pallas_kernels.workload_matmul import Grouped, Quantized

SERVING = ((64, 8192), (16, 4096), (1, 32768), (256, 512))  # rows and context
SMALL = ((1, 32), (1, 128), (4, 128), (1, 1024), (8, 2048), (32, 256))  # for a CPU
KINDS = {"kv_write": Write, "quant_matmul": Quantized, "grouped_matmul": Grouped}  # of the others Attention
WEIGHTS = ((4096, 6144), (4096, 28672), (14336, 4096))  # inputs and outputs: products of a layer of Llama 3 8B
EXPERTS = ((2048, 768, 128), (768, 2048, 128), (4096, 14336, 8))  # and experts: Qwen3 30B A3B, Mixtral 8x7B
PRODUCT_DTYPES = ("float32", "bfloat16")
ROUNDS = 3
GAIN = 0.02  # a candidate that saves less than this share of the time is not worth the name


@dataclass(frozen=True)
class Trial:
    config: Any
    seconds: float


def default_loads(op: str, platform: str) -> list[Load]:
    """What is tuned when nobody says what for."""
    if op in ("quant_matmul", "grouped_matmul"):
        return product_loads(op, platform)
    shapes = SMALL if platform == "cpu" else SERVING
    dtypes = ("float32", "bfloat16") if platform == "cpu" else ("bfloat16", "float8_e4m3fn")
    block = 16 if platform == "cpu" else 128 if platform == "tpu" else 64
    sizes = [{"rows": rows, "context": context, "block_size": block, "dtype": d} for d in dtypes for rows, context in shapes]
    if op == "kv_write":
        return list({(size["rows"], size["dtype"]): Write(**size) for size in sizes}.values())
    if op == "paged_attention":
        new = {1: 256, 8: 256} if platform == "cpu" else {1: 2048, 16: 512}  # tokens of a row, by rows
        return [
            Attention(**size, new=min(new[size["rows"]], size["context"]), ragged=True) for size in sizes if size["rows"] in new
        ]
    return [Attention(**size) for size in sizes]


def product_loads(op: str, platform: str) -> list[Load]:
    """`default_loads` of a product: decode steps and a prefill; on a CPU smaller ones."""
    small = platform == "cpu"
    counts, dtype = ((1, 8, 256), "float32") if small else ((1, 16, 64, 256, 2048), "bfloat16")
    if op == "quant_matmul":
        shapes = ((2048, 2048),) if small else WEIGHTS
        return [Quantized(t, *shape, dtype, group) for shape in shapes for group in (0, 128) for t in counts]
    shapes = ((1024, 2048, 8), (1024, 512, 64)) if small else EXPERTS
    return [Grouped(8 * t, *shape[:2], dtype, shape[2]) for shape in shapes for t in counts]


def load_of(op: str, text: str) -> Load:
    """ "rows=64,context=8192,dtype=int8" as a call of the op; ValueError for what is none."""
    kind = KINDS.get(op, Attention)
    # `ragged` is what the op says; sizes do not depend on the last two.
    fields = {field.name: field for field in dataclasses.fields(kind) if field.name not in ("ragged", "soft_cap", "sinks")}
    values: dict[str, Any] = {"ragged": True} if op == "paged_attention" else {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in fields or not value:
            raise ValueError(f"a load must be name=value pairs of {', '.join(fields)}; got {part}")
        values[name] = value_of(kind, fields[name], value)
    needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    if not set(needed) <= values.keys():
        raise ValueError(f"a load must have {', '.join(needed[:-1])} and {needed[-1]}; got {text}")
    load = kind(**values)
    check_call(op, load)
    try:
        jax.eval_shape(load.function(next(o for o in OPS if o.name == op).backends[-1].name), *load.shapes())
    except OverflowError as error:
        raise ValueError(f"a load must have sizes that the op can count; got {text} ({error})") from error
    return load


def value_of(kind: type[Any], field: dataclasses.Field[Any], text: str) -> Any:
    """What a field of a load is said to be; ValueError for what it is in no call."""
    dtypes = POOL_DTYPES if issubclass(kind, Rows) else PRODUCT_DTYPES
    words = {"dtype": dtypes, "scales": get_args(Scales)}.get(field.name)
    if words is not None:
        check(text in words, f"{field.name} must be one of {', '.join(words)}; got {text}")
        return text
    if field.type is bool:
        check(text in ("0", "1"), f"{field.name} must be 0 or 1; got {text}")
        return text == "1"
    least = 0 if (kind, field.name) == (Quantized, "group") else 1
    number = int(text) if re.fullmatch("[0-9]{1,9}", text) else -1
    check(number >= least, f"{field.name} must be an integer from {least} to 999999999; got {text}")
    return number


def check_call(op: str, load: Load) -> None:
    """ValueError where fields that may each be so make no call of the op together, or one that would be looked up as another."""
    if isinstance(load, Rows):
        check(op != "paged_decode" or load.new == 1, f"new must be 1 for paged_decode; got {load.new}")
        check(load.new <= load.context, f"new must be at most the {load.context} tokens of context; got {load.new}")
        check(load.scales == "none" or is_quantized(load.dtype), f"scales must be none for {load.dtype}; got {load.scales}")
        check(load.scales != "none" or load.dtype != "int8", f"scales must be tensor or token for int8; got {load.scales}")
    if isinstance(load, Quantized):
        check(load.group in (0, *GROUPS), f"group must be one of {', '.join(map(str, (0, *GROUPS)))}; got {load.group}")
        check(load.group > 0 or not load.zeros, "zeros must be 0 with group 0, which is int8 weights; got 1")
        check(load.group == 0 or not load.int8_activations, f"int8_activations must be 0 with group {load.group}; got 1")


def try_all(load: Load, backend: Backend, chip: Chip | None, budget: float, say: Callable[[str], None]) -> list[Trial]:
    """Every candidate that compiles and runs, in the order of the backend, which begins with what it takes by rule. They are
    measured in turns, ROUNDS times, and the best counts: a machine's speed drifts, and the last must not pay for it."""

    def told(what: Any, error: Exception) -> None:
        say(f"  {what}: {type(error).__name__}: {str(error).partition('\n')[0][:160]}")

    configs = backend.candidates(load.spec, chip)
    if not configs:
        say(f"  {backend.name} has no sizes to choose")
        return []
    try:
        args, best = list(jax.block_until_ready(load.arguments())), {}
    except Exception as error:  # the device, or this machine, has too little memory
        told("the arguments", error)
        return []
    calls = []
    for config in configs:
        try:
            with trying(load.op, backend.name, config):
                compiled = jax.jit(load.function(backend.name), donate_argnums=load.donate).lower(*args).compile()
        except Exception as error:  # compilers raise what they like
            told(config, error)
        else:
            calls.append((config, with_donation(compiled, args, load.donate)))
    for _ in range(ROUNDS):
        for item in list(calls):
            config, call = item
            try:
                args += () if args else load.arguments()
                best[config] = min(best.get(config, math.inf), seconds_of(call, budget=budget / ROUNDS))
            except Exception as error:  # what a device raises
                told(config, error)
                calls.remove(item)
                best.pop(config, None)
                if load.donate:  # what was given away is lost
                    args.clear()
    for config, seconds in best.items():
        say(f"  {config}: {seconds * 1e6:.1f} us, {load.bytes_floor / seconds / 1e9:.1f} GB/s")
    return [Trial(config, seconds) for config, seconds in best.items()]


def best_of(trials: Sequence[Trial]) -> Trial:
    """The fastest, or the first, which is the backend's own rule, where the fastest gains next to nothing."""
    fastest = min(trials, key=lambda trial: trial.seconds)
    return trials[0] if trials[0].seconds <= fastest.seconds * (1 + GAIN) else fastest


def entry_of(load: Load, backend: Backend, chip: Chip | None, trial: Trial, device: str, command: str) -> Entry:
    return {
        "backend": backend.name,
        "chip": chip_name(chip),
        "shape": dict(load.key.shape),
        "bucket": load.key.bucket,
        "config": dataclasses.asdict(trial.config),
        "provenance": {
            "device": device,
            "gb_s": round(load.bytes_floor / trial.seconds / 1e9, 2),
            "jax": jax.__version__,
            "command": command,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
        },
    }


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 where nothing could be measured, and then nothing is written."""
    parser = argparse.ArgumentParser(
        prog="pallas_kernels.tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("op", choices=[op.name for op in OPS])
    parser.add_argument("--backend", help="only this one; default: all that have sizes to choose")
    parser.add_argument("--load", action="append", metavar="NAME=N,…", help="what to tune for; may be given again")
    parser.add_argument("--out", type=Path, help="default: the tuned.json of the op")
    parser.add_argument("--budget", type=above_zero, default=0.5, help="seconds to measure a candidate for (default: 0.5)")
    args = parser.parse_args(argv)
    op = next(op for op in OPS if op.name == args.op)
    names, out = [backend.name for backend in op.backends], args.out or ROOT / op.name / "tuned.json"
    try:
        check_file("--out", out)
        check(args.backend in (None, *names), f"--backend must be one of {', '.join(names)}; got {args.backend}")
        asked = [load_of(op.name, text) for text in args.load or ()]
    except ValueError as error:
        parser.error(str(error))
    device = jax.devices()[0]
    platform = platform_of(device)
    chip = chip_for(platform)
    name = name_of(device)
    command = shlex.join(["python", "-m", "pallas_kernels.tune", *(sys.argv[1:] if argv is None else argv)])
    entries = []
    for load in asked or default_loads(op.name, platform):
        for backend in op.backends:
            if args.backend not in (None, backend.name):
                continue
            reason = backend.refuses(load.spec, platform, chip)
            if reason is None:
                print(f"{load.name}, {backend.name} on {name}", flush=True)
                trials = try_all(load, backend, chip, args.budget, lambda text: print(text, flush=True))
                if trials:
                    best = best_of(trials)
                    entries.append(entry_of(load, backend, chip, best, name, command))
                    print(f"  best: {best.config}, {trials[0].seconds / best.seconds:.2f} times as fast as by rule")
            elif args.backend is not None:
                print(f"{load.name}, {backend.name}: it {reason}", flush=True)
    if not entries:
        print(f"{out}: not written, for nothing was measured")
        return 1
    save(out, entries)
    print(f"{out}: {len(entries)} entries")
    return 0


if __name__ == "__main__":
    sys.exit(main())
