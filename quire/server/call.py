"""One HTTP request as the endpoints see it: who asks, under which id, since when, and what they should be told.

A `Call` is made by the gate and travels in the ASGI scope.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from quire.server.tenants import Tenant

_SCOPE_KEY = "quire.call"


@dataclass(slots=True)
class Call:
    """What is known of a request besides its body."""

    request_id: str
    tenant: Tenant
    started_s: float = field(default_factory=time.monotonic)
    ignored_fields: list[str] = field(default_factory=list)
    """Fields of the body that have no effect here; named in a response header."""
    deadline_s: float | None = None
    """On the monotonic clock."""
    queue_deadline_s: float | None = None
    trace_parent: str | None = None
    """The W3C trace context that the request came with, unread."""
    is_chat: bool = True
    """Whether what is asked for is a reply in a chat, not the continuation of a text."""

    def response_headers(self) -> dict[str, str]:
        """Headers that every successful answer to this call has."""
        if not self.ignored_fields:
            return {}
        names = ", ".join(name for name in self.ignored_fields if name.isascii() and name.isprintable())
        return {"x-quire-ignored-fields": names[:1024]}


def attach(scope: Scope, call: Call) -> None:
    """Let the endpoints of this request find the call."""
    scope[_SCOPE_KEY] = call


def call_of(request: Request) -> Call:
    """The call of a request that came through the gate."""
    return call_in(request.scope)


def call_in(scope: Scope) -> Call:
    """The same, where there is no more than the scope."""
    call: Call = scope[_SCOPE_KEY]
    return call
