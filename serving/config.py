"""What the server is told, beside the engine's configuration."""

import ipaddress
import re
from dataclasses import dataclass, field
from typing import Literal, get_args

from pagedjax.errors import check
from serving.limits import Limits

ToolParser = Literal["auto", "qwen3_coder", "hermes", "deepseek", "granite", "mistral", "gpt_oss", "llama3"]


@dataclass(frozen=True)
class ServeConfig:
    """Where the server listens, whom it serves, and how it ends."""

    host: str = "127.0.0.1"  # address to listen on; beyond this machine only with API keys, or --insecure
    grpc_port: int | None = 50051  # 0: any free one; None: no gRPC
    http_port: int | None = 8000  # 0: any free one; None: no HTTP
    served_model_name: str = ""  # what clients call the model; "": its path or hub id, as it was given
    api_keys: str = ""  # a JSON file of API keys (docs/serving.md); "": those of $PAGEDJAX_API_KEYS, if there are any
    insecure: bool = False  # listen beyond this machine without API keys: anybody who can reach the port may do anything
    tls_cert: str = ""  # PEM file with the server's certificate chain; "": no TLS
    tls_key: str = ""  # PEM file with its private key
    tls_client_ca: str = ""  # PEM file; clients must bring a certificate that it signed (mTLS)
    drain_seconds: float = 30.0  # after SIGTERM: how long running requests may go on
    unready_seconds: float = 0.0  # before that: how long new requests are still taken while health says no, for routers to see it
    wedged_seconds: float = 120.0  # one step may take so long before liveness is denied
    tokenizer_threads: int = 2  # that tokenize prompts and render chats
    profile_folder: str = ""  # where StartProfile writes; "": profiling is refused
    tool_parser: ToolParser = "auto"  # how the model writes tool calls; auto: in the way that its chat template teaches
    metrics_prefix: Literal["vllm", "pagedjax"] = "vllm"  # of the metrics that vLLM's dashboards know
    otlp_traces_endpoint: str = ""  # where a span of each request goes, over gRPC: http://HOST:4317 (extra otel); "": no tracing
    log_format: Literal["text", "json"] = "text"  # of the log, which goes to stderr
    log_prompts: bool = False  # write the token ids of prompts to the log, too
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self):
        for name in ("grpc_port", "http_port"):
            port = getattr(self, name)
            check(port is None or 0 <= port < 65536, f"{name} must be a port, 0 for any, or None for none; got {port}")
        check(self.grpc_port is not None or self.http_port is not None, "grpc_port or http_port must be given; got neither")
        same = self.grpc_port is not None and self.grpc_port == self.http_port != 0
        check(not same, f"grpc_port and http_port must differ; got {self.grpc_port} for both")
        check(bool(self.tls_cert) == bool(self.tls_key), "tls_cert and tls_key must be given together; got one of them")
        check(not self.tls_client_ca or bool(self.tls_cert), "tls_client_ca needs tls_cert and tls_key; got none")
        for name in ("drain_seconds", "unready_seconds"):
            check(getattr(self, name) >= 0, f"{name} must not be negative; got {getattr(self, name)}")
        check(self.wedged_seconds > 0, f"wedged_seconds must be positive; got {self.wedged_seconds}")
        endpoint = self.otlp_traces_endpoint
        right = not endpoint or re.fullmatch(r"https?://[^/\s]+/?", endpoint) is not None
        check(right, f"otlp_traces_endpoint must be http://HOST:PORT or https://HOST:PORT; got {endpoint!r}")
        check(self.metrics_prefix in ("vllm", "pagedjax"), f"metrics_prefix must be vllm or pagedjax; got {self.metrics_prefix!r}")
        parsers = get_args(ToolParser)
        check(self.tool_parser in parsers, f"tool_parser must be one of {', '.join(parsers)}; got {self.tool_parser!r}")
        check(self.tokenizer_threads >= 1, f"tokenizer_threads must be at least 1; got {self.tokenizer_threads}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def check_exposure(config: ServeConfig, has_keys: bool) -> None:
    """UserError where anybody on the network could use the server, and nobody said that they may."""
    check(
        config.is_local or has_keys or config.insecure,
        "host must be this machine's own where there are no API keys (give --api-keys, or --insecure to let anybody in); "
        f"got {config.host}",
    )
