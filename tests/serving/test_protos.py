"""The code in serving/proto is what protoc makes of the .proto files beside it."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "serving" / "proto").rglob("*.proto"))


def test_generated_code_is_current(tmp_path: Path) -> None:
    """`make protos` makes it anew."""
    if importlib.util.find_spec("grpc_tools") is None:
        pytest.skip("needs grpcio-tools")
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi")]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", "-I.", *outputs, *PROTOS], cwd=ROOT, check=True)
    made = {path.relative_to(tmp_path).as_posix(): path.read_text() for path in tmp_path.rglob("*_pb2*")}
    kept = {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for path in (ROOT / "serving").rglob("*_pb2*.py*")
        if path.suffix != ".pyc"
    }
    assert len(made) == 3 * len(PROTOS) and kept == made
