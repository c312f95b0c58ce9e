"""What the operator wishes of the server around the API: where it listens,
and how it treats its engine and its end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeConfig:
    """Options of `quire serve` besides the engine's and the API's. Times in seconds."""

    host: str = _option(
        "127.0.0.1", "address to listen on; 0.0.0.0 for every network this machine is on"
    )
    port: int = _option(8000, "TCP port to listen on; 0 takes any that is free")
    drain_timeout: float = _option(30.0, "after SIGTERM, time for requests in flight to finish")
    silence_timeout: float = _option(
        10.0, "replace an engine that gives no sign of life for so long"
    )
    step_timeout: float = _option(300.0, "replace an engine whose single step takes so long")
    max_restarts: int = _option(
        5, "engines in a row that may be lost without a token gained; then give up"
    )

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port={self.port} must be from 0 to 65535")
        if not self.host:
            raise ConfigError("host is empty; give an address, such as 127.0.0.1")
        if not 0 <= self.drain_timeout < float("inf"):
            raise ConfigError(f"drain_timeout={self.drain_timeout} must be at least 0 and finite")
