"""Compiles the kernels of every op to machine code for chips that are not here, and prints what the compilers say of them:

    python -m pallas_kernels.aot                                # every backend, its cases, all tuned entries, seven chips
    python -m pallas_kernels.aot --short                        # up to three cases of each op and all tuned entries
    python -m pallas_kernels.aot --op paged_decode --chip sm_90a --json report.json

The exit code is 1 if something failed that its backend says it takes: a refusal by the compiler, spilled registers at a head width
of 128 or in a product, a kv_write that copies its pool, a product that copies its weights. Needs the extras `aot-tpu` and
`aot-gpu`.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from pallas_kernels import OPS
from pallas_kernels.aot.cases import config_of_entry, load_of_entry, loads_of, most_temporary
from pallas_kernels.aot.compile import CompileError, compile_for
from pallas_kernels.aot.targets import missing
from pallas_kernels.aot.worker import Report
from pallas_kernels.common.dispatch import Backend, Op
from pallas_kernels.common.layout import check
from pallas_kernels.common.targets import CHIPS, Chip, chip
from pallas_kernels.common.tuning import ROOT, check_file, load, trying
from pallas_kernels.workload import Load
from pallas_kernels.workload_matmul import Grouped, Quantized

COLUMNS = (
    ("op", 15),
    ("backend", 16),
    ("chip", 6),
    ("case", 52),
    ("s", 5),
    ("VMEM KiB", 8),
    ("shared KiB", 10),
    ("regs", 4),
    ("spills", 6),
    ("alias MiB", 9),
    ("temp KiB", 9),
    ("result", 0),
)


@dataclass(frozen=True)
class Case:
    """A call for one backend and chip; `config` is that of a tuned entry, or None for the backend's own."""

    op: Op
    backend: Backend
    chip: Chip
    load: Load
    config: Any = None


@dataclass(frozen=True)
class Row:
    """What came of a case: "ok", "refused: …" (by `supports`, before anything is traced), or what failed."""

    op: str
    backend: str
    chip: str
    case: str
    result: str
    tuned: bool = False
    report: Report | None = None

    @property
    def failed(self) -> bool:
        return self.result != "ok" and not self.result.startswith("refused: ")


def cases(ops: Sequence[Op], chips: Sequence[Chip], backends: Sequence[str], short: bool) -> Iterator[Case | Row]:
    """Those of the backends that are for a platform alone (named ones: whatever they are for), chip by chip. A Row stands for an
    entry of a tuned.json that makes no case."""
    for target in chips:
        for op in ops:
            for backend in op.backends:
                wanted = backend.name in backends if backends else target.platform in backend.platforms
                if not wanted or (backend.platforms and target.platform not in backend.platforms):
                    continue
                for call in loads_of(op, short, target.platform):
                    yield Case(op, backend, target, call)
                for entry in load(ROOT / op.name / "tuned.json"):
                    if (entry.get("backend"), entry.get("chip")) == (backend.name, target.name):
                        call = load_of_entry(op, entry)
                        config = call and config_of_entry(entry, backend, call, target)
                        if call is None or config is None:
                            why = "an entry of tuned.json that nothing can be made of"
                            yield Row(op.name, backend.name, target.name, json.dumps(entry), why, True)
                        else:
                            yield Case(op, backend, target, call, config)


def build(case: Case) -> Row:
    call, tuned = case.load, case.config is not None
    name = call.name + (f" {case.config}" if tuned else "")
    row = Row(case.op.name, case.backend.name, case.chip.name, name, "ok", tuned)
    reason = case.backend.refuses(call.spec, case.chip.platform, case.chip)
    if reason is not None:
        return dataclasses.replace(row, result=f"refused: it {reason}")
    chosen = trying(case.op.name, case.backend.name, case.config) if tuned else contextlib.nullcontext()
    try:
        with chosen:
            report = compile_for(case.chip.name, call.function(case.backend.name), *call.shapes(), donate=call.donate)
    except CompileError as error:
        return dataclasses.replace(row, result=f"failed: {error}")
    except Exception as error:  # whatever a trace may raise is a result as well
        return dataclasses.replace(row, result=f"failed to trace: {type(error).__name__}: {error}")
    return dataclasses.replace(row, report=report, result=fault(case, report) or "ok")


def fault(case: Case, report: Report) -> str | None:
    """What a compiled program must not do, or None."""
    if report.spill_bytes and getattr(case.load, "width", 128) == 128:
        return f"spills {report.spill_bytes} bytes of registers"
    if isinstance(case.load, Quantized | Grouped) and report.temp_bytes > most_temporary(case.load):
        return f"has temporaries of {report.temp_bytes} bytes, more than the {most_temporary(case.load)} of activations and sums"
    if case.op.name == "kv_write":
        pool = sum(
            math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for i, x in enumerate(case.load.shapes()) if i in case.load.donate
        )
        if report.alias_bytes < pool:
            return f"writes {pool} bytes of pool, of which {report.alias_bytes} are in place"
        if report.temp_bytes >= pool // getattr(case.load, "layers", 1):
            return f"has temporaries of {report.temp_bytes} bytes, as large as a layer of the pool"
    return None


def line(row: Row) -> str:
    report = row.report
    kib = lambda x: "" if x is None else f"{x / 1024:.0f}"
    values = [row.op, row.backend, row.chip, row.case + (" tuned" if row.tuned else "")]
    if report is None:
        values += [""] * 7
    else:
        values += [f"{report.seconds:.1f}", kib(report.vmem_bytes), kib(report.shared_bytes)]
        values += ["" if x is None else str(x) for x in (report.registers, report.spill_bytes)]
        values += [f"{report.alias_bytes / 2**20:.0f}", kib(report.temp_bytes)]
    result = row.result.splitlines()[0][:200] + "".join(f" ({text})" for text in (report.warnings if report else ()))
    return "  ".join(f"{value:<{width}}" for value, (_, width) in zip([*values, result], COLUMNS, strict=True)).rstrip()


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Versions, and a dict for each row."""
    found = []
    for row in rows:
        fields = {f.name: getattr(row, f.name) for f in dataclasses.fields(row) if f.name != "report"}
        if row.report is not None:
            fields |= {k: v for k, v in dataclasses.asdict(row.report).items() if k not in ("text", "chip")}
        found.append(fields)
    versions = {}
    for package in ("jax", "libtpu", "jax-cuda13-plugin", "nvidia-cuda-nvcc"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {"versions": versions, "rows": found}


def chosen_cases(ops: Sequence[Op], chips: Sequence[Chip], backends: Sequence[str], short: bool) -> list[Case | Row]:
    """`cases`; ValueError for a backend that none of the ops has, and where no case is left."""
    names = dict.fromkeys(backend.name for op in ops for backend in op.backends)
    for name in backends:
        check(name in names, f"--backend must be one of {', '.join(names)}; got {name}")
    found = list(cases(ops, chips, backends, short))
    op_names, chip_names = ", ".join(op.name for op in ops), ", ".join(chip.name for chip in chips)
    by = ", ".join(backends) or "any backend"
    check(bool(found), f"--op, --chip and --backend must leave a case; got none of {op_names} by {by} for {chip_names}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="pallas_kernels.aot", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--op", action="append", choices=[op.name for op in OPS], help="only this one; may be given again")
    parser.add_argument("--chip", action="append", choices=[c.name for c in CHIPS], help="only this one; may be given again")
    parser.add_argument("--backend", action="append", default=[], help="only this one; may be given again; also those of XLA")
    parser.add_argument("--short", action="store_true", help="fewer cases: what CI has time for")
    parser.add_argument("--json", type=Path, metavar="FILE", help="writes everything there")
    args = parser.parse_args(argv)
    chips = [chip(name) for name in args.chip] if args.chip else list(CHIPS)
    ops = [op for op in OPS if args.op is None or op.name in args.op]
    try:
        check_file("--json", args.json)
        wanted = chosen_cases(ops, chips, args.backend, args.short)
    except ValueError as error:
        parser.error(str(error))
    for target in chips:
        reason = missing(target.name)
        if reason is not None:
            parser.error(f"{target.name}: {reason}")
    print("  ".join(f"{name:<{width}}" for name, width in COLUMNS).rstrip(), flush=True)
    rows = []
    for case in wanted:
        rows.append(case if isinstance(case, Row) else build(case))
        print(line(rows[-1]), flush=True)
    failed = sum(row.failed for row in rows)
    done = sum(row.result == "ok" for row in rows)
    print(f"{len(rows)} cases: {done} compiled, {failed} failed, {len(rows) - done - failed} refused before by their backend")
    if args.json is not None:
        args.json.write_text(json.dumps(as_json(rows), indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
