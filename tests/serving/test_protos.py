"""The code in serving/proto is what protoc makes of the .proto files beside it, and these keep what was promised."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROMISED = "tests/golden/pagedjax_v1.binpb"  # buf's image of the last release
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


@pytest.mark.parametrize(
    ("was", "becomes", "told"),
    [
        ("", "", ""),
        ("uint32 top_logprobs = 4", "uint32 top_logprobs = 5", '"4" with name "top_logprobs"'),
        ("rpc Score(", "rpc Rate(", 'Previously present RPC "Score"'),
        ("uint32 top_logprobs = 4", "string top_logprobs = 4", 'changed type from "uint32" to "string"'),
    ],
)
def test_a_broken_promise_is_found(tmp_path: Path, was: str, becomes: str, told: str) -> None:
    """By what `make lint` runs; nothing is found in what is there."""
    buf = Path(sys.executable).with_name("buf")
    if not buf.exists():
        pytest.skip("needs buf, which `make install` installs")
    shutil.copytree(ROOT / "serving" / "proto", tmp_path / "serving" / "proto")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    file = tmp_path / "serving" / "proto" / "pagedjax" / "v1" / "inference.proto"
    text = file.read_text()
    assert was in text
    file.write_text(text.replace(was, becomes))
    command = [str(buf), "breaking", "--against", str(ROOT / PROMISED)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) == bool(told) and told in done.stdout
