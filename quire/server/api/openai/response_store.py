"""Answers of /v1/responses that may be continued: kept in memory, within bounds, each tenant's own.

They are kept as JSON, so that what is counted is what is held. Where there is no room, the tenant
that holds most gives up the answer that it has not used for longest. Nothing survives a restart;
clients are told by a 404 for an id that is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from quire.server.http.errors import ApiError
from quire.server.quota.ledger import Ledger


class AskedInput(NamedTuple):
    """What is kept of a request, encoded."""

    items: bytes
    messages: bytes

    @classmethod
    def of(cls, items: Sequence[dict[str, Any]], messages: Sequence[dict[str, Any]]) -> AskedInput:
        """Encode it, which takes time where there are images."""
        return cls(msgspec.json.encode(items), msgspec.json.encode(messages))


class StoredResponse:
    """One answer, what was asked, and the conversation as templates read it,
    the answer included. Reading any of them takes time that grows with `num_bytes`."""

    __slots__ = ("_body", "_input_items", "_messages", "id")

    def __init__(
        self, body: dict[str, Any], asked: AskedInput, answered: Sequence[dict[str, Any]]
    ) -> None:
        """`answered`: the answer as messages of the conversation."""
        self.id: str = body["id"]
        """Made by this server: a client that chose it could replace what is kept under it."""
        self._body, self._input_items = msgspec.json.encode(body), asked.items
        self._messages = _joined(asked.messages, msgspec.json.encode(answered))

    @property
    def body(self) -> Any:
        """The answer, as it was sent."""
        return msgspec.json.decode(self._body)

    @property
    def input_items(self) -> list[dict[str, Any]]:
        """What was asked, in order."""
        items: list[dict[str, Any]] = msgspec.json.decode(self._input_items)
        return items

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation so far."""
        messages: list[dict[str, Any]] = msgspec.json.decode(self._messages)
        return messages

    @property
    def num_bytes(self) -> int:
        """What it holds."""
        return len(self._body) + len(self._input_items) + len(self._messages)


class ResponseStore:
    """Bounded by number and by bytes."""

    def __init__(self, max_responses: int, max_bytes: int) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._ledger: Ledger[str, str] = Ledger()
        self._entries: dict[tuple[str, str], StoredResponse] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """What all of them hold."""
        return self._ledger.num_bytes

    def put(self, tenant: str, response: StoredResponse) -> None:
        """Keep one. One that is larger than the whole store is not kept."""
        if response.num_bytes > self._max_bytes:
            return
        self._ledger.put(tenant, response.id, response.num_bytes)
        self._entries[tenant, response.id] = response
        while self._ledger.num_entries > self._max_responses:
            self._drop_oldest(
                max(self._ledger.owners(), key=self._ledger.entries_of), (tenant, response.id)
            )
        while self._ledger.num_bytes > self._max_bytes:
            self._drop_oldest(
                max(self._ledger.owners(), key=self._ledger.bytes_of), (tenant, response.id)
            )

    def get(self, tenant: str, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """Return one of the tenant's responses. Raises ApiError 404 for one that it never had,
        or that was dropped."""
        entry = self._entries.get((tenant, response_id))
        if entry is None:
            raise ApiError(
                404,
                f"there is no response {response_id[:80]!r}; it may have been dropped to make room",
                param=param,
            )
        self._ledger.touch(tenant, response_id)
        return entry

    def delete(self, tenant: str, response_id: str) -> None:
        """Forget one. Raises ApiError 404 where there is none."""
        self.get(tenant, response_id)
        self._drop(tenant, response_id)

    def _drop_oldest(self, tenant: str, newest: tuple[str, str]) -> None:
        """Make room at a tenant's expense; where all it has is the newest of all,
        at that of the others."""
        if (tenant, self._ledger.oldest(tenant)) == newest and self._ledger.num_entries > 1:
            tenant = max(
                (each for each in self._ledger.owners() if each != tenant),
                key=self._ledger.bytes_of,
            )
        self._drop(tenant, self._ledger.oldest(tenant))

    def _drop(self, tenant: str, response_id: str) -> None:
        self._ledger.drop(tenant, response_id)
        del self._entries[tenant, response_id]


def _joined(first: bytes, second: bytes) -> bytes:
    """Return two lists as one, all of them encoded."""
    between = b"," if len(first) > 2 and len(second) > 2 else b""
    return first[:-1] + between + second[1:]
