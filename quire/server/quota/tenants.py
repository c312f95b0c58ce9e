"""Who may ask: API keys, and the tenants that they stand for.

A key is kept as its SHA-256 digest only. A presented key is hashed and its digest compared with
every stored one in constant time, so neither the keys nor their number of equal bytes can be
measured. Each key belongs to a tenant, which carries a weight, quotas, and the salt that keeps its
cached prefixes from other tenants.

A keys file is TOML::

    [[tenant]]
    name = "search"
    keys = ["sha256:9f86d081...", "sk-or-in-clear"]
    weight = 2.0
    tokens_per_minute = 200000
    requests_per_minute = 600
    max_concurrency = 16
    priority = 0
    admin = false
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quire.common.bounded_files import MAX_SETTINGS_BYTES, read_text
from quire.config.api import ApiConfig
from quire.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}\Z")
_DIGEST = re.compile(r"sha256:[0-9a-fA-F]{64}\Z")
_FIELDS = {
    "name",
    "keys",
    "weight",
    "tokens_per_minute",
    "requests_per_minute",
    "max_concurrency",
    "priority",
    "admin",
}
MAX_KEYS = 4096
"""Every stored digest is compared for every request."""
MAX_KEY_LEN = 512
MAX_PRIORITY = 1_000_000


def is_tenant_name(text: str) -> bool:
    """Test whether a tenant could be called so."""
    return _NAME.match(text) is not None


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf a request runs."""

    name: str
    weight: float = 1.0
    """Share of the engine relative to other tenants when it is contended."""
    tokens_per_minute: int | None = None
    """Prompt and output tokens together; None is unlimited."""
    max_concurrency: int | None = None
    """Requests in flight at once."""
    requests_per_minute: int | None = None
    is_isolated: bool = True
    """Whether its cached prefixes are its own."""
    is_admin: bool = False
    """Whether it may see what is not its own: names and texts of all requests."""

    priority: int = 0
    """Class of its requests, the smaller served first. A request may only choose a later one,
    lest it go before others'."""

    def may_ask_for(self, priority: int) -> bool:
        """Return whether a request may be of this class: of any,
        where there is no other tenant or an operator asks."""
        return self.is_admin or priority >= self.priority

    @property
    def has_rates(self) -> bool:
        """Whether what it uses in a minute is limited."""
        return self.tokens_per_minute is not None or self.requests_per_minute is not None

    def media_scope(self, salt: str | None) -> str:
        """Return whose images are named by a request's uuids: always the tenant's own, narrowed by
        the body's `cache_salt`."""
        return f"{len(self.name)}:{self.name}:{salt or ''}"

    def cache_salt(self, requested: str | None) -> str | None:
        """Return the salt of a request's cache entries: the tenant's, narrowed by what the body
        asks for.

        A body can only narrow: the tenant's name is hashed first, with its length, so no salt
        reaches another's entries.
        """
        if not self.is_isolated and requested is None:
            return None
        name = self.name if self.is_isolated else ""
        digest = hashlib.sha256(f"{len(name)}:{name}".encode())
        if requested is not None:
            digest.update(b"\0" + requested.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


EVERYBODY = Tenant("default", is_isolated=False, is_admin=True)
"""The one tenant of a server without keys."""
NOBODY = Tenant("public")
"""The tenant of requests for a public path."""


class KeyRing:
    """All keys of a server. Without any, everyone is `EVERYBODY`."""

    def __init__(self, tenants_by_digest: Mapping[bytes, Tenant]) -> None:
        if len(tenants_by_digest) > MAX_KEYS:
            raise ConfigError(
                f"{len(tenants_by_digest)} API keys are given; at most {MAX_KEYS} can be kept"
            )
        self._entries = tuple(tenants_by_digest.items())
        self.read_again: Callable[[], KeyRing] = lambda: self
        """Reads them anew from where they came. Raises ConfigError."""

    def __str__(self) -> str:
        return f"{len(self._entries)} keys of {len(self.tenants)} tenants"

    def take_over(self, other: KeyRing) -> bool:
        """Have the keys of another ring, which has some, from now on; whether they are others."""
        assert not other.is_open, "a server that asks for keys stays so"
        before, self._entries = self._entries, other._entries
        return self._entries != before

    @property
    def is_open(self) -> bool:
        """Whether no key is needed."""
        return not self._entries

    @property
    def tenants(self) -> tuple[Tenant, ...]:
        """Every tenant once."""
        return tuple({tenant.name: tenant for _, tenant in self._entries}.values()) or (EVERYBODY,)

    def find(self, key: bytes) -> Tenant | None:
        """Return the tenant of a presented key. Takes the same time for every key of the same
        length."""
        digest = hashlib.sha256(key[: MAX_KEY_LEN + 1]).digest()
        found: Tenant | None = None
        for known, tenant in self._entries:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found


def key_ring(tenants: Iterable[tuple[Tenant, Iterable[str]]]) -> KeyRing:
    """Return a ring of tenants with their keys, each either `sha256:<hex>` or the key itself."""
    by_digest: dict[bytes, Tenant] = {}
    names: set[str] = set()
    for tenant, keys in tenants:
        if tenant.name in names:
            raise ConfigError(f"two tenants are named {tenant.name!r}; give each its own name")
        names.add(tenant.name)
        for key in keys:
            digest = _digest(tenant.name, key)
            if digest in by_digest:
                raise ConfigError(
                    f"tenant {tenant.name!r} has a key that another entry has already"
                )
            by_digest[digest] = tenant
    return KeyRing(by_digest)


def read_keys(config: ApiConfig, environment: str | None = None) -> KeyRing:
    """Return all keys of the options and of the environment variable's text. Raises ConfigError."""
    tenants = read_keys_file(config.api_keys_file) if config.api_keys_file is not None else []
    for text in (config.api_keys, environment):
        if text is not None:
            given = keys_from_text(text)
            if not given:
                raise ConfigError(
                    "API keys were asked for, but none is given; without keys, leave the option out"
                )
            tenants += given
    ring = key_ring(tenants)
    ring.read_again = partial(read_keys, config, environment)
    return ring


def read_keys_file(path: str | Path) -> list[tuple[Tenant, list[str]]]:
    """Tenants and keys of a TOML file. Raises ConfigError; its message never holds a key."""
    try:
        data = tomllib.loads(read_text(path, MAX_SETTINGS_BYTES))
    except OSError as error:
        raise ConfigError(f"api_keys_file={str(path)!r} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        # of the message its place alone: the rest may quote a key
        place = re.search(r"at line [0-9]+, column [0-9]+", str(error))
        raise ConfigError(
            f"api_keys_file={str(path)!r} is not valid TOML"
            f"{f' ({place[0]})' if place else ''}; it holds [[tenant]] tables, and keys in quotes"
        ) from None
    entries = data.get("tenant")
    if set(data) != {"tenant"} or not isinstance(entries, list) or not entries:
        raise ConfigError(
            f"api_keys_file={str(path)!r} must hold [[tenant]] tables and nothing else"
        )
    return [_read_tenant(entry) for entry in entries]


def keys_from_text(text: str) -> list[tuple[Tenant, list[str]]]:
    """Tenants of the environment variable: keys separated by commas,
    each optionally as `name=key`."""
    tenants = []
    for number, entry in enumerate(
        filter(None, (each.strip() for each in text.split(","))), start=1
    ):
        name, has_name, key = entry.partition("=")
        tenants.append(
            (_tenant({"name": name if has_name else f"key-{number}"}), [key if has_name else entry])
        )
    return tenants


def _read_tenant(entry: Any) -> tuple[Tenant, list[str]]:
    if not isinstance(entry, dict) or not set(entry) <= _FIELDS:
        raise ConfigError(f"a [[tenant]] has the fields {', '.join(sorted(_FIELDS))} and no others")
    keys = entry.get("keys")
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        raise ConfigError(f"tenant {entry.get('name')!r} needs keys: a list of strings")
    return _tenant(entry), keys


def _tenant(entry: Mapping[str, Any]) -> Tenant:
    name = entry.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        raise ConfigError("a tenant needs a name of letters, digits, '_', '.' and '-' (at most 64)")
    weight = entry.get("weight", 1.0)
    if (
        isinstance(weight, bool)
        or not isinstance(weight, int | float)
        or not 0.001 <= weight <= 1000
    ):
        raise ConfigError(f"tenant {name!r}: weight={weight!r} must be a number from 0.001 to 1000")
    limits: dict[str, int | None] = {}
    for field in ("tokens_per_minute", "max_concurrency", "requests_per_minute"):
        value = entry.get(field)
        if value is not None and (
            isinstance(value, bool) or not isinstance(value, int) or value < 1
        ):
            raise ConfigError(
                f"tenant {name!r}: {field}={value!r} must be an integer of at least 1"
            )
        limits[field] = value
    priority = entry.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise ConfigError(
            f"tenant {name!r}: priority={priority!r} must be an integer from {-MAX_PRIORITY} "
            f"to {MAX_PRIORITY}"
        )
    is_admin = entry.get("admin", False)
    if not isinstance(is_admin, bool):
        raise ConfigError(f"tenant {name!r}: admin={is_admin!r} must be true or false")
    return Tenant(
        name,
        float(weight),
        limits["tokens_per_minute"],
        limits["max_concurrency"],
        limits["requests_per_minute"],
        is_admin=is_admin,
        priority=priority,
    )


def _digest(name: str, key: str) -> bytes:
    if _DIGEST.match(key):
        return bytes.fromhex(key.removeprefix("sha256:"))
    if not 8 <= len(key) <= MAX_KEY_LEN or not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"tenant {name!r} has a key that is not 8 to {MAX_KEY_LEN} printable characters "
            "without spaces"
        )
    return hashlib.sha256(key.encode()).digest()
