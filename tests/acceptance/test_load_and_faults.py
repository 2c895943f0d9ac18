"""A short run of bench.faults against a server's process: each of its checks holds."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_short_run(tmp_path: Path, compile_cache: str) -> None:
    command = [sys.executable, "-m", "bench.faults", "tests/golden/stories260K", "--minutes", "0.25", "--poll-limit", "60"]
    command += ["--json", str(tmp_path / "report.json"), "--compile-cache", compile_cache, "--slack", "64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["checks"]) == 12 and all(check["ok"] for check in report["checks"])
    assert set(report["requests"]) == {
        *("answer", "batch", "form", "sampled", "longest", "cancel", "abort", "late", "slow", "half", "malformed", "drain")
    }
