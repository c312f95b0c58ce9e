"""Which paths are forwarded, and what may be done with a request by its path alone."""

from __future__ import annotations

from typing import NamedTuple

from starlette.types import Scope

from quire.server.http.quota_check import GENERATING_PATHS

PURE_PATHS = (GENERATING_PATHS - {"/v1/responses"}) | {
    "/tokenize", "/detokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens",
    "/v1/audio/transcriptions", "/v1/audio/translations", "/generate",
}  # fmt: skip
"""Whose requests change nothing at a back end, so that sending one twice does no harm."""
BROADCAST_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
"""Whose requests are meant for every back end."""
OPERATOR_PATHS = frozenset({"/v1/cache", "/v1/kv_events"})
"""Which show or clear what one back end has cached of everybody: not for the router's clients, for
whom the router shows a key of its own."""
_LOOKUPS = ("/v1/responses/", "/v1/files/", "/v1/batches", "/v1/models/")
_PREVIOUS = b'"previous_response_id"'


class RouteLabel(NamedTuple):
    """What logs and metrics call a route."""

    path: str


_LABELS = {path: RouteLabel(path) for path in PURE_PATHS | {"/v1/responses"}}
_OTHER = RouteLabel("/v1/*")


def route_label(path: str) -> RouteLabel:
    """Return a forwarded path's label: one of a few, whatever clients make up."""
    return _LABELS.get(path, _OTHER)


def is_forwarded(scope: Scope) -> bool:
    """Return whether a path is the back ends': below /v1/, or one of the few others, and spelled
    so that every reader takes it for the same, also one that decodes slashes before it follows
    dots."""
    raw_path: bytes = scope["raw_path"]
    parts = scope["path"].split("/")[1:]
    if scope["path"] in OPERATOR_PATHS:
        return False
    if b"%2e" in raw_path.lower() or "\\" in scope["path"] or {"", ".", ".."} & set(parts):
        return False
    return scope["path"] in PURE_PATHS or raw_path.startswith(b"/v1/")


def is_lookup(path: str, body: bytes) -> bool:
    """Return whether a request names what only one of the back ends may have: a stored answer, a
    file, a batch. A 404 of one is then not the last word.
    """
    return path.startswith(_LOOKUPS) or (path == "/v1/responses" and _PREVIOUS in body)
