"""A client of a few lines over one kept connection, for tests that send very many bodies:
a quarter of httpx's time."""

from __future__ import annotations

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    status: int
    kind: str
    """Its content type, without parameters."""
    content: bytes
    elapsed_s: float

    def json(self) -> Any:
        """The content, decoded."""
        return json.loads(self.content)


class PlainClient:
    """One connection to a server on this machine."""

    def __init__(
        self, port: int, headers: dict[str, str] | None = None, timeout_s: float = 60.0
    ) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self._headers = headers or {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def get(self, path: str) -> Answer:
        """Ask."""
        return self._send("GET", path, None)

    def post(self, path: str, content: bytes) -> Answer:
        """Send a body. A connection that the server has closed behind its
        last answer is opened again."""
        return self._send("POST", path, content)

    def _send(self, method: str, path: str, content: bytes | None) -> Answer:
        began_s = time.monotonic()
        try:
            return self._exchange(method, path, content, began_s)
        except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
            self._connection.close()
            return self._exchange(method, path, content, began_s)

    def _exchange(self, method: str, path: str, content: bytes | None, began_s: float) -> Answer:
        self._connection.request(method, path, content, self._headers)
        response = self._connection.getresponse()
        data = response.read()
        kind = (response.headers.get("content-type") or "").partition(";")[0]
        return Answer(response.status, kind, data, time.monotonic() - began_s)
