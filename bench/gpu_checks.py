"""All that needs a GPU, in one command, for whoever has one: python -m bench.gpu_checks FOLDER (make gpu-checks).

Every kernel is run on the device and compared with the portable XLA path, at sizes that interpreters are too slow for, a pool of
more than 2**31 elements among them; then bench/kernels.py measures. FOLDER/<device>.json has both. The exit code is 1 where a
kernel is wrong.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import kernel_plot, kernels
from pallas_kernels import OPS
from pallas_kernels.common.targets import chip_for, platform_of
from pallas_kernels.workload import Attention, Load, Write
from pallas_kernels.workload_matmul import Grouped, Quantized

SMALL = Attention(5, 300, kv_heads=2, layers=1)
HUGE = Attention(64, 32768, kv_heads=8)  # 2**32 elements, 8 GiB
WRITES = Write(7, 300, kv_heads=2, new=9)
LOADS: tuple[Load, ...] = (
    *(
        dataclasses.replace(SMALL, width=width, group=group)
        for width, group in ((64, 8), (80, 1), (96, 5), (128, 4), (192, 2), (256, 7))
    ),
    *(dataclasses.replace(SMALL, block_size=size) for size in (16, 32, 128, 256)),
    *(dataclasses.replace(SMALL, dtype="int8", scales=scales) for scales in ("tensor", "token")),
    *(dataclasses.replace(SMALL, dtype="float8_e4m3fn", scales=scales) for scales in ("none", "tensor", "token")),
    *(dataclasses.replace(SMALL, dtype=dtype) for dtype in ("float16", "float32")),
    dataclasses.replace(SMALL, window=100),
    dataclasses.replace(SMALL, window=100, soft_cap=2.0, sinks=True),
    dataclasses.replace(SMALL, new=70),
    dataclasses.replace(SMALL, new=70, soft_cap=2.0, sinks=True),
    dataclasses.replace(SMALL, new=70, dtype="int8", scales="token"),
    dataclasses.replace(SMALL, new=70, window=100),
    WRITES,
    *(dataclasses.replace(WRITES, dtype=dtype, scales="token") for dtype in ("int8", "float8_e4m3fn")),
    dataclasses.replace(WRITES, dtype="int8", scales="tensor"),
    *(Quantized(tokens, 2048, 1024, group=group, zeros=group == 64) for tokens in (1, 17, 300) for group in (0, 32, 64, 128)),
    Quantized(17, 2048, 1024, int8_activations=True),
    *(Grouped(tokens, 512, 768, experts=16) for tokens in (1, 40, 1000)),
    HUGE,
)
QUICK: tuple[Load, ...] = (
    dataclasses.replace(SMALL, width=16, dtype="float32"),
    dataclasses.replace(WRITES, width=16, dtype="float32"),
    Quantized(3, 64, 48, "float32", 32, True),
    Grouped(9, 32, 24, "float32", 3),
)
BOUND = 2.0**-7  # of the largest value, as in common/testing.py


def compare(load: Load, platform: str, chip: Any) -> list[dict[str, Any]]:
    """Each backend that takes the call against the last, which is portable: the largest difference over the largest value, of all
    its results (a pool's scales, and logarithms of denominators, too), and whether twice the same call gives the same bits."""
    op = next(op for op in OPS if op.name == load.op)
    found, truth = [], None
    for backend in reversed(op.backends):
        if backend.refuses(load.spec, platform, chip) is not None:
            continue
        line: dict[str, Any] = {"op": op.name, "case": load.name, "by": backend.name}
        try:
            f = jax.jit(load.function(backend.name))
            out, again = (results(f(*load.arguments()), load) for _ in range(2))
        except Exception as problem:  # the others are still to be checked
            found.append(line | {"ok": False, "why": f"{type(problem).__name__}: {problem}"[:300]})
            continue
        truth = out if truth is None else truth
        error = float(np.max([error_of(x, y) for x, y in zip(out, truth, strict=True)]))  # NaN if one is
        same = all((x == y).all() for x, y in zip(out, again, strict=True))
        found.append(line | {"error": error, "same_bits": same, "ok": error <= BOUND and same})
    return found


def results(out: Any, load: Load) -> list[np.ndarray]:
    """As float32; of a pool, and of its scales, without the scrap block. What has 8 bits is i32, numbered in order."""
    leaves = [x[:, 1:] if load.donate else x for x in jax.tree.leaves(out)]
    return [np.asarray(numbered(x) if x.dtype.itemsize == 1 else x.astype(jnp.float32)) for x in leaves]


def numbered(x: jax.Array) -> jax.Array:
    """Neighbouring int8 or e4m3 numbers differ by 1."""
    bits = x.view(jnp.int8).astype(jnp.int32)
    return bits if x.dtype == jnp.int8 else jnp.where(bits < 0, -(bits & 127), bits)


def error_of(x: np.ndarray, truth: np.ndarray) -> float:
    """Over the largest value. Numbers of 8 bits may be rounded to either neighbour: the share of those that are, or infinity where
    one is further off."""
    apart = np.abs(x - truth)
    if x.dtype == np.int32:
        return float((apart > 0).mean()) if apart.max() <= 1 else np.inf
    return float(apart.max() / max(1e-6, float(np.abs(truth).max())))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.gpu_checks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the report goes, named after the device")
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it runs")
    args = parser.parse_args(argv)
    if not os.path.isdir(args.folder):
        parser.error(f"folder must be one that exists; got {args.folder}")
    platform = platform_of(jax.devices()[0])
    name = re.sub(r"[^a-z0-9]+", "-", jax.devices()[0].device_kind.lower()).strip("-")
    checks = []
    for load in QUICK if args.quick else LOADS:
        for check in compare(load, platform, chip_for(platform)):
            print("ok   " if check["ok"] else "WRONG", check, flush=True)
            checks.append(check)
    report = args.folder / f"{name}.json"
    kernels.main(["--json", str(report), *(["--quick", "--budget", "0.01"] if args.quick else [])])
    found = json.loads(report.read_text(encoding="utf-8"))
    report.write_text(json.dumps(found | {"checks": checks}, indent=1) + "\n", encoding="utf-8")
    kernel_plot.draw(found, report.with_suffix(".svg"))
    wrong = sum(not check["ok"] for check in checks)
    print(f"{report}: {len(checks)} checks, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
