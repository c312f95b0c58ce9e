"""Endpoints by which an operator has an engine's memory go back to the system and return, and its
weights be others; for admin keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.config.api import ApiConfig
from quire.engine.front.client import Client
from quire.errors import EngineError, NotAvailableError, UnavailableError
from quire.server.http.body import read_json
from quire.server.http.call import call_of
from quire.server.http.errors import ApiError, bad_request
from quire.server.http.query import query_of
from quire.server.http.responses import json_response


class SleepQuery(msgspec.Struct, kw_only=True):
    """How deep."""

    level: Annotated[int, Meta(ge=1, le=2)] = 1


class WakeUpQuery(msgspec.Struct, kw_only=True):
    """What to bring back."""

    tags: Annotated[str, Meta(max_length=64)] = ""
    """"weights", "kv_cache", or both with a comma between them, as when it is left out."""


class UpdateWeightsRequest(msgspec.Struct, kw_only=True):
    """The body of a request that has the model take other weights."""

    folder: str
    """Below the operator's folder of weights."""
    version: str | None = None
    """What to call them; by default, how many updates there were."""
    requests: Literal["resume", "finish"] = "resume"
    """Whether requests that run go on with them, or end with the former ones."""


class MemoryRoutes:
    """The endpoints."""

    def __init__(self, client: Client, config: ApiConfig) -> None:
        self._client, self._is_strict = client, config.strict_fields
        root = config.weights_folder
        self._root = None if root is None else Path(root).expanduser()

    async def sleep(self, request: Request) -> Response:
        """Give the memory of weights and KV cache back; requests that run go on after waking."""
        _check_admin(request)
        try:
            await self._client.sleep(query_of(request, SleepQuery).level)
        except NotAvailableError as error:
            raise ApiError(501, str(error), code="not_available") from None
        return json_response(call_of(request), {"is_sleeping": True})

    async def wake_up(self, request: Request) -> Response:
        """Bring the memory back, or the parts that are named."""
        _check_admin(request)
        tags = query_of(request, WakeUpQuery).tags
        await self._client.wake_up(tags.split(",") if tags else None)
        return json_response(call_of(request), {"is_sleeping": self._is_sleeping})

    async def is_sleeping(self, request: Request) -> Response:
        """Return whether memory is the system's at the moment."""
        _check_admin(request)
        return json_response(call_of(request), {"is_sleeping": self._is_sleeping})

    async def update_weights(self, request: Request) -> Response:
        """Have requests be answered with the weights of a folder from now on."""
        _check_admin(request)
        body = await read_json(request, UpdateWeightsRequest, is_strict=self._is_strict)
        folder = self._contained(body.folder)
        try:
            version = await self._client.update_weights(
                str(folder), body.version, requests=body.requests
            )
        except UnavailableError:
            raise
        except EngineError as error:
            text = str(error).replace(str(folder), body.folder[:128])
            raise bad_request(text, param="folder", code="invalid_weights") from None
        return json_response(call_of(request), {"weight_version": version})

    async def weight_version(self, request: Request) -> Response:
        """Return what the weights are called that requests are answered with now."""
        return json_response(call_of(request), {"weight_version": self._client.weight_version})

    def _contained(self, path: str) -> Path:
        """Find the folder below the configured one that a path leads to. Raises ApiError."""
        if self._root is None:
            raise ApiError(
                403, "this server takes no weights (--weights-folder)", code="weights_not_enabled"
            )
        try:
            root = os.path.realpath(self._root)
            folder = os.path.realpath(os.path.join(root, path))
            files = [os.path.realpath(each.path) for each in os.scandir(folder)]
        except (OSError, ValueError):
            files, folder = [], ""
        if not files or any(not each.startswith(root + os.sep) for each in (folder, *files)):
            raise bad_request(
                "folder must name a folder with a checkpoint below the server's folder of weights",
                param="folder",
            )
        return Path(folder)

    @property
    def _is_sleeping(self) -> bool:
        return self._client.status().state == "sleeping"


def _check_admin(request: Request) -> None:
    if not call_of(request).tenant.is_admin:
        raise ApiError(
            403, "only an admin key may change what the engine has in memory", code="admin_needed"
        )
