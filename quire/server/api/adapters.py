"""Adapters over HTTP: the names they are served by, and how they come and go while the server runs.

A name stands for a version of an adapter (`quire.lora.store`). A request gets the version that
its model's name stands for when it arrives and keeps it to its end; nothing waits for a change.
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from quire.common import json_text
from quire.config.api import ApiConfig
from quire.core.adapters import Adapter
from quire.errors import CheckpointError, ConfigError
from quire.lora.layout import FILES
from quire.lora.store import AdapterStore
from quire.server.http.body import read_json
from quire.server.http.call import ServedAdapter, call_of
from quire.server.http.errors import ApiError, bad_request
from quire.server.http.responses import json_response

MAX_ADAPTERS = 10_000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,127}", re.ASCII)
_NOT_ENABLED = "this server serves no adapters (--enable-lora)"


class LoadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of a request that gives an adapter a name."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False
    """Whether the name may be one in use, which then stands for this adapter."""


class UnloadAdapterRequest(msgspec.Struct, kw_only=True):
    """The body of a request that takes a name back."""

    lora_name: str
    lora_int_id: int | None = None


class ServedAdapters:
    """The adapters of one server by name. For the event loop's thread."""

    def __init__(
        self, store: AdapterStore | None, config: ApiConfig, model_names: tuple[str, ...]
    ) -> None:
        """Loads the configured ones. Raises ConfigError."""
        self._store, self._model_names = store, model_names
        self._root = None if config.lora_folder is None else Path(config.lora_folder).expanduser()
        self._by_name: dict[str, ServedAdapter] = {}
        if store is None and (config.lora_modules or config.lora_folder):
            raise ConfigError(
                "lora_modules and lora_folder need an engine that serves adapters (--enable-lora)"
            )
        if self._root is not None and not self._root.is_dir():
            raise ConfigError(
                f"lora_folder={config.lora_folder!r} is no folder; make it, or name another one"
            )
        for module in config.lora_modules:
            self._serve(*read_module(module))

    @property
    def all(self) -> tuple[ServedAdapter, ...]:
        """Return every name, in the order of loading."""
        return tuple(self._by_name.values())

    def find(self, name: str) -> ServedAdapter | None:
        """Return what a name stands for now."""
        return self._by_name.get(name)

    async def load(self, name: str, path: str, *, is_in_place: bool) -> None:
        """Give a name to the adapter in a folder below the configured one. Raises ApiError."""
        store = self._require_store()
        self._check_name(name, is_in_place=is_in_place)
        folder = self._contained(path)
        try:
            adapter = await asyncio.to_thread(store.version_of, folder)
        except CheckpointError as error:
            text = str(error).replace(str(folder), f"adapter {name!r}")
            raise bad_request(text, param="lora_path", code="invalid_adapter") from None
        try:
            self._check_name(name, is_in_place=is_in_place)  # others loaded meanwhile
        except ApiError:
            self._forget(folder)
            raise
        self._keep(name, folder, adapter)

    def unload(self, name: str) -> None:
        """Take a name back; requests that came by it go on. Raises ApiError."""
        self._require_store()
        if name not in self._by_name:
            raise ApiError(
                404,
                f"no adapter is called {name[:128]!r}",
                param="lora_name",
                code="model_not_found",
            )
        self._forget(self._by_name.pop(name).folder)

    def _serve(self, name: str, path: str) -> None:
        assert self._store is not None
        if name in self._by_name:
            raise ConfigError(f"lora_modules: the name {name!r} is given twice; choose another")
        folder = Path(path).expanduser()
        try:
            self._check_name(name, is_in_place=False)
            self._keep(name, folder, self._store.version_of(folder))
        except (ApiError, CheckpointError) as error:
            raise ConfigError(f"lora_modules: {name}={path}: {error}") from None

    def _keep(self, name: str, folder: Path, adapter: Adapter) -> None:
        before = self._by_name.get(name)
        self._by_name[name] = ServedAdapter(name, folder, adapter, int(time.time()))
        if before is not None and before.folder != folder:
            self._forget(before.folder)

    def _forget(self, folder: Path) -> None:
        """Let the store delete a version once its requests have ended, unless a name has it."""
        assert self._store is not None
        if all(each.folder != folder for each in self._by_name.values()):
            self._store.forget(folder)

    def _check_name(self, name: str, *, is_in_place: bool) -> None:
        if not _NAME.fullmatch(name) or ".." in name:
            raise bad_request(
                f"lora_name={name[:128]!r} must be letters, digits and _.:/@+- (at most 128), "
                "begin with a letter or a digit, and have no two dots in a row",
                param="lora_name",
            )
        if name in self._model_names:
            raise bad_request(f"{name!r} is the model's own name", param="lora_name")
        if name in self._by_name and not is_in_place:
            raise bad_request(
                f"the name {name!r} is in use; load_inplace=true lets it stand for another one",
                param="lora_name",
                code="adapter_exists",
            )
        if name not in self._by_name and len(self._by_name) >= MAX_ADAPTERS:
            raise bad_request(f"{MAX_ADAPTERS} adapters have names already", param="lora_name")

    def _require_store(self) -> AdapterStore:
        if self._store is None:
            raise ApiError(400, _NOT_ENABLED, code="adapters_not_enabled")
        return self._store

    def _contained(self, path: str) -> Path:
        """Find the folder below the configured one that a path leads to. Raises ApiError."""
        if self._root is None:
            raise ApiError(
                403,
                "this server takes no adapters while it runs (--lora-folder)",
                code="adapters_not_enabled",
            )
        refusal = bad_request(
            "lora_path must name a folder below the server's folder of adapters", param="lora_path"
        )
        try:
            root = os.path.realpath(self._root)
            folder = os.path.realpath(os.path.join(root, path))
            leads_to = [os.path.realpath(os.path.join(folder, name)) for name in FILES]
        except (OSError, ValueError):
            raise refusal from None
        if any(not each.startswith(root + os.sep) for each in (folder, *leads_to)):
            raise refusal
        return Path(folder)


def read_module(text: str) -> tuple[str, str]:
    """Read `name=path`, or `{"name": ..., "path": ...}`. Raises ConfigError."""
    if not text.lstrip().startswith("{"):
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"lora_modules: {text!r} must be name=path, or JSON with both")
        return name, path
    try:
        given = json_text.read_json(text)
    except ValueError as error:
        raise ConfigError(f"lora_modules: {text[:200]!r} is not valid JSON: {error}") from None
    unknown = given.keys() - {"name", "path", "base_model_name"}
    if unknown or not all(isinstance(given.get(key), str) for key in ("name", "path")):
        raise ConfigError(
            f"lora_modules: {text!r} must have name and path, and may have base_model_name"
        )
    return given["name"], given["path"]


class AdapterRoutes:
    """Endpoints that give names to adapters and take them back; for admin keys."""

    def __init__(self, adapters: ServedAdapters, *, is_strict: bool) -> None:
        self._adapters, self._is_strict = adapters, is_strict

    async def load(self, request: Request) -> Response:
        """Give a name to an adapter; requests that are running keep what they have."""
        _check_admin(request)
        body = await read_json(request, LoadAdapterRequest, is_strict=self._is_strict)
        await self._adapters.load(body.lora_name, body.lora_path, is_in_place=body.load_inplace)
        return json_response(call_of(request), {"status": "success", "lora_name": body.lora_name})

    async def unload(self, request: Request) -> Response:
        """Take a name back; requests that are running keep what they have."""
        _check_admin(request)
        body = await read_json(request, UnloadAdapterRequest, is_strict=self._is_strict)
        self._adapters.unload(body.lora_name)
        return json_response(call_of(request), {"status": "success", "lora_name": body.lora_name})


def _check_admin(request: Request) -> None:
    if not call_of(request).tenant.is_admin:
        raise ApiError(403, "only an admin key may load adapters", code="admin_needed")


class AdapterGauge(Collector):
    """Which adapters have requests now, under the name and labels that vLLM's dashboards know."""

    def __init__(
        self, prefix: str, max_loras: int, in_flight: Callable[[], Iterable[tuple[str, bool]]]
    ) -> None:
        """`in_flight` gives the name of each request's adapter, and whether it has begun."""
        self._name, self._max_loras, self._in_flight = (
            f"{prefix}:lora_requests_info",
            max_loras,
            in_flight,
        )

    def collect(self) -> Iterable[Metric]:
        """Yield the gauge as of now."""
        names: dict[bool, set[str]] = {True: set(), False: set()}
        for name, has_begun in self._in_flight():
            names[has_begun].add(name)
        labels = ("max_lora", "waiting_lora_adapters", "running_lora_adapters")
        family = GaugeMetricFamily(
            self._name, "Adapters that have requests; the value is the time.", labels=labels
        )
        running, waiting = (",".join(sorted(names[kind])) for kind in (True, False))
        family.add_metric((str(self._max_loras), waiting, running), time.time())
        yield family
