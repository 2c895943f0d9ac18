"""The Grafana board reads what the server exports. tests/acceptance asks a Prometheus for the values."""

import httpx
from board import BOARD, PANELS, expressions, filled, names
from http_server import Server
from prometheus_client.parser import text_string_to_metric_families


def unknown(asked: list[str], exported: set[str]) -> list[str]:
    return sorted({name for expression in asked for name in names(expression)} - exported)


def test_every_name_is_exported(client: httpx.Client, server: Server):
    client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 2})
    client.post("/v1/completions", json={"prompt": "a " * 200})
    families = text_string_to_metric_families(client.get("/metrics").text)
    exported = {sample.name for family in families for sample in family.samples}
    assert unknown(expressions(), exported) == []
    wrong = "rate(vllm:generation_token_total[1m]) / pagedjax:lane"  # the control
    assert unknown([wrong], exported) == ["pagedjax:lane", "vllm:generation_token_total"]
    assert len({name for expression in expressions() for name in names(expression)}) > 40


def test_panels_have_a_place_and_a_question_each():
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        sources = {target["datasource"]["uid"] for target in panel["targets"]} | {panel["datasource"]["uid"]}
        assert sources == {"${datasource}"}, panel["title"]
    for expression in expressions():
        has_model = any(name.startswith(("vllm", "pagedjax")) for name in names(expression))
        assert "$instance" in expression and has_model == ("$model" in expression) and filled(expression)
