"""What .ci/audit.py makes of pip-audit's words, also where no service can be reached."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[1] / ".ci" / "audit.py"
# Stands for pip-audit: what a service answers about each line of the file, from a table.
PIP_AUDIT = """
import json, pathlib, sys
table = json.loads(sys.argv[1])[sys.argv[sys.argv.index("--vulnerability-service") + 1]]
if table is None:
    sys.exit("ConnectionError: it could not be reached")
lines = pathlib.Path(sys.argv[-1]).read_text().split()
print(json.dumps({"dependencies": [{"name": l.split("==")[0], "version": l.split("==")[1], **table[l]} if l in table else
    {"name": l.split("==")[0], "skip_reason": f"{l} was not found"} for l in lines]}))
"""
CLEAN, HOLES = {"vulns": []}, {"vulns": [{"id": "CVE-1"}, {"id": "CVE-2"}]}
KNOWN = {"jinja2==2.4.1": HOLES}


@pytest.mark.parametrize(
    ("pypi", "osv", "code", "told"),
    [
        ({**KNOWN, "a==1": CLEAN, "b==2": CLEAN}, None, 0, "2 versions looked up at pypi, 0 of them"),
        ({**KNOWN, "a==1": CLEAN, "b==2": HOLES}, None, 1, "b 2: CVE-1, CVE-2"),
        ({**KNOWN, "a==1": CLEAN}, None, 1, "b==2 was not found"),
        ({}, {**KNOWN, "a==1": CLEAN, "b==2": HOLES}, 1, "b 2: CVE-1, CVE-2\naudit: 2 versions looked up at osv, 1 of them"),
        ({}, None, 3, "osv: ConnectionError: it could not be reached"),
        ({"jinja2==2.4.1": CLEAN, "a==1": CLEAN, "b==2": CLEAN}, None, 3, "audit: NOT DONE"),  # "nothing is known" of everything
    ],
)
@pytest.mark.parametrize("lenient", [False, True])
def test_audit(tmp_path: Path, lenient: bool, pypi: object, osv: object, code: int, told: str) -> None:
    file = tmp_path / "pins.txt"
    file.write_text("a==1\nb==2\n")
    command = [sys.executable, "-c", PIP_AUDIT, json.dumps({"pypi": pypi, "osv": osv})]
    options = ["--may-be-unreachable"] * lenient
    done = subprocess.run([sys.executable, str(AUDIT), *options, str(file), *command], capture_output=True, text=True, check=False)
    assert done.returncode == (0 if lenient and code == 3 else code), done.stdout + done.stderr
    assert told in done.stdout and ("NOT DONE" in done.stdout) == (code == 3)
