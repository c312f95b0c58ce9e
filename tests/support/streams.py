"""Many streamed completions at once, and what became of each."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.common.event_reader import EventReader
from quire.common.http_client import HttpClient, HttpError, HttpRequest


@dataclass(slots=True)
class Streamed:
    """One of them, as far as it came."""

    text: str = ""
    finish_reason: str | None = None
    num_tokens: tuple[int, int] | None = None
    """Of the prompt and of the answer, as the server counts them. What of it was cached depends on
    what else runs."""
    is_done: bool = False
    """Whether the server said that it is complete."""
    error: dict[str, Any] | None = None
    """What the server said instead."""
    broken: str | None = None
    """How the connection ended before either."""
    num_events: int = 0

    @property
    def answer(self) -> tuple[str, str | None, tuple[int, int] | None]:
        """What is the same each time, where nothing goes wrong."""
        return self.text, self.finish_reason, self.num_tokens

    @property
    def outcome(self) -> str:
        """`whole`, or why it is not."""
        if self.is_done:
            return "whole"
        if self.error is not None:
            return str(self.error.get("code"))
        return f"connection {self.broken}"

    def take(self, data: bytes) -> None:
        """Take an event. Also after an error, the stream itself is done."""
        assert not self.is_done and (self.error is None or data == b"[DONE]"), (self, data)
        self.num_events += 1
        if data == b"[DONE]":
            self.is_done = self.error is None
            return
        event = json.loads(data)
        if "error" in event:
            self.error = event["error"]
            return
        for choice in event["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        if usage := event.get("usage"):
            self.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]


@dataclass(slots=True)
class Round:
    """All streams of one round, under way."""

    url: str
    streams: list[Streamed] = field(default_factory=list)

    @property
    def num_events(self) -> int:
        """Of all."""
        return sum(each.num_events for each in self.streams)

    @property
    def is_over(self) -> bool:
        """Whether all have come to their end."""
        return bool(self.streams) and all(
            each.is_done or each.error is not None or each.broken for each in self.streams
        )

    async def run(self, bodies: Sequence[Any], deadline_s: float) -> list[Streamed]:
        """Send all, and wait until each has come to its end. Raises TimeoutError for one that has
        not by then."""
        self.streams = [Streamed() for _ in bodies]
        async with HttpClient(
            self.url, timeout_s=deadline_s, connect_timeout_s=deadline_s
        ) as client:
            await asyncio.gather(
                *(
                    self._stream(client, body, into, deadline_s)
                    for body, into in zip(bodies, self.streams, strict=True)
                )
            )
        return self.streams

    async def _stream(
        self, client: HttpClient, body: Any, into: Streamed, deadline_s: float
    ) -> None:
        data = json.dumps({**body, "stream": True}).encode()
        request = HttpRequest("POST", "/v1/completions", data)
        try:
            async with asyncio.timeout(deadline_s):
                answer = await client.request(request, EventReader(into.take))
        except HttpError as error:
            assert error.kind in ("connect", "broken"), f"after {into.num_events} events: {error}"
            if not into.is_done and into.error is None:
                into.broken = error.kind
            return
        if answer.status != 200:
            into.error = json.loads(answer.body)["error"]
        elif not into.is_done and into.error is None:
            into.broken = "closed"
