"""The gRPC port: its options, its credentials, and the services behind it."""

import asyncio
import contextlib
from collections.abc import Sequence
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from pagedjax.errors import UserError, check
from serving.auth import Keys
from serving.config import ServeConfig
from serving.frontend import Frontend
from serving.proto.pagedjax.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from serving.rpc.admin import Admin
from serving.rpc.guard import Guard
from serving.rpc.health import NOT_SERVING, SERVING, Health
from serving.rpc.inference import Inference
from serving.rpc.vllm import VllmEngine

SERVED = (vllm_engine_pb2, inference_pb2, admin_pb2)  # modules whose services are here
PENDING = 1 << 16  # calls that may wait for the event loop
POLL_SECONDS = 1.0  # after which a step that hangs is seen


def options(config: ServeConfig) -> list[tuple[str, int]]:
    """Clients may ping every 10 s, also while nothing is open: gateways ping each 30 s, which by default is answered with GOAWAY
    "too_many_pings". A port that is taken is an error: two servers must not share it. By default gRPC ends some calls with
    CANCELLED and no word why where a thousand wait for the event loop; here they wait, and get an error of ours if they must."""
    return [
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.so_reuseport", 0),
        ("grpc.server.max_pending_requests", PENDING),
        ("grpc.server.max_pending_requests_hard_limit", PENDING),
        ("grpc.max_receive_message_length", config.limits.max_message_bytes),
        ("grpc.max_send_message_length", config.limits.max_reply_bytes),
    ]


class GrpcListener:
    """The open port with its services."""

    def __init__(self, server: grpc.aio.Server, address: str, health_task: "asyncio.Task[None]"):
        self._server, self.address, self._health_task = server, address, health_task

    async def stop(self, grace: float) -> None:
        self._health_task.cancel()
        await self._server.stop(grace)


async def open_grpc(frontend: Frontend, keys: Keys) -> GrpcListener:
    """Listens. UserError where it cannot."""
    config = frontend.config
    server = grpc.aio.server(interceptors=[Guard(keys, frontend)], options=options(config))
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(VllmEngine(frontend), server)
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(frontend), server)
    admin_pb2_grpc.add_AdminServicer_to_server(Admin(frontend), server)
    names = [service.full_name for file in SERVED for service in file.DESCRIPTOR.services_by_name.values()]
    servicer = Health()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    address = f"{config.host}:{config.grpc_port}"
    credentials = _credentials(config)
    try:
        port = server.add_insecure_port(address) if credentials is None else server.add_secure_port(address, credentials)
    except RuntimeError as error:
        raise UserError(f"the gRPC port must be free, and of this machine; got {address}") from error
    task = asyncio.create_task(_keep_health(frontend, servicer, names))
    await server.start()
    return GrpcListener(server, f"{config.host}:{port}", task)


async def _keep_health(frontend: Frontend, servicer: Health, names: Sequence[str]) -> None:
    """The services are SERVING while new requests are welcome: from when all shapes are compiled until the server drains or fails.
    The name "" is SERVING until a step fails or hangs: what should make an orchestrator restart it."""
    changed = asyncio.Event()
    frontend.on_state.append(lambda _: changed.set())
    while True:
        changed.clear()
        ready = SERVING if frontend.state == "ready" else NOT_SERVING
        servicer.set({"": SERVING if frontend.is_live() else NOT_SERVING, **dict.fromkeys(names, ready)})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(POLL_SECONDS):
                await changed.wait()


def _credentials(config: ServeConfig) -> grpc.ServerCredentials | None:
    if not config.tls_cert:
        return None
    pair = (read_pem(config.tls_key), read_pem(config.tls_cert))
    ca = read_pem(config.tls_client_ca) if config.tls_client_ca else None
    return grpc.ssl_server_credentials([pair], root_certificates=ca, require_client_auth=ca is not None)


def read_pem(file: str) -> bytes:
    """UserError where the file cannot be read, or holds no PEM."""
    try:
        data = Path(file).expanduser().read_bytes()
    except OSError as error:
        raise UserError(f"TLS files must be readable; got {file}: {error.strerror}") from error
    check(b"-----BEGIN " in data, f"TLS files must be PEM; got {file}")
    return data
