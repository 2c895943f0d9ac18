"""Programs of others, and our own server, as processes beside the tests."""

import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from loopback import until

ROOT = Path(__file__).parents[1]
PATIENCE = 600  # seconds in which even a machine with much else to do starts a program


def found(name: str) -> str:
    """Where the program is: beside this Python, or on the PATH; "" if it is not here."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or ""


def started(command: list[str], pattern: str, log: Path) -> tuple[subprocess.Popen[str], re.Match[str]]:
    """(a process, what its log says once it is up)."""
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=out, text=True)
    said: list[re.Match[str]] = []

    def is_up() -> bool:
        assert process.poll() is None, log.read_text()
        said.extend(re.finditer(pattern, log.read_text()))
        return bool(said)

    try:
        until(is_up, PATIENCE)
    except AssertionError:
        process.kill()
        process.wait()
        raise
    return process, said[0]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
