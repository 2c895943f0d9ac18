"""Clients that leave, requests that end early, and a server that comes and goes: nothing stays behind."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import Server, chat_model, running
from sse import data_of

from pagedjax import LLM
from pagedjax.errors import UserError
from serving.auth import Keys
from serving.config import ServeConfig
from serving.events import Ended
from serving.frontend import Frontend
from serving.http.app import open_http

TLS = Path(__file__).parents[2] / "golden" / "tls"

LONG: dict[str, Any] = {"prompt": "Once", "max_tokens": 120, "ignore_eos": True}


@pytest.fixture(autouse=True)
def slow(slow_steps: None) -> None:
    """120 tokens take more than two seconds: whoever does not cancel is found out."""


def wait_until(done: Callable[[], Any]) -> Any:
    for _ in range(3000):
        found = done()
        if found:
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen within 30 seconds")


def ended(server: Server) -> list[Ended]:
    return [event for event in server.events if isinstance(event, Ended)]


def gone(server: Server, count: int) -> Ended:
    """The request that ended, once that is so many; its blocks are free, and it did not run to its end."""
    event = wait_until(lambda: len(ended(server)) >= count and ended(server)[-1])
    wait_until(lambda: not server.llm.engine.has_work())
    pool = server.llm.engine.scheduler.pool
    assert pool.num_free == pool.capacity and server.frontend.open_requests == 0
    return event


@pytest.mark.parametrize("n", [1, 2])
def test_leaving_a_stream_cancels_it(server: Server, client: httpx.Client, n: int):
    before, made = len(ended(server)), server.llm.engine.scheduler.stats.generated_tokens
    with client.stream("POST", "/v1/completions", json={**LONG, "n": n, "stream": True}) as response:
        assert next(response.iter_text()).startswith("data: ")
    event = gone(server, before + 1)
    assert event.refusal is not None and event.refusal.code == "cancelled" and event.finishes == ()
    assert server.llm.engine.scheduler.stats.generated_tokens - made < n * 60


@pytest.mark.parametrize("body", [LONG, {**LONG, "prompt": ["Once", "Tom"]}])
def test_leaving_before_the_answer_cancels_it(server: Server, client: httpx.Client, body: dict[str, Any]):
    before, made = len(ended(server)), server.llm.engine.scheduler.stats.generated_tokens
    with pytest.raises(httpx.ReadTimeout):
        client.post("/v1/completions", json=body, timeout=0.5)
    event = gone(server, before + (2 if isinstance(body["prompt"], list) else 1))
    assert event.refusal is not None and event.refusal.code == "cancelled"
    assert server.llm.engine.scheduler.stats.generated_tokens - made < 200


def test_who_stays_gets_it_all(server: Server, client: httpx.Client):
    """The control of the two tests above: with the same steps, and nobody leaving, it runs to its end."""
    before = len(ended(server))
    assert client.post("/v1/completions", json={**LONG, "max_tokens": 70}).json()["usage"]["completion_tokens"] == 70
    assert gone(server, before + 1).refusal is None


def test_one_bad_prompt_of_a_batch_leaves_nothing(server: Server, client: httpx.Client):
    before = len(ended(server))
    response = client.post("/v1/completions", json={**LONG, "prompt": ["Once", "a " * 200]})
    assert response.status_code == 400
    gone(server, before)


def test_a_deadline_that_is_met(client: httpx.Client):
    response = client.post("/v1/completions", json={**LONG, "max_tokens": 3}, headers={"x-request-timeout": "60"})
    assert response.json()["usage"]["completion_tokens"] == 3


def test_abort_from_elsewhere_ends_the_stream_with_an_error(server: Server, client: httpx.Client):
    def abort_when_it_runs() -> None:
        wait_until(lambda: server.frontend.open_requests)
        server.on_loop(server.frontend.abort_all)

    thread = threading.Thread(target=abort_when_it_runs)
    thread.start()
    response = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], "stream": True})
    thread.join()
    assert response.json()["error"]["code"] == "cancelled" if response.status_code == 499 else "error" in data_of(response.text)[-1]


def test_a_slow_reader_holds_up_nobody(server: Server, client: httpx.Client):
    """It reads nothing, so what is sent piles up in the sockets, then in its reply, in one update; others go on."""
    host, port = server.url.removeprefix("http://").split(":")
    before = len(ended(server))
    with socket.create_connection((host, int(port))) as lazy:
        body = b'{"prompt": "Once", "max_tokens": 120, "ignore_eos": true, "stream": true, "logprobs": 20}'
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        lazy.sendall(head.encode() + body)
        wait_until(lambda: server.frontend.open_requests)
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 5}).json()["usage"]["completion_tokens"] == 5
        assert client.get("/health").status_code == 200
    gone(server, before + 2)


def test_ids_of_requests(server: Server, client: httpx.Client):
    body = {**LONG, "max_tokens": 1}
    assert client.post("/v1/completions", json=body, headers={"x-request-id": "mine"}).headers["x-request-id"] == "mine"
    first, second = (client.post("/v1/completions", json=body) for _ in range(2))
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert first.json()["id"] != second.json()["id"]
    assert ended(server)[-1].request.id == second.json()["id"]  # the id that a trace is asked for by
    assert client.post("/v1/completions", json=body, headers={"x-request-id": "a" * 257}).status_code == 400
    trace = "0af7651916cd43dd8448eb211c80319c"
    for parent, told in ((f"00-{trace}-b7ad6b7169203331-01", trace), (f"00-{trace}", "")):
        client.post("/v1/completions", json=body, headers={"traceparent": parent})
        assert ended(server)[-1].call.trace.trace_id == told


def test_a_server_without_its_model():
    with running(None) as server, server.client() as client:
        assert client.get("/health").json() == {"status": "live"}
        response = client.get("/ready")
        assert (response.status_code, response.json()) == (503, {"status": "starting"})
        for refused in (client.post("/v1/completions", json=LONG), client.get("/v1/models"), client.get("/ui/state")):
            assert refused.status_code == 503 and refused.json()["error"]["message"] == "the model is being loaded"
            assert refused.headers["retry-after"] == "1"
        assert "vllm:request_success_total" in client.get("/metrics").text
        assert "vllm:num_requests_running" not in client.get("/metrics").text  # nobody knows yet


def test_a_server_that_drains(chat_llm: LLM):
    with running(chat_llm) as server, server.client() as client:
        assert client.get("/ready").json() == {"status": "ready"}
        with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 40, "stream": True}) as response:
            chunks = response.iter_text()
            text = next(chunks)
            server.on_loop(server.frontend.drain)
            assert client.get("/ready").status_code == 503 and client.get("/health").status_code == 200
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            text += "".join(chunks)  # what runs comes to its end
        assert data_of(text)[-1] == "[DONE]" and data_of(text)[-2]["choices"][0]["finish_reason"] == "length"


def test_health_of_an_engine_that_is_stuck(chat_llm: LLM, monkeypatch: pytest.MonkeyPatch):
    with running(chat_llm, wedged_seconds=0.2) as server, server.client() as client:
        free = threading.Event()
        step = chat_llm.engine.step
        monkeypatch.setattr(chat_llm.engine, "step", lambda: (free.wait(30), step())[1])
        thread = threading.Thread(target=lambda: httpx.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 1}))
        thread.start()
        wait_until(lambda: client.get("/health").status_code == 503)
        assert client.get("/v1/models").status_code == 200  # the event loop goes on
        free.set()
        thread.join()
        wait_until(lambda: client.get("/health").status_code == 200)


def test_tls_and_mtls(chat_llm: LLM):
    files = {"tls_cert": str(TLS / "server.pem"), "tls_key": str(TLS / "server.key")}
    trust = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    known = ssl.create_default_context(cafile=str(TLS / "ca.pem"))
    known.load_cert_chain(TLS / "client.pem", TLS / "client.key")

    def health(server: Server, context: ssl.SSLContext) -> int:
        with httpx.Client(verify=context, trust_env=False) as client:
            return client.get(server.url.replace("http:", "https:") + "/health").status_code

    with running(chat_llm, **files) as server:
        assert health(server, trust) == 200
        with pytest.raises(httpx.HTTPError), server.client() as plain:
            plain.get("/health")
    with running(chat_llm, **files, tls_client_ca=str(TLS / "ca.pem")) as server:
        assert health(server, known) == 200
        with pytest.raises(httpx.HTTPError):
            health(server, trust)


def test_what_cannot_be_listened_on(server: Server, tmp_path: Path):
    async def opened(**options: Any) -> None:
        frontend = Frontend(ServeConfig(grpc_port=None, **options), "stories")
        try:
            await open_http(frontend, Keys())
        finally:
            frontend.close()

    (tmp_path / "empty").write_text("")
    for options, message in (
        ({"http_port": int(server.url.rpartition(":")[2])}, "the HTTP port must be free, and of this machine; got 127.0.0.1:"),
        ({"http_port": 0, "host": "nowhere.invalid", "insecure": True}, "host must have an address here; got nowhere.invalid"),
        ({"http_port": 0, "tls_cert": "nowhere", "tls_key": "nowhere"}, "TLS files must be readable, and PEM; got nowhere"),
        ({"http_port": 0, "tls_cert": str(tmp_path / "empty"), "tls_key": str(tmp_path / "empty")}, "TLS files must be readable"),
    ):
        with pytest.raises(UserError, match=message):
            asyncio.run(opened(**options))


def test_a_step_that_fails(tmp_path: Path, compile_cache: str, monkeypatch: pytest.MonkeyPatch):
    """Who waits is told, without the words of the error; health turns; metrics go on without the engine's part."""
    with chat_model(tmp_path, compile_cache) as llm, running(llm) as server, server.client() as client:
        step, left = llm.engine.step, iter(range(10))

        def fail() -> Any:
            if next(left, None) is None:
                raise ZeroDivisionError("a secret")
            return step()

        monkeypatch.setattr(llm.engine, "step", fail)
        events = data_of(client.post("/v1/completions", json={**LONG, "stream": True}).text)
        assert "choices" in events[0] and events[-1]["error"]["code"] == "engine_failed" and "secret" not in str(events[-1])
        wait_until(lambda: client.get("/health").status_code == 503)
        assert client.get("/ready").json() == {"status": "failed"}
        refused = client.post("/v1/completions", json=LONG)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_down"
        assert client.get("/ui/state").status_code == 503
        page = client.get("/metrics").text
        assert 'finished_reason="error",model_name="stories"} 1.0' in page and "vllm:num_requests_running" not in page
