"""Between the gate and the routes: who could not be served anyway is told before any work is done for it, and a crowd begins
one a round of the event loop.

Reading a body and making tokens of it costs many times what a refusal costs, so under overload it is the refusals of requests
that were prepared in vain that would take the machine from those that are served. Owns nothing but the turnstile.
"""

from __future__ import annotations

from typing import Protocol

from starlette._utils import get_route_path
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.call import call_in
from quire.server.tenants import Tenant
from quire.server.turnstile import Turnstile

GENERATING_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
"""Whose requests take a place in the queue."""


class Room(Protocol):
    """Who knows whether there is room."""

    def check_room(self, tenant: Tenant) -> None:
        """Raise ApiError where no request of `tenant` could be taken now, whatever it is."""
        ...


class Door:
    """ASGI application around the router."""

    def __init__(self, app: ASGIApp, room: Room) -> None:
        self._app = app
        self._room = room
        self._turnstile = Turnstile()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in. Raises ApiError."""
        if scope["type"] == "http" and scope["method"] == "POST":
            is_generating = get_route_path(scope) in GENERATING_PATHS
            if is_generating:
                self._room.check_room(call_in(scope).tenant)
            await self._turnstile.enter()
            if is_generating:  # others have come in meanwhile
                self._room.check_room(call_in(scope).tenant)
        await self._app(scope, receive, send)
