"""Which pinned versions have known vulnerabilities: python audit.py [--may-be-unreachable] FILE PIP_AUDIT…

FILE has lines name==version, PIP_AUDIT… is the command that runs pip-audit. Exit code 0: all versions were looked up, and none has
any; 1: some have, or could not be looked up; 3: no advisory service answers, which --may-be-unreachable makes a 0.

pip-audit alone finds "no known vulnerabilities" where the index it asks answers that it knows no package at all, as mirrors do. So
each service has to know first what everybody knows.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTORIOUS = "jinja2==2.4.1"  # CVE-2014-1402 and more
SERVICES = ("pypi", "osv")


def ask(command: list[str], service: str, file: str) -> list[Any]:
    """What the service says of each line; nothing if it does not answer."""
    options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--desc", "off", "--format", "json"]
    done = subprocess.run(
        [*command, "--vulnerability-service", service, *options, "--requirement", file], capture_output=True, text=True, check=False
    )
    try:
        return json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        print(f"{service}: {(done.stderr.strip().splitlines() or ['no answer'])[-1][:300]}")
        return []


def answers(command: list[str], service: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "notorious.txt"
        file.write_text(NOTORIOUS + "\n")
        known = any(entry.get("vulns") for entry in ask(command, service, str(file)))
    if not known:
        print(f"{service}: knows no vulnerability of {NOTORIOUS}, so that it is not asked about anything else")
    return known


def main(arguments: list[str]) -> int:
    lenient = arguments[:1] == ["--may-be-unreachable"]
    file, *command = arguments[lenient:]
    service = next((s for s in SERVICES if answers(command, s)), None)
    if service is None:
        print(f"audit: NOT DONE: no advisory service can be reached from here, nothing is known about the versions in {file}")
        return 0 if lenient else 3
    entries = ask(command, service, file)
    wrong = [f"{e['name']} {e['version']}: {', '.join(v['id'] for v in e['vulns'])}" for e in entries if e.get("vulns")]
    wrong += [e["skip_reason"] for e in entries if "skip_reason" in e]
    print("\n".join([*wrong, f"audit: {len(entries)} versions looked up at {service}, {len(wrong)} of them have something above"]))
    return 1 if wrong or not entries else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
