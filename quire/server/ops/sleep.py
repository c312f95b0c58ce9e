"""Endpoints by which an operator has an engine's memory go back to the system and return; for admin
keys."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.front.client import Client
from quire.errors import NotAvailableError
from quire.server.http.call import call_of
from quire.server.http.errors import ApiError
from quire.server.http.query import query_of
from quire.server.http.responses import json_response


class SleepQuery(msgspec.Struct, kw_only=True):
    """How deep."""

    level: Annotated[int, Meta(ge=1, le=2)] = 1


class WakeUpQuery(msgspec.Struct, kw_only=True):
    """What to bring back."""

    tags: Annotated[str, Meta(max_length=64)] = ""
    """"weights", "kv_cache", or both with a comma between them, as when it is left out."""


class SleepRoutes:
    """The endpoints."""

    def __init__(self, client: Client) -> None:
        self._client = client

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

    @property
    def _is_sleeping(self) -> bool:
        return self._client.status().state == "sleeping"


def _check_admin(request: Request) -> None:
    if not call_of(request).tenant.is_admin:
        raise ApiError(403, "only an admin key may have the engine sleep", code="admin_needed")
