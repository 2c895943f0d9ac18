"""Debian's Prometheus, which scrapes a server."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from loopback import until
from programs import found, free_port, started

PROMETHEUS = found("prometheus")
Ask = Callable[[str], list[Any]]


@contextlib.contextmanager
def scraping(url: str, folder: Path) -> Iterator[tuple[str, Ask]]:
    """(its own URL, a way to ask it) of a Prometheus that scrapes `url` every second."""
    target, address = url.removeprefix("http://"), f"127.0.0.1:{free_port()}"
    config = (
        f"global: {{scrape_interval: 1s}}\nscrape_configs: [{{job_name: pagedjax, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    (folder / "prometheus.yml").write_text(config)
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process, _ = started([*command, f"--web.listen-address={address}"], "ready to receive web requests", folder / "log")

    def ask(expression: str) -> list[Any]:
        answer = httpx.get(f"http://{address}/api/v1/query", params={"query": expression}, trust_env=False).json()
        assert answer["status"] == "success", f"{expression}: {answer}"
        return answer["data"]["result"]

    try:
        until(lambda: ask("up == 1"))
        yield f"http://{address}", ask
    finally:
        process.terminate()
        process.wait(30)
