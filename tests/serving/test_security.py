"""Who is let in: keys, tenants, urgency, rights, TLS; and where the server may listen."""

import asyncio
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status
from loopback import Server, serving, until
from smg_grpc_proto import vllm_engine_pb2 as vllm
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2 as common

from pagedjax import LLM
from pagedjax.errors import UserError
from serving.auth import Caller, Keys, authenticate, read_keys
from serving.config import ServeConfig, check_exposure
from serving.errors import Refusal
from serving.frontend import Frontend
from serving.proto.pagedjax.v1 import inference_pb2 as pb
from serving.proto.pagedjax.v1.inference_pb2_grpc import InferenceStub
from serving.rpc.listen import open_grpc

TLS = Path(__file__).parents[1] / "golden" / "tls"
WORDS = ("alice", "bob", "gate", "root")
ENTRIES = [
    {"name": "alice", "tenant": "a", "priority": 2},
    {"name": "bob", "tenant": "b", "salt": "shared"},
    {"name": "gate", "tenant": "*"},
    {"name": "root", "tenant": "ops", "admin": True, "priority": -5, "salt": "shared"},
]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """Each one's key is key-NAME."""
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    hashes = [{**e, "sha256": hashlib.sha256(f"key-{e['name']}".encode()).hexdigest()} for e in ENTRIES]
    file.write_text(json.dumps(hashes))
    return read_keys(str(file))


@pytest.fixture(scope="module")
def server(llm: LLM, keys: Keys) -> Iterator[Server]:
    with serving(llm, keys) as made:
        yield made


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as made:
        yield made


def bearer(name: str, **more: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer key-{name}"), *((f"x-{k}", v) for k, v in more.items()))


def request(text: str = "Once", **fields: Any) -> Any:
    return pb.GenerateRequest(prompts=[pb.Prompt(text=text)], params=pb.SamplingParams(temperature=0, max_tokens=4), **fields)


def test_nobody_without_a_key(server: Server, channel: grpc.Channel) -> None:
    """And whoever tries is told to observers, in the client's trace."""
    stub, seen = InferenceStub(channel), []
    server.frontend.observers.append(seen.append)
    for metadata, message in (
        ((), "an API key is needed: authorization: Bearer KEY"),
        ((("authorization", "Bearer nonsense"),), "the API key is not known"),
        ((("authorization", "Bearer "),), "an API key is needed"),
    ):
        for call in (lambda m: stub.Generate(request(), metadata=m), lambda m: list(stub.GenerateStream(request(), metadata=m))):
            with pytest.raises(grpc.RpcError, match=message) as caught:
                call(metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
    with pytest.raises(grpc.RpcError):
        stub.Generate(request(), metadata=(("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),))
    server.frontend.observers.remove(seen.append)
    assert [(event.refusal.code, event.ids) for event in seen] == [("unauthenticated", {})] * 6 + [
        ("unauthenticated", {"trace_id": "a" * 32})
    ]
    for metadata in (bearer("alice"), (("x-api-key", "key-alice"),)):
        assert stub.Generate(request(), metadata=metadata).completions
    health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())  # whoever asks after health has no key
    assert health.status == health_pb2.HealthCheckResponse.SERVING


def test_a_key_is_its_tenant_salt_and_urgency(server: Server, channel: grpc.Channel) -> None:
    seen: list[Any] = []
    add = server.llm.engine.add
    server.llm.engine.add = lambda request: (seen.append(request), add(request))[1]
    try:
        stub = InferenceStub(channel)
        for metadata in (bearer("alice"), bearer("bob"), bearer("alice", priority="7"), bearer("gate", tenant="c"), bearer("gate")):
            stub.Generate(request(cache_salt="x"), metadata=metadata)
    finally:
        server.llm.engine.add = add
    services = [(r.service.tenant, r.service.priority, r.salt) for r in seen]
    assert services == [("a", 2, "a/x"), ("b", 0, "shared/x"), ("a", 7, "a/x"), ("c", 0, "c/x"), ("gate", 0, "gate/x")]
    for metadata, message in (
        (bearer("alice", tenant="b"), "this key is not of tenant 'b'"),
        (bearer("alice", priority="1"), "this key's requests may have priority 2; got 1"),
    ):
        with pytest.raises(grpc.RpcError, match=message) as caught:
            stub.Generate(request(), metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    for metadata, message in (
        (bearer("alice", priority="soon"), "a priority is an integer; got 'soon'"),
        (bearer("alice", priority="1000"), "a priority is between -100 and 100; got 1000"),
        (bearer("gate", tenant="a/b"), "a tenant is up to 64 letters"),
    ):
        with pytest.raises(grpc.RpcError, match=message) as caught:
            stub.Generate(request(), metadata=metadata)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = rpc_status.from_call(caught.value).details
        assert details[0].Is(error_details_pb2.ErrorInfo.DESCRIPTOR) and details[1].Is(error_details_pb2.BadRequest.DESCRIPTOR)


def test_tenants_cannot_see_each_other_in_the_cache(channel: grpc.Channel) -> None:
    """A second request of the same tenant finds the prompt cached; one of another tenant does not, unless they share a salt."""
    stub, text = InferenceStub(channel), "One day a boy and his dog went to the park to play with a red ball"

    def cached(name: str) -> bool:
        return stub.Generate(request(text), metadata=bearer(name)).completions[0].samples[0].usage.cached_tokens > 0

    assert [cached(name) for name in ("alice", "alice", "bob", "root", "gate")] == [False, True, False, True, False]


def test_nobody_aborts_what_is_not_theirs(server: Server, channel: grpc.Channel) -> None:
    stub, engine = InferenceStub(channel), vllm_engine_pb2_grpc.VllmEngineStub(channel)
    long = pb.GenerateRequest(request_id="mine", prompts=[pb.Prompt(text="Once")], params=pb.SamplingParams(max_tokens=60))
    with server.slow_steps(0.01):
        answers = stub.GenerateStream(long, metadata=bearer("alice"))
        next(answers)
        engine.Abort(vllm.AbortRequest(request_ids=["mine"]), metadata=bearer("bob"))
        next(answers)
        engine.Abort(vllm.AbortRequest(request_ids=["mine"]), metadata=bearer("alice"))
        last = list(answers)[-1].samples[0]
    assert last.finish_reason == pb.FINISH_REASON_CANCELLED
    until(server.is_free)


def test_what_needs_admin_rights(channel: grpc.Channel) -> None:
    engine = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    asks = [
        lambda who: engine.FlushCache(common.FlushCacheRequest(), metadata=who),
        lambda who: next(
            engine.SubscribeKvEvents(common.SubscribeKvEventsRequest(load_records_before_first_batch=True), metadata=who)
        ),
    ]
    for ask in asks:
        with pytest.raises(grpc.RpcError, match="key 'alice' has no admin rights") as caught:
            ask(bearer("alice"))
        assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
        ask(bearer("root"))


def test_without_keys_everybody_may_name_a_tenant() -> None:
    assert authenticate(Keys(), [], "t", "-3") == Caller("", "t", "t", -3, admin=True)
    assert authenticate(Keys(), []) == Caller()
    with pytest.raises(Refusal, match="a tenant is up to 64 letters"):
        authenticate(Keys(), [], "a b")


def test_files_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, good = tmp_path / "keys.json", {"name": "a", "tenant": "t", "sha256": "0" * 64}
    for text, message in (
        ("{", "API keys must be a JSON list; got"),
        ("{}", "API keys must be a JSON list of objects"),
        ("[]", "a file of API keys must hold one at least"),
        (json.dumps([{"name": "a"}]), "must have name, sha256 and tenant; sha256, tenant is missing"),
        (json.dumps([{**good, "role": 1}]), "an API key may have name, .*; got role"),
        (json.dumps([{**good, "sha256": "secret"}]), "sha256 of key 'a' must be 64 hexadecimal digits"),
        (json.dumps([{**good, "priority": True}]), "priority of an API key must be int; got True"),
        (json.dumps([{**good, "priority": 200}]), "priority of key 'a' must be between -100 and 100; got 200"),
        (json.dumps([{**good, "tenant": "a b"}]), "tenant of key 'a' must be \\* or up to 64 letters"),
        (json.dumps([{**good, "name": ""}]), "a key's name must be up to 64 letters"),
    ):
        file.write_text(text)
        with pytest.raises(UserError, match=message) as caught:
            read_keys(str(file))
        assert "secret" not in str(caught.value)
    with pytest.raises(UserError, match="API keys must be a JSON list; got nowhere: No such file"):
        read_keys("nowhere")
    monkeypatch.setenv("PAGEDJAX_API_KEYS", json.dumps([good]))
    assert read_keys("").entries[0].name == "a"
    monkeypatch.delenv("PAGEDJAX_API_KEYS")
    assert not read_keys("")


@pytest.mark.parametrize(
    ("host", "keys", "insecure", "allowed"),
    [
        ("127.0.0.1", False, False, True),
        ("localhost", False, False, True),
        ("::1", False, False, True),
        ("0.0.0.0", False, False, False),
        ("10.0.0.1", False, False, False),
        ("example.org", False, False, False),
        ("0.0.0.0", True, False, True),
        ("0.0.0.0", False, True, True),
    ],
)
def test_where_it_may_listen(host: str, keys: bool, insecure: bool, allowed: bool) -> None:
    config = ServeConfig(host=host, insecure=insecure)
    if allowed:
        check_exposure(config, keys)
    else:
        with pytest.raises(UserError, match="host must be this machine's own where there are no API keys"):
            check_exposure(config, keys)


def test_tls_and_mtls(llm: LLM) -> None:
    def health(address: str, *client: str) -> int:
        pair = [(TLS / f"{who}.{kind}").read_bytes() for who in client for kind in ("key", "pem")] or [None, None]
        credentials = grpc.ssl_channel_credentials((TLS / "ca.pem").read_bytes(), *pair)
        with grpc.secure_channel(address, credentials) as channel:
            return health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10).status

    files = {"tls_cert": str(TLS / "server.pem"), "tls_key": str(TLS / "server.key")}
    with serving(llm, **files) as server:
        assert health(server.address) == 1
        with grpc.insecure_channel(server.address) as plain, pytest.raises(grpc.RpcError):
            health_pb2_grpc.HealthStub(plain).Check(health_pb2.HealthCheckRequest(), timeout=10)
    with serving(llm, **files, tls_client_ca=str(TLS / "ca.pem")) as server:
        assert health(server.address, "client") == 1
        with pytest.raises(grpc.RpcError) as caught:
            health(server.address)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_what_cannot_be_listened_on(server: Server, tmp_path: Path) -> None:
    async def opened(**options: Any) -> None:
        frontend = Frontend(ServeConfig(http_port=None, **options), "stories")
        try:
            await open_grpc(frontend, Keys())
        finally:
            frontend.close()

    (tmp_path / "empty").write_text("")
    port = int(server.address.rpartition(":")[2])
    for options, message in (
        ({"grpc_port": port}, "the gRPC port must be free, and of this machine; got 127.0.0.1:"),
        ({"grpc_port": 0, "tls_cert": "nowhere", "tls_key": "nowhere"}, "TLS files must be readable; got nowhere: No such file"),
        ({"grpc_port": 0, "tls_cert": str(tmp_path / "empty"), "tls_key": str(tmp_path / "empty")}, "TLS files must be PEM; got"),
    ):
        with pytest.raises(UserError, match=message):
            asyncio.run(opened(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grpc_port": 70000}, "grpc_port must be a port, 0 for any, or None for none; got 70000"),
        ({"grpc_port": None, "http_port": None}, "grpc_port or http_port must be given; got neither"),
        ({"grpc_port": 80, "http_port": 80}, "grpc_port and http_port must differ; got 80 for both"),
        ({"tls_cert": "a"}, "tls_cert and tls_key must be given together"),
        ({"tls_client_ca": "a"}, "tls_client_ca needs tls_cert and tls_key"),
        ({"drain_seconds": -1}, "drain_seconds must not be negative; got -1"),
        ({"wedged_seconds": 0}, "wedged_seconds must be positive; got 0"),
        ({"tokenizer_threads": 0}, "tokenizer_threads must be at least 1; got 0"),
    ],
)
def test_rules_of_the_configuration(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ServeConfig(**options)
