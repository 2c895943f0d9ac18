"""The Grafana board of deploy/, as what it asks of Prometheus."""

import json
import re
from pathlib import Path
from typing import Any

BOARD: dict[str, Any] = json.loads((Path(__file__).parents[1] / "deploy/grafana/pagedjax.json").read_text(encoding="utf-8"))
PANELS: list[dict[str, Any]] = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
NAME = re.compile(r"\b(?:vllm|pagedjax|http|process)[a-z0-9_:]*[a-z0-9]")


def expressions() -> list[str]:
    """As they are written, with Grafana's variables."""
    return [target["expr"] for panel in PANELS for target in panel["targets"]]


def filled(expression: str, model: str = ".*", instance: str = ".*") -> str:
    """As Grafana sends it; the defaults are those of "All"."""
    for name, value in (("$__rate_interval", "30s"), ("$model", model), ("$instance", instance)):
        expression = expression.replace(name, value)
    assert "$" not in expression, expression
    return expression


def names(expression: str) -> set[str]:
    """Of the series it reads; those of a histogram end in _bucket, _sum or _count."""
    return set(NAME.findall(re.sub(r'"[^"]*"', "", expression)))
