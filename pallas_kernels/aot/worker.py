"""The process that compiles for one chip, started and spoken to by compile.py.

A compiler written in C++ keeps state for the whole process, reports on the file descriptors 1 and 2, and ends the process when it
meets what it does not know. All three stay in here.
"""

import contextlib
import hashlib
import os
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax import export
from jax.extend.mlir import ir
from jax.sharding import SingleDeviceSharding

from pallas_kernels.aot.targets import devices_for
from pallas_kernels.common.targets import chip


@dataclass(frozen=True)
class Order:
    """What is to be compiled: a function with flat arguments, as jax.export writes it."""

    exported: bytes
    donate: tuple[int, ...]  # of the flat arguments
    options: dict[str, Any] | None  # of XLA


@dataclass(frozen=True)
class Report:
    """What the compiler says of a program for one chip. None: this chip has no such thing, or no kernel that tells it."""

    chip: str
    seconds: float  # to compile, without tracing
    alias_bytes: int  # of arguments that outputs are written into
    temp_bytes: int
    vmem_bytes: int | None  # scoped VMEM of the largest TPU kernel
    shared_bytes: int | None  # shared memory of the largest Mosaic GPU kernel, without its barriers
    registers: int | None  # of a thread, the most of any Mosaic GPU kernel
    spill_bytes: int | None  # spill stores and loads of all Mosaic GPU kernels
    warnings: tuple[str, ...]  # ptxas's own words, for kernels that lose speed
    text: str  # the compiled program, as HLO


def output_file(pid: int) -> Path:
    """Where `captured_output` of this process keeps what it has caught; still there after a process that a compiler ended."""
    return Path(tempfile.gettempdir()) / f"pallas-kernels-aot-{pid}.txt"


@contextlib.contextmanager
def captured_output() -> Iterator[list[str]]:
    """What this process writes on its file descriptors 1 and 2 meanwhile, as the one element of a list that is empty until the
    end."""
    said: list[str] = []
    path = output_file(os.getpid())
    kept = [(fd, os.dup(fd)) for fd in (1, 2)]
    with path.open("wb") as file:
        try:
            for fd, _ in kept:
                os.dup2(file.fileno(), fd)
            with open(1, "w", buffering=1, closefd=False) as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                yield said
        finally:
            for fd, old in kept:
                os.dup2(old, fd)
                os.close(old)
            said.append(path.read_text(encoding="utf-8", errors="replace"))
            path.unlink()


def largest(pattern: str, text: str) -> int | None:
    return max((int(x) for x in re.findall(pattern, text)), default=None)


def rename_kernels(lowered: jax.stages.Lowered, name: str) -> None:
    """Lets the names of Mosaic GPU kernels, hashes of their text, depend on `name` too: the compiler keeps kernels by name, and
    says nothing of one that it has."""
    module: Any = lowered.compiler_ir("stablehlo")
    calls = []

    def collect(op: Any) -> Any:
        if op.name == "stablehlo.custom_call":
            calls.append(op)
        return ir.WalkResult.ADVANCE

    module.operation.walk(collect)
    for call in calls:
        key = "mhlo.backend_config" if "mhlo.backend_config" in call.attributes else "backend_config"
        config: Any = call.attributes.get(key, None)
        if isinstance(config, ir.DictAttr) and "kernel_hash" in config:
            fields: dict[str, Any] = {field.name: field.attr for field in config}
            digest = hashlib.sha256(fields["kernel_hash"].value_bytes + name.encode()).digest()
            with module.context:
                fields["kernel_hash"] = ir.StringAttr.get(digest)
                call.attributes[key] = ir.DictAttr.get(fields)


def build(chip_name: str, order: Order, traced: str) -> Report:
    """traced: what was printed when the function was traced, which is where Mosaic GPU tells of shared memory."""
    place = SingleDeviceSharding(devices_for(chip_name)[0])
    exported = export.deserialize(bytearray(order.exported))
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place) for x in exported.in_avals]
    with captured_output() as said:
        call = jax.jit(exported.call, donate_argnums=order.donate)
        lowered = call.trace(*args).lower(lowering_platforms=(chip(chip_name).platform,))
        rename_kernels(lowered, str(time.perf_counter_ns()))
        begin = time.perf_counter()
        compiled = lowered.compile(order.options)
        seconds = time.perf_counter() - begin
    memory, text = compiled.memory_analysis(), compiled.as_text() or ""
    if memory is None:
        raise RuntimeError(f"the compiler for {chip_name} says nothing of memory")
    spills = [int(x) for x in re.findall(r"(\d+) bytes spill", said[0])]
    return Report(
        chip=chip_name,
        seconds=seconds,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        vmem_bytes=largest(r'"memory_space":"1","offset":"\d+","size":"(\d+)"', text),
        shared_bytes=largest(r"smem_scratch_bytes=(\d+)", traced),
        registers=largest(r"Used (\d+) registers", said[0]),
        spill_bytes=sum(spills) if spills else None,
        warnings=tuple(dict.fromkeys(re.findall(r"Potential Performance Loss: (.*)", said[0]))),
        text=text,
    )


def serve(chip_name: str) -> None:
    """Reads pickled (Order, str) pairs from the standard input until it ends; answers each with a pickled Report, or the text of
    an error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            order, traced = pickle.load(sys.stdin.buffer)
        except EOFError:
            os._exit(0)  # compilers' threads can keep a process from its end
        try:
            answer: Report | str = build(chip_name, order, traced)
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()
