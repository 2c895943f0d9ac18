"""How the server is: health, readiness, models, version, metrics, and the page that shows it all."""

import base64
import hashlib
import re
import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from serving.errors import Refusal
from serving.frontend import VERSION
from serving.http.site import FromClient, Known, OfSite
from serving.metrics import Blocks, exposition

MOST_CELLS = 1536  # squares of the block map
PAGE = (Path(__file__).parents[1] / "ui" / "index.html").read_text(encoding="utf-8")

router = APIRouter()


@router.get("/health", response_class=JSONResponse)
async def health(site: OfSite) -> Response:
    """Live: the process works, and no step takes too long. Loading is live, too."""
    live = site.frontend.is_live()
    return JSONResponse({"status": "live" if live else "failed"}, 200 if live else 503)


@router.get("/ready", response_class=JSONResponse)
async def ready(site: OfSite) -> Response:
    """Requests are taken: every shape is compiled, and the server does not end."""
    state = site.frontend.state
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


@router.get("/version", response_class=JSONResponse)
async def show_version() -> Response:
    return JSONResponse({"version": VERSION})


@router.get("/v1/models", response_class=JSONResponse)
async def models(asked: FromClient) -> Response:
    """The one model that is served."""
    return JSONResponse({"object": "list", "data": [_model(asked)]}, headers=asked.headers)


@router.get("/v1/models/{name:path}", response_class=JSONResponse)
async def model(name: str, asked: FromClient) -> Response:
    asked.check_model(name)
    return JSONResponse(_model(asked), headers=asked.headers)


def _model(asked: FromClient) -> dict[str, Any]:
    frontend = asked.frontend
    length = frontend.llm.engine.config.schedule.max_model_len
    shown = {"id": frontend.model_name, "object": "model", "created": int(frontend.started), "owned_by": "pagedjax"}
    return {**shown, "root": frontend.model_name, "parent": None, "max_model_len": length}


@router.get("/metrics", response_class=Response)
async def metrics(site: OfSite) -> Response:
    """In Prometheus' text format. Without an engine that answers, its part is missing."""
    frontend, engine = site.frontend, await site.snapshot()
    of_port, prefix = site.traffic.metrics(), frontend.config.metrics_prefix
    page = exposition(frontend.model_name, site.requests, engine, more=of_port, prefix=prefix)
    return Response(page, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/", include_in_schema=False)
async def root() -> Response:
    return RedirectResponse("ui")


@router.get("/ui", response_class=HTMLResponse)
async def ui() -> Response:
    """A page to chat with the model and to watch the engine."""
    return HTMLResponse(PAGE, headers=PAGE_HEADERS)


@router.get("/ui/state", response_class=JSONResponse)
async def ui_state(site: OfSite, _: Known) -> Response:
    """What the page shows, as of now; counters are since start."""
    now = await site.snapshot()
    if now is None:
        site.frontend.llm  # noqa: B018 says it better while the model is being loaded
        raise Refusal("not_ready", "the engine does not answer: it is in a long step, or has ended")
    tokenizer = site.frontend.llm.tokenizer
    state = {
        "model": site.frontend.model_name,
        "state": site.frontend.state,
        "chat": tokenizer is not None and bool(tokenizer.templates),
        "time": time.monotonic(),
        "running": now.running,
        "waiting": now.queued + now.deferred,
        "lanes": now.lanes,
        "generated": now.stats.generated_tokens,
        "computed": now.computed,
        "padding": now.padding,
        "compilations": len(now.compile_seconds),
        "compilations_after_start": now.compilations_after_start,
        "blocks": block_map(now.blocks),
    }
    return JSONResponse(state)


def block_map(blocks: Blocks, most: int = MOST_CELLS) -> dict[str, Any]:
    """Counts, and a digit for each square of the map; of blocks that share a square the busiest shows."""
    each = -(-blocks.total // most)
    squares = (max(blocks.states[i : i + each]) for i in range(0, blocks.total, each))
    counts = {name: getattr(blocks, name) for name in ("total", "size", "used", "shared", "cached", "free")}
    return {**counts, "cells": "".join(map(str, squares)), "per_cell": each}


def page_policy(page: str) -> str:
    """A content security policy under which the page's own style and script run, and nothing else."""

    def allow(tag: str) -> str:
        parts = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" for part in parts)

    rules = f"script-src {allow('script')}; style-src {allow('style')}; connect-src 'self'; img-src data:"
    return f"default-src 'none'; {rules}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


PAGE_HEADERS = {"content-security-policy": page_policy(PAGE), "cache-control": "no-cache", "x-content-type-options": "nosniff"}
