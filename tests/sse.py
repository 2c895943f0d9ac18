"""Server-sent events, read back."""

import json
from typing import Any

import httpx


def data_of(body: str) -> list[Any]:
    """The data of each event; "[DONE]" as it is. Every event is one line of data, after at most one that names it."""
    found = []
    for event in body.removesuffix("\n\n").split("\n\n"):
        *names, line = event.split("\n")
        assert line.startswith("data: ") and all(name.startswith("event: ") for name in names) and len(names) <= 1, event
        text = line.removeprefix("data: ")
        found.append(text if text == "[DONE]" else json.loads(text))
        assert not names or names[0] == f"event: {found[-1]['type']}"
    return found


def stream(client: httpx.Client, path: str, **body: Any) -> list[Any]:
    """All events of a streamed answer."""
    response = client.post(path, json={"stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    response.content.decode("ascii")
    return data_of(response.text)


def texts(events: list[Any]) -> dict[int, str]:
    """The text of each choice of chat or completions."""
    found: dict[int, str] = {}
    for event in events:
        for choice in [] if event == "[DONE]" else event["choices"]:
            piece = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + piece
    return found
