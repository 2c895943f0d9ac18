"""`pagedjax doctor`: what this machine has, and what pagedjax will do with it."""

import importlib.metadata
import importlib.util
import os
import platform
import re
from typing import Any

import jax
from rich.table import Table

from pagedjax import terminal
from pagedjax.commands.cache import entries
from pagedjax.config import default_block_size
from pallas_kernels import OPS
from pallas_kernels.common.dispatch import choose
from pallas_kernels.common.targets import platform_of


def run(command: Any) -> None:
    """`command` is cli.Doctor. Prints to stdout."""
    for title, rows in (
        ("versions", versions()),
        ("devices", devices()),
        ("compile cache", cache(command.compile_cache)),
        ("ops", ops(jax.devices()[0])),
    ):
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*row)
        terminal.show(table, "")


def versions() -> list[tuple[str, str]]:
    """Of Python, of pagedjax, and of what it asks for."""
    asked = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in requirements() if "extra ==" not in line]
    names = ["pagedjax", *sorted({*asked, "jaxlib"})]
    return [("python", f"{platform.python_version()} on {platform.platform()}"), *((name, version(name)) for name in names)]


def requirements() -> list[str]:
    try:
        return importlib.metadata.requires("pagedjax") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def devices() -> list[tuple[str, str]]:
    """Every device that JAX finds, its memory, and the host."""
    found = jax.devices()
    memory = [(device.memory_stats() or {}).get("bytes_limit") for device in found]
    rows = [
        (f"{device.platform} {device.id}", f"{device.device_kind}{f', {terminal.size(limit)}' if limit else ''}")
        for device, limit in zip(found, memory, strict=True)
    ]
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = ""
    if "SC_AVPHYS_PAGES" in os.sysconf_names:  # not on macOS
        free = f"{terminal.size(os.sysconf('SC_AVPHYS_PAGES') * os.sysconf('SC_PAGE_SIZE'))} of it free"
    rows.append(("host", f"{os.cpu_count()} cores, {terminal.size(total)} memory{', ' if free else ''}{free}"))
    platform_name: Any = found[0].platform
    return [*rows, ("block size", f"{default_block_size(platform_name)} tokens, unless --block-size says another")]


def cache(folder: str) -> list[tuple[str, str]]:
    if not folder:
        return [("folder", "none: every start compiles anew")]
    held = entries(folder)
    return [("folder", folder), ("entries", f"{len(held)}, {terminal.size(sum(path.stat().st_size for path in held))}")]


def ops(device: Any) -> list[tuple[str, str, str]]:
    """For each op the backend that it uses on this device and why, and why not the others; for the sizes of a Llama 3 8B."""
    rows, platform = [], platform_of(device)
    for op in OPS:
        used = choose(op, op.typical, platform)
        rows.append((op.name, used.name, used.why))
        for other in op.backends:
            reason = other.refuses(op.typical, platform) or f"comes after {used.name}"
            rows += [] if other is used else [("", f"not {other.name}", f"{reason}: {other.why}")]
    return rows
