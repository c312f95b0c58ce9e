"""OpenAI's lists: which page of one a URL requests, and how it is answered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from quire.server.http.errors import bad_request
from quire.server.http.query import Cursor, Order

MAX_FILES_LISTED = 10_000
"""As OpenAI's."""


class Listing(msgspec.Struct, kw_only=True):
    """A part of a list: so many after the one named by `after`."""

    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    after: Cursor = ""
    order: Order = "desc"


class FileListing(msgspec.Struct, kw_only=True):
    """The same of files, where a part may be all of them."""

    limit: Annotated[int, Meta(ge=1, le=MAX_FILES_LISTED)] = MAX_FILES_LISTED
    after: Cursor = ""
    order: Order = "desc"
    purpose: Annotated[str, Meta(max_length=64)] = ""


def page_of(items: Sequence[dict[str, Any]], query: Listing) -> dict[str, Any]:
    """Return the requested page of `items`, which are oldest first. Raises ApiError 400."""
    items = items if query.order == "asc" else list(reversed(items))
    begin = 0
    if query.after:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise bad_request(f"after: there is no item {query.after!r}", param="after")
        begin = ids.index(query.after) + 1
    shown = items[begin : begin + query.limit]
    return list_object(shown, has_more=begin + len(shown) < len(items))


def list_object(shown: Sequence[dict[str, Any]], *, has_more: bool) -> dict[str, Any]:
    """Return OpenAI's list object of what is shown."""
    return {
        "object": "list",
        "data": list(shown),
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": has_more,
    }
