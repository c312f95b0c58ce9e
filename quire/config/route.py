"""What the operator wishes of the router: one frozen record; one declaration per option,
as in `ApiConfig`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields
from typing import Any

from quire.config.api import ApiConfig, check_number
from quire.errors import ConfigError

_MAY_BE_0 = ("port", "max_retries", "drain_timeout", "prefill_min_bytes")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")  # RFC 9110, 5.6.2
ROUTING_POLICIES = ("kv-aware", "prefix-aware", "session", "least-load", "round-robin")


def _option(default: Any, text: str, **metadata: Any) -> Any:
    return field(default=default, metadata={"help": text, **metadata})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteConfig:
    """Options of `quire route`. Sizes in bytes, times in seconds."""

    backend: tuple[str, ...] = _option(
        (),
        (
            "URL of an OpenAI-compatible server (repeatable); dns+http://name:port stands for all "
            "addresses of that name, which is resolved again and again"
        ),
    )
    prefill_backend: tuple[str, ...] = _option(
        (),
        "URL of a server that computes prompts for the others (repeatable), which fetch the keys "
        "and values from it: kv_transfer_config with kv_producer here, kv_consumer there",
    )
    prefill_min_bytes: int = _option(
        512, "bodies of fewer bytes are not sent to --prefill-backend: their prompts cost little"
    )
    prefill_timeout_s: float = _option(
        120.0, "longest silence of a prefill back end, after which the others compute the prompt"
    )
    host: str = _option(
        "127.0.0.1", "address to listen on; 0.0.0.0 for every network this machine is on"
    )
    port: int = _option(8080, "TCP port to listen on; 0 takes any that is free")
    policy: str = _option(
        "kv-aware", "how a back end is chosen for a request", choices=ROUTING_POLICIES
    )
    session_header: str = _option(
        "x-session-id",
        "header that names a request's session; else prompt_cache_key or user of its body does",
    )
    load_factor: float | None = _option(
        None,
        (
            "requests in flight that one back end may have, of their mean, before others get them "
            "(default: 1.5 for kv-aware, else 1.3)"
        ),
    )
    chunk_bytes: int = _option(512, "prompts are compared in chunks of so many bytes")
    memory_chunks: int = _option(
        1 << 16, "chunks that are remembered of each back end; about what its KV cache holds"
    )
    backend_api_key: str | None = _option(
        None,
        (
            "key to show to the back ends; better in QUIRE_BACKEND_API_KEY than here. Without it, "
            "and without keys of the router's own, clients' keys are passed on"
        ),
    )
    api_keys_file: str | None = _option(None, "TOML file of tenants and their API keys")
    api_keys: str | None = _option(
        None, "API keys, separated by commas; better in QUIRE_API_KEYS or a file than here"
    )
    root_path: str = _option("", "path prefix that a proxy strips")
    allow_origin: tuple[str, ...] = _option(
        (), "origin whose pages may use the router from a browser, or * for all (repeatable)"
    )
    json_logs: bool = _option(
        False, "write logs as one JSON object a line, with a line for each request"
    )
    max_retries: int = _option(
        3, "further back ends that a request may be sent to before any byte of an answer"
    )
    wait_timeout_s: float = _option(
        10.0, "how long a request waits for a back end while none can be sent requests"
    )
    connect_timeout_s: float = _option(3.0, "time for a connection to a back end")
    silence_timeout_s: float = _option(600.0, "longest silence of a back end within an answer")
    request_timeout_s: float = _option(3600.0, "longest time that one request may take")
    health_path: str = _option("/health", "path at which back ends are asked whether they serve")
    health_interval_s: float = _option(5.0, "between two such probes")
    health_timeout_s: float = _option(
        5.0, "time for their answer; after three without one, the back end is given up for dead"
    )
    dns_interval_s: float = _option(10.0, "between two resolutions of a name")
    drain_timeout: float = _option(30.0, "after SIGTERM, time for requests in flight to finish")
    max_in_flight: int = _option(4096, "requests in flight at once; more are refused")
    max_body_bytes: int = _option(8 << 20, "largest request body")
    max_connections: int = _option(16384, "connections of clients held at once")
    header_timeout_s: float = _option(10.0, "time for a request's headers to arrive")
    body_timeout_s: float = _option(60.0, "time for a request's body to arrive")
    write_timeout_s: float = _option(60.0, "time for a client to take what was sent to it")

    def __post_init__(self) -> None:
        if self.policy not in ROUTING_POLICIES:
            names = ", ".join(ROUTING_POLICIES)
            raise ConfigError(f"policy={self.policy!r} is not available; choose one of {names}")
        for item in fields(self):
            if isinstance(item.default, int | float) and not isinstance(item.default, bool):
                check_number(
                    item.name,
                    getattr(self, item.name),
                    is_whole=isinstance(item.default, int),
                    may_be_0=item.name in _MAY_BE_0,
                )
        if self.port > 65535:
            raise ConfigError(f"port={self.port} must be from 0 to 65535")
        if self.load_factor is not None and not 1 <= self.load_factor < math.inf:
            raise ConfigError(
                f"load_factor={self.load_factor} must be at least 1: not all back ends can have "
                "less than the mean"
            )
        path = self.health_path
        if not path.startswith("/") or not path.isascii() or not path.isprintable() or " " in path:
            raise ConfigError(
                f"health_path={path!r} must begin with a slash, and have other characters than "
                "those of URLs percent-encoded"
            )
        if not _HEADER_NAME.fullmatch(self.session_header):
            raise ConfigError(
                f"session_header={self.session_header!r} cannot be the name of a header; give one "
                "such as x-session-id"
            )

    def api(self) -> ApiConfig:
        """Return the limits of the HTTP front, which is the server's."""
        names = {item.name for item in fields(ApiConfig)} & {item.name for item in fields(self)}
        return ApiConfig(**{name: getattr(self, name) for name in names})
