"""One HTTP request as the endpoints see it: who asks, under which id, since when, and what they
should be told.

A `Call` is made by the gateway and travels in the ASGI scope.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from starlette.requests import Request
from starlette.types import Scope

from quire.core.adapters import Adapter
from quire.server.http.errors import bad_request
from quire.server.quota.tenants import Tenant

_SCOPE_KEY = "quire.call"
_MAX_NAMES_CHARS = 1024
_VISIBLE = "".join(map(chr, range(33, 127))).replace("%", "").replace(",", "").replace('"', "")


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """What the name of an adapter stood for when a request named it."""

    name: str
    folder: Path
    """Never to be shown to a client."""
    adapter: Adapter
    created: int


@dataclass(slots=True)
class Call:
    """What is known of a request besides its body."""

    request_id: str
    tenant: Tenant
    started_s: float = field(default_factory=time.monotonic)
    ignored_fields: list[str] = field(default_factory=list)
    """Fields of the body that have no effect here; named in a response header."""
    is_strict: bool = False
    """Whether such fields are refused instead."""
    deadline_s: float | None = None
    """On the monotonic clock."""
    queue_deadline_s: float | None = None
    trace_parent: str | None = None
    """The W3C trace context that the request came with, unread."""
    num_body_bytes: int = 0
    """Of a body that was decoded."""
    is_admitted: bool = False
    """Whether it has a place among the requests in flight."""
    adapter: ServedAdapter | None = None
    """What the request is answered with besides the model."""
    weight_version: str | None = None
    """Of the weights that computed what there is of the answer; None where there is nothing."""
    is_chat: bool = True
    """Whether the request is for a reply in a chat, not for the continuation of a text."""

    def ignore(self, names: Iterable[str], why: str) -> None:
        """Note fields that have no effect. Raises ApiError 400 for the first of them,
        where they are refused."""
        for name in names:
            if self.is_strict:
                raise bad_request(f"{name}: {why}", param=name, code="unknown_parameter")
            self.ignored_fields.append(name)

    def response_headers(self) -> dict[str, str]:
        """Headers that every successful answer to this call has."""
        headers, shown = {}, self.shown_ignored_fields()
        if self.weight_version is not None:
            headers["x-quire-weight-version"] = self.weight_version
        if shown is not None:
            headers["x-quire-ignored-fields"] = shown
        return headers

    def shown_ignored_fields(self) -> str | None:
        """Names of fields without effect, within the bounds of a header; None where all have
        one."""
        return _as_header(self.ignored_fields) if self.ignored_fields else None


def _as_header(names: Sequence[str]) -> str:
    """Return names that a client made up, as a header may hold them: what is no visible ASCII is
    percent-encoded, a name without characters is `""`, and those that do not fit are left out. One
    wrong character, or a space at the end, and the answer could not be sent.
    """
    shown: list[str] = []
    num_chars = 0
    for name in names:
        encoded = quote(name[:_MAX_NAMES_CHARS], safe=_VISIBLE, errors="replace") or '""'
        num_chars += len(encoded) + 2
        if num_chars > _MAX_NAMES_CHARS:
            break
        shown.append(encoded)
    return ", ".join(shown)


def attach(scope: Scope, call: Call) -> None:
    """Let the endpoints of this request find the call."""
    scope[_SCOPE_KEY] = call


def call_of(request: Request) -> Call:
    """Return the call of a request that came through the gateway."""
    return call_in(request.scope)


def call_in(scope: Scope) -> Call:
    """Return the same, where there is no more than the scope."""
    call: Call = scope[_SCOPE_KEY]
    return call
