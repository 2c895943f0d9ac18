"""What the ops reach of the device at hand: its read bandwidth and matrix rate are measured first, then every backend of every op,
beside gathering the whole context, JAX's own kernels and PyTorch's attention, where they are.

    python -m bench.kernels                              # under 8 minutes on an H200
    python -m bench.kernels --json docs/kernels/h200.json --plot docs/img/h200.svg
    python -m bench.kernels --quick                      # small sizes: whether it runs

GB/s are of the bytes that must be read and written (each block once), TFLOP/s of what the causal mask leaves; shares are of the
measured ceilings and of the data sheet (pallas_kernels/common/targets.py). A figure that nobody measured says so.
"""

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bench import machine
from bench.rivals import RIVALS, wait
from pallas_kernels import OPS
from pallas_kernels.common.dispatch import choose
from pallas_kernels.common.layout import check
from pallas_kernels.common.targets import Chip, chip_for, name_of, platform_of
from pallas_kernels.common.tuning import check_file
from pallas_kernels.measure import above_zero, seconds_of, with_donation
from pallas_kernels.workload import Attention, Load, Write, fill
from pallas_kernels.workload_matmul import Grouped, Quantized

try:
    from bench import kernel_plot
except ImportError:  # without the extra `plots`
    kernel_plot = None

BIG, LONG, PREFILL = Attention(64, 8192), Attention(1, 32768), Attention(1, 8192, new=2048)
BIG_FP8 = dataclasses.replace(BIG, dtype="float8_e4m3fn", scales="token")
SERVING: tuple[Load, ...] = (
    BIG,
    BIG_FP8,
    dataclasses.replace(BIG, dtype="int8", scales="token"),
    LONG,
    PREFILL,
    Attention(256, 512),
    Attention(64, 8192, window=1024),
    Attention(64, 8192, block_size=16),
    Attention(16, 4096, kv_heads=32, group=1),
    Attention(16, 4096, kv_heads=8, group=8, width=64),
    Attention(16, 4096, kv_heads=4, group=2, width=256),
    Attention(8, 4096, new=256),
    Attention(1, 8192, new=2048, dtype="float8_e4m3fn", scales="token"),
    Write(64, 8192),
    Write(1, 8192, new=2048),
    *(Quantized(tokens, 4096, 28672, group=group) for tokens in (1, 64, 2048) for group in (0, 128)),
    Quantized(64, 4096, 28672, int8_activations=True),
    Grouped(512, 2048, 768, experts=128),
    Grouped(128, 4096, 14336),
    Grouped(4096, 4096, 14336),
)
CPU_BF16, CPU_F32 = (Attention(8, 2048, dtype=dtype) for dtype in ("bfloat16", "float32"))
ON_CPU: tuple[Load, ...] = (
    CPU_BF16,
    CPU_F32,
    Attention(32, 256, kv_heads=4, group=3, width=64, block_size=16, dtype="float32"),
    Attention(1, 4096, dtype="float32"),
    Attention(8, 2048, dtype="int8", scales="token"),
    Attention(1, 1024, new=256, dtype="float32"),
    Write(32, 256, kv_heads=4, width=64, block_size=16, dtype="float32"),
    *(Quantized(tokens, 2048, 2048, "float32", group) for tokens in (8, 256) for group in (0, 128)),
    Quantized(8, 2048, 2048, "float32", int8_activations=True),
    Grouped(16, 1024, 512, "float32", 64),
    Grouped(512, 1024, 2048, "float32"),
)
TINY: dict[str, Any] = {"kv_heads": 2, "group": 2, "width": 16, "block_size": 16, "dtype": "float32"}
QUICK: tuple[Load, ...] = (
    Attention(3, 48, **TINY),
    Attention(2, 32, new=8, **TINY),
    Write(3, 48, **TINY),
    Quantized(3, 64, 48, "float32", 32, True),
    Grouped(9, 32, 24, "float32", 3),
)
PICTURES = (".svg", ".png")


@dataclass(frozen=True)
class Device:
    """Speeds: GB/s read and TFLOP/s of bfloat16 (of a CPU float32) products; None: not known."""

    name: str
    platform: str
    chip: Chip | None
    read: float
    matrix: float

    @property
    def spec(self) -> tuple[float | None, float | None]:
        return (None, None) if self.chip is None else (self.chip.read_gb_s or None, self.chip.bf16_tflop_s or None)


@dataclass(frozen=True)
class Row:
    """One implementation of one call. chosen: what the op takes when it is not told; error: largest absolute difference from the
    op's last backend, the portable one."""

    op: str
    case: str
    by: str
    chosen: bool
    microseconds: float | None
    gb_s: float | None = None
    tflop_s: float | None = None
    error: float | None = None
    why: str = ""  # there are no figures


def repeated(f: Callable[..., Any], at: int, times: int, replace: bool) -> Callable[..., Any]:
    """f called `times` times on the device, each call after the one before: its argument number `at` becomes the result (replace)
    or keeps its value by a sum with next to nothing of the result's first number. Without this, short calls would measure Python.
    Returns the last result."""

    def loop(*args):
        def body(_, carry):
            x, _ = carry
            out = jax.tree.leaves(f(*args[:at], x, *args[at + 1 :]))[0]
            return (out, 0) if replace else (x + (out.reshape(-1)[0] * 1e-30).astype(x.dtype), out)

        if times == 1:
            return jax.tree.leaves(f(*args))[0]
        out = 0 if replace else jnp.zeros_like(jax.eval_shape(lambda *args: jax.tree.leaves(f(*args))[0], *args))
        carry = lax.fori_loop(0, times, body, (args[at], out))
        return carry[0] if replace else carry[1]

    return loop


def read_bandwidth(platform: str, size: int, budget: float) -> float:
    """GB/s at which the device reads `size` bytes: the better of a sum and a maximum, or on a CPU of one thread a core."""
    if platform == "cpu":
        return machine.read_bandwidth(size)
    x = jnp.ones((size // 4096, 1024), jnp.float32)
    fastest = min(seconds_of(functools.partial(jax.jit(reduce), x), budget=budget) for reduce in (jnp.sum, jnp.max))
    return size / fastest / 1e9


def matrix_rate(platform: str, size: int, budget: float) -> float:
    """TFLOP/s of a product of two matrices size x size."""
    dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
    x = fill(jax.ShapeDtypeStruct((size, size), dtype), 0)
    return 2 * size**3 / seconds_of(functools.partial(jax.jit(jnp.matmul), x, x), budget=budget) / 1e12


def device_at_hand(quick: bool) -> Device:
    """With its ceilings, measured."""
    device = jax.devices()[0]
    platform = platform_of(device)
    small, budget = platform == "cpu", 0.05 if quick else 1.0
    read = read_bandwidth(platform, 32 << 20 if quick else 512 << 20 if small else 4 << 30, budget)
    matrix = matrix_rate(platform, 256 if quick else 2048 if small else 8192, budget)
    return Device(name_of(device), platform, chip_for(platform), read, matrix)


def measured(load: Load, by: str, chosen: bool, seconds: float, error: float | None) -> Row:
    rates = load.bytes_floor / seconds / 1e9, load.flops / seconds / 1e12
    return Row(load.op, load.name, by, chosen, seconds * 1e6, rates[0], rates[1] if load.flops else None, error)


def run_load(load: Load, device: Device, budget: float) -> list[Row]:
    """Every backend that takes the call, the portable one first, and the rivals. What fails is a row that says why."""
    op = next(op for op in OPS if op.name == load.op)
    chosen = choose(op, load.spec, device.platform, device.chip).name
    rows, args, truth = [], load.arguments(), None
    times = 4 if device.platform == "cpu" else 16
    for backend in reversed(op.backends):
        reason = backend.refuses(load.spec, device.platform, device.chip)
        if reason is not None:
            if not backend.platforms or device.platform in backend.platforms:
                rows.append(Row(load.op, load.name, backend.name, False, None, why=f"it {reason}"))
            continue
        try:
            f = repeated(load.function(backend.name), 0 if load.donate else 1, times, bool(load.donate))
            compiled = jax.jit(f, donate_argnums=load.donate).lower(*args).compile()
            if load.donate:
                seconds, error = seconds_of(with_donation(compiled, list(load.arguments()), load.donate), budget=budget), None
            else:
                out = np.asarray(compiled(*args), np.float32)
                truth = out if truth is None else truth
                seconds, error = seconds_of(functools.partial(compiled, *args), budget=budget), float(np.abs(out - truth).max())
            rows.append(measured(load, backend.name, backend.name == chosen, seconds / times, error))
        except Exception as problem:  # a benchmark goes on
            rows.append(Row(load.op, load.name, backend.name, False, None, why=f"{type(problem).__name__}: {problem}"[:300]))
    for name, rival in RIVALS.items():
        try:
            call = rival(load, args, device.platform)
            if call is not None:
                rows.append(measured(load, name, False, seconds_of(call, wait=wait, budget=budget), None))
        except Exception as problem:  # not ours to mend
            rows.append(Row(load.op, load.name, name, False, None, why=f"{type(problem).__name__}: {problem}"[:300]))
    return rows


def goals(rows: Sequence[Row], device: Device) -> list[dict[str, Any]]:
    """What the kernels are to reach, and what they do: `reached` is None where it was not measured."""

    def of(load: Load, by: str | None = None) -> Row | None:
        mine = [r for r in rows if (r.op, r.case) == (load.op, load.name) and (r.by == by if by else r.chosen)]
        return mine[0] if mine and mine[0].microseconds is not None else None

    def ratio(over: Row | None, under: Row | None) -> float | None:
        return over.microseconds / under.microseconds if over and under and over.microseconds and under.microseconds else None

    def share(row: Row | None, what: str) -> float | None:
        return None if row is None else (row.gb_s or 0) / device.read if what == "read" else (row.tflop_s or 0) / device.matrix

    h200, cpu = "H200" in device.name, device.platform == "cpu"
    wanted = (
        ("H200: decode, 64 rows at 8k, of measured read bandwidth", 0.85, share(of(BIG), "read") if h200 else None),
        ("H200: decode, 1 row at 32k, of measured read bandwidth", 0.60, share(of(LONG), "read") if h200 else None),
        ("H200: decode with fp8 blocks, times the tokens/s of bf16", 1.7, ratio(of(BIG), of(BIG_FP8)) if h200 else None),
        ("H200: prefill of 2048 on 8k, of the measured matrix rate", 0.45, share(of(PREFILL), "matrix") if h200 else None),
        *(
            wanted
            for load, dtype in ((CPU_BF16, "bf16"), (CPU_F32, "f32"))
            for by, name in ((None, "decode"), ("xla", "decode in XLA"))
            for wanted in (
                (f"CPU: {name}, {dtype}, of measured read bandwidth", 0.25, share(of(load, by), "read") if cpu else None),
                (f"CPU: {name}, {dtype}, times gather all", 4.0, ratio(of(load, "gather all"), of(load, by)) if cpu else None),
            )
        ),
    )
    return [{"goal": name, "wanted": least, "reached": got} for name, least, got in wanted]


def line(row: Row, device: Device) -> str:
    head = f"{row.op:<15}  {row.case:<52}  {row.by + (' *' if row.chosen else ''):<15}"
    if row.microseconds is None or row.gb_s is None:
        return f"{head}  not measured: {row.why}"
    share = lambda x, whole: "        " if x is None or not whole else f"{100 * x / whole:6.1f} %"
    spec = device.spec
    figures = f"{row.microseconds:10.1f} us  {row.gb_s:8.1f} GB/s {share(row.gb_s, device.read)} {share(row.gb_s, spec[0])}"
    if row.tflop_s is not None:
        figures += f"  {row.tflop_s:7.2f} TFLOP/s {share(row.tflop_s, device.matrix)} {share(row.tflop_s, spec[1])}"
    return f"{head}  {figures}" + ("" if row.error is None else f"  error {row.error:.1e}")


def chosen_loads(platform: str, quick: bool, only: str | None) -> list[Load]:
    """What is measured on a platform; ValueError where nothing has `only` in its op and name."""
    loads = QUICK if quick else ON_CPU if platform == "cpu" else SERVING
    found = [load for load in loads if only is None or only in f"{load.op} {load.name}"]
    names = ", ".join(dict.fromkeys(load.op for load in loads))
    check(bool(found), f"--only must be in the op and name of a case, of {names}; got {only}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench.kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small sizes: whether it runs")
    parser.add_argument("--only", help="only cases whose op and name contain this")
    parser.add_argument("--limit", type=above_zero, default=420, help="seconds after which no further case is begun (default: 420)")
    parser.add_argument("--budget", type=above_zero, help="seconds to measure each implementation for (default: 0.5, on a CPU 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes everything there")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draws shares of the read bandwidth there (extra `plots`)")
    args = parser.parse_args(argv)
    if args.plot is not None and kernel_plot is None:
        parser.error("--plot: needs matplotlib, of the extra `plots`")
    try:
        check_file("--json", args.json)
        check_file("--plot", args.plot)
        fits = args.plot is None or args.plot.suffix.lower() in PICTURES
        check(fits, f"--plot must end in {' or '.join(PICTURES)}; got {args.plot}")
        loads = chosen_loads(platform_of(jax.devices()[0]), args.quick, args.only)
    except ValueError as error:
        parser.error(str(error))
    begin = time.monotonic()
    device = device_at_hand(args.quick)
    budget = args.budget or (2.0 if device.platform == "cpu" else 0.5)  # whoever shares a CPU's memory slows it for a second or so
    print(
        f"{device.name}: reads {device.read:.1f} GB/s, multiplies {device.matrix:.2f} TFLOP/s, both measured; data sheet: ", end=""
    )
    print("not known" if device.spec[0] is None else f"{device.spec[0]:.0f} GB/s, {device.spec[1]:.0f} TFLOP/s")
    print("* is what the op takes by itself; shares are of what was measured, then of the data sheet\n", flush=True)
    rows = []
    for load in loads:
        late = time.monotonic() - begin > args.limit
        new = [Row(load.op, load.name, "all", False, None, why="no time was left")] if late else run_load(load, device, budget)
        for row in new:
            print(line(row, device), flush=True)
        rows += new
    found = goals(rows, device)
    print()
    for goal in found:
        got = "not measured" if goal["reached"] is None else f"{goal['reached']:.2f}"
        print(f"{goal['goal']:<60} wanted {goal['wanted']:.2f}  {got}")
    report = {
        "device": dataclasses.asdict(device) | {"spec": device.spec},
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(time.monotonic() - begin, 1),
        "rows": [dataclasses.asdict(row) for row in rows],
        "goals": found,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if args.plot is not None and kernel_plot is not None:
        kernel_plot.draw(report, args.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
