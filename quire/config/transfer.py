"""How keys and values pass between engines: `kv_transfer_config`, with the keys that users of vLLM
know, judged where it is given."""

from __future__ import annotations

import hashlib
import ipaddress
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from quire.common.bounded_files import read_whole
from quire.errors import ConfigError, NotAvailableError

NAME = "kv_transfer_config"
SHARED_MEMORY, TCP = "SharedMemoryConnector", "TcpConnector"
CONNECTORS = (SHARED_MEMORY, TCP)
ROLES = ("kv_producer", "kv_consumer", "kv_both")
UNIX = "unix:"
"""What stands before the path of a socket, in place of a host."""
DEFAULT_PORT = 14579
MIN_SECRET_BYTES = 16
EXTRA = "kv_connector_extra_config"
PATHS = ("secret_file", "ssl_certfile", "ssl_keyfile", "ssl_ca_file", "folder")
"""Keys of `EXTRA` that are names of files and folders."""
_MAX_SECRET_BYTES = 4096
_MAX_PATH_BYTES = 100
"""Of a socket: Linux takes 107."""
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "kv_rank": (None, 0, 1),
    "kv_parallel_size": (None, 1, 2),
    "kv_connector_module_path": (None, ""),
    "kv_buffer_device": (None, "cpu"),
    "enable_permute_local_kv": (None, False),
}
"""Keys of vLLM's that ask for nothing here, each with the values that may be given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorOptions:
    """`kv_connector_extra_config`: what the connectors here read."""

    secret_file: str | None = None
    """A file of at least 16 bytes that both ends have: each proves to the other that it knows
    them."""
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_ca_file: str | None = None
    """Certificates of this engine and of those who may sign others'; both ends are checked."""
    hosts: tuple[str, ...] = ()
    """Of `TcpConnector`: the only producers that are connected to, where given."""
    folder: str | None = None
    """Of `SharedMemoryConnector`: where sockets lie; by default one of the user's own."""
    lease_s: float = 120.0
    """How long a producer keeps what is not fetched."""
    pull_timeout_s: float = 10.0
    """How long a consumer waits for one transfer before it computes."""
    pull_buffer_size: float = 1e9
    """Bytes that a consumer has under way at most, from the connection to the pool."""

    def __post_init__(self) -> None:
        for name in PATHS:
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ConfigError(f"{NAME}: {name}={value!r} must be a path")
        if not isinstance(self.hosts, list | tuple) or not all(
            isinstance(host, str) for host in self.hosts
        ):
            raise ConfigError(f"{NAME}: hosts={self.hosts!r} must be a list of host names")
        most_of = {"lease_s": 86_400.0, "pull_timeout_s": 600.0, "pull_buffer_size": 2.0**50}
        for name, most in most_of.items():
            _check_number(name, getattr(self, name), most)
        given = [self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_file]
        if any(given) and not all(given):
            raise ConfigError(
                f"{NAME}: TLS needs ssl_certfile, ssl_keyfile and ssl_ca_file: both ends show a "
                "certificate, and check the other's"
            )

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.ssl_ca_file is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferConfig:
    """One engine's part in transfers of keys and values."""

    kv_connector: str
    kv_role: str
    engine_id: str = ""
    kv_ip: str = "127.0.0.1"
    kv_port: int = DEFAULT_PORT
    """That a producer listens at; of `SharedMemoryConnector` the name of its socket."""
    kv_buffer_size: float = 1e9
    """Bytes that a producer keeps for consumers at most."""
    kv_load_failure_policy: str = "recompute"
    kv_connector_extra_config: ConnectorOptions = field(default_factory=ConnectorOptions)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """From a dict or a decoded JSON object. None leaves a key out."""
        known = [item.name for item in fields(cls)]
        given: dict[str, Any] = {}
        for name, value in values.items():
            if name in known:
                given |= {} if value is None else {name: value}
            elif name not in _NEUTRAL:
                raise ConfigError(
                    f"{NAME}: unknown key {str(name)[:64]!r}; known are {', '.join(known)}"
                )
            elif value not in _NEUTRAL[name]:
                raise NotAvailableError(f"{NAME}: {name}={value!r} is not available; leave it out")
        for name, choices in (("kv_connector", CONNECTORS), ("kv_role", ROLES)):
            if given.get(name) not in choices:
                raise ConfigError(
                    f"{NAME}: {name}={given.get(name)!r} is not available; choose "
                    f"{' or '.join(map(repr, choices))}"
                )
        extra = given.pop(EXTRA, {})
        if not isinstance(extra, Mapping):
            raise ConfigError(f"{NAME}: {EXTRA}={extra!r} must be a dict")
        options = [item.name for item in fields(ConnectorOptions)]
        for name in extra:
            if name not in options:
                raise ConfigError(
                    f"{NAME}: unknown key {str(name)[:64]!r} of {EXTRA}; known are "
                    f"{', '.join(options)}"
                )
        return cls(**given, kv_connector_extra_config=ConnectorOptions(**extra))

    def __post_init__(self) -> None:
        if not isinstance(self.engine_id, str) or len(self.engine_id) > 256:
            raise ConfigError(f"{NAME}: engine_id={self.engine_id!r} must be a short text")
        if not isinstance(self.kv_ip, str) or not self.kv_ip:
            raise ConfigError(f"{NAME}: kv_ip={self.kv_ip!r} must be an address")
        port = self.kv_port
        if not isinstance(port, int) or isinstance(port, bool) or not 1 <= port <= 65535:
            raise ConfigError(f"{NAME}: kv_port={port!r} must be a port from 1 to 65535")
        _check_number("kv_buffer_size", self.kv_buffer_size, 2.0**50)
        if self.kv_load_failure_policy not in ("recompute", "fail"):
            raise ConfigError(
                f"{NAME}: kv_load_failure_policy={self.kv_load_failure_policy!r} must be "
                "'recompute' or 'fail'"
            )
        extra = self.kv_connector_extra_config
        if (
            self.kv_connector == TCP
            and self.gives
            and not (is_loopback(self.kv_ip) or extra.secret_file or extra.has_tls)
        ):
            raise ConfigError(
                f"{NAME}: kv_ip={self.kv_ip!r} can be reached from other machines, which could "
                "read prompts; give secret_file, or ssl_certfile, ssl_keyfile and "
                "ssl_ca_file, in kv_connector_extra_config"
            )
        if self.kv_connector == SHARED_MEMORY and len(os.fsencode(self.socket_path)) > (
            _MAX_PATH_BYTES
        ):
            raise ConfigError(f"{NAME}: {self.socket_path} is too long for a socket; give a folder")

    @property
    def gives(self) -> bool:
        """Whether it computes prompts for others."""
        return self.kv_role != "kv_consumer"

    @property
    def takes(self) -> bool:
        """Whether it fetches what others have computed."""
        return self.kv_role != "kv_producer"

    @property
    def folder(self) -> Path:
        """Where sockets lie."""
        given = self.kv_connector_extra_config.folder
        if given is not None:
            return Path(given).expanduser()
        return Path(tempfile.gettempdir()) / f"quire-kv-{os.geteuid()}"

    @property
    def socket_path(self) -> Path:
        """Of this producer."""
        return self.folder / f"{self.kv_port}.sock"

    @property
    def address(self) -> tuple[str, int]:
        """What consumers are told: host and port, or a socket's path and 0."""
        if self.kv_connector == SHARED_MEMORY:
            return f"{UNIX}{self.socket_path}", 0
        return self.kv_ip, self.kv_port

    @property
    def name(self) -> str:
        """Of this engine among those that transfer: the one given, or one made of its address."""
        if self.engine_id:
            return self.engine_id
        digest = hashlib.blake2b(repr(self.address).encode(), digest_size=8)
        return f"quire-{digest.hexdigest()}"

    def read_secret(self) -> bytes:
        """Return the secret of both ends; empty where none is given. Raises ConfigError."""
        path = self.kv_connector_extra_config.secret_file
        if path is None:
            return b""
        try:
            secret = read_whole(Path(path).expanduser(), _MAX_SECRET_BYTES).strip()
        except OSError as error:
            raise ConfigError(f"{NAME}: secret_file={path!r} cannot be read: {error}") from error
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"{NAME}: secret_file={path!r} has {len(secret)} bytes, which can be guessed; it "
                f"needs {MIN_SECRET_BYTES} random ones"
            )
        return secret


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_number(name: str, value: object, most: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= most:
        raise ConfigError(f"{NAME}: {name}={value!r} must be a number above 0, at most {most:g}")
