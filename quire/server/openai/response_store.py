"""Answers of /v1/responses that may be continued: kept in memory, within bounds, each tenant's own.

The oldest use goes first. Nothing survives a restart, which is what clients are told by a 404 for an id that is gone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """One answer, what was asked, and the conversation as templates read it, the answer included."""

    body: dict[str, Any]
    input_items: Sequence[dict[str, Any]]
    messages: Sequence[dict[str, Any]]

    @property
    def num_bytes(self) -> int:
        """About what it holds."""
        return len(msgspec.json.encode((self.body, self.input_items, self.messages)))


class ResponseStore:
    """Bounded by number and by bytes."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._entries: OrderedDict[tuple[str, str], tuple[StoredResponse, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Keep one. One that is larger than the whole store is not kept."""
        size = response.num_bytes
        if size > self._max_bytes:
            return
        self._entries[tenant, response.body["id"]] = (response, size)
        self._num_bytes += size
        while len(self._entries) > self._max_responses or self._num_bytes > self._max_bytes:
            _, (_, oldest_size) = self._entries.popitem(last=False)
            self._num_bytes -= oldest_size

    def get(self, tenant: str, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """One of the tenant's. Raises ApiError 404 for one that it never had, or that was dropped."""
        entry = self._entries.get((tenant, response_id))
        if entry is None:
            raise ApiError(
                404, f"there is no response {response_id[:80]!r}; it may have been dropped to make room", param=param
            )
        self._entries.move_to_end((tenant, response_id))
        return entry[0]

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget one. Raises ApiError 404 where there is none."""
        self.get(tenant, response_id)
        _, size = self._entries.pop((tenant, response_id))
        self._num_bytes -= size
