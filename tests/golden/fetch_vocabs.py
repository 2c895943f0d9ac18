"""Fetches llama.cpp's vocabulary files (GGUF without weights, 0.7 to 16 MB each) that the vectors in tests/golden/vocab belong to.

    python tests/golden/fetch_vocabs.py [--uv PATH] [FOLDER]      FOLDER: .models/vocab

They lie in the source distribution of llama-cpp-python, which pip downloads (77 MB) and nothing here builds.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "llama-cpp-python==0.3.36"
SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".models/vocab"))
    parser.add_argument("--uv", default=shutil.which("uv") or ".tools/bin/uv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        pip = [options.uv, "run", "--quiet", "--no-project", "--with", "pip", "python", "-m", "pip"]
        subprocess.run(
            [*pip, "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python", "--dest", scratch, PACKAGE], check=True
        )
        archive = next(Path(scratch).glob("*.tar.gz"))
        found = hashlib.sha256(archive.read_bytes()).hexdigest()
        if found != SHA256:
            sys.exit(f"{archive.name} must have sha256 {SHA256}; got {found}")
        options.folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as tar:
            for member in tar:
                name = Path(member.name).name
                if name.startswith("ggml-vocab-") and name.endswith(".gguf") and (source := tar.extractfile(member)) is not None:
                    (options.folder / name).write_bytes(source.read())
                    print(options.folder / name)


if __name__ == "__main__":
    main()
