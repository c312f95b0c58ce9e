"""One answer on its way from a back end to a client.

Bytes go from the read of one connection into the write of the other, without waking a task, as long
as the client takes them; nothing of them is parsed but HTTP's own framing. Answers that say how
long they are, up to `MAX_HELD_BYTES`, are held until they are complete, so that one which breaks
off can be requested elsewhere. Owns at most `_HIGH_WATER` bytes beside those: a client that
reads slowly stops the back end's connection.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from quire.common.http_client import HttpResponse, Valve
from quire.common.http_head import body_length
from quire.server.http.responses import EventWriter

MAX_HELD_BYTES = 1 << 20
_HIGH_WATER = 64 << 10
_DONE = (b"data: [DONE]\n\n", b"data: [DONE]\n\n\r\n")
_TAILS = (b"\n\n", b"\n\n\r\n")


class FrameWriter(EventWriter, Protocol):
    """A connection to which chunks can be written as they are."""

    def write_frame(self, data: bytes) -> None:
        """Write one chunk, framed already."""
        ...


class Relay:
    """A `Receiver`; `changed` is set for the task that serves the client."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.answer: HttpResponse | None = None
        self.is_held = False
        """Whether the whole body is collected here first."""
        self.num_pieces = 0
        self._last = b""
        self._pieces: list[bytes] = []
        self._num_bytes = 0
        self._valve: Valve | None = None
        self._writer: FrameWriter | None = None

    def wake(self, _: object) -> None:
        """Wake the task, from the callback of another one."""
        self.changed.set()

    def head(self, answer: HttpResponse, valve: Valve) -> None:
        """See `Receiver`."""
        self._valve = valve
        length = body_length(answer.headers)
        is_short = length is not None and 0 <= length <= MAX_HELD_BYTES
        # an error's body is short as well, however it is framed
        self.is_held = is_short or not 200 <= answer.status < 300
        self.answer = answer
        self.changed.set()

    def piece(self, data: bytes) -> None:
        """See `Receiver`."""
        self._pieces.append(data)
        self._num_bytes += len(data)

    def frame(self, data: bytes, start: int) -> None:
        """See `Receiver`. The path of a token."""
        writer = self._writer
        if writer is not None and not self._pieces and writer.can_write():
            self.num_pieces += 1
            self._last = data
            writer.write_frame(data)
        else:
            self.piece(data[start:-2])
            self.flush()

    def flush(self) -> None:
        """See `Receiver`."""
        pieces = self._pieces
        if not pieces:
            return
        self.num_pieces += len(pieces)
        if self._writer is not None and self._writer.can_write():
            self._last = data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            self._writer.write(data)
            pieces.clear()
            self._num_bytes = 0
            return
        if self.is_held:
            self.is_held = self._num_bytes <= MAX_HELD_BYTES
        if self._num_bytes > _HIGH_WATER and not self.is_held and self._valve is not None:
            self._valve.pause()
        self.changed.set()

    @property
    def is_due(self) -> bool:
        """Whether the answer is to begin: only with its first byte, until which another back end
        could still give it."""
        return bool(self._pieces) and not self.is_held

    @property
    def ends_event(self) -> bool:
        """Whether what came last ended an event, so that another one may follow."""
        return not self._last or self._last.endswith(_TAILS)

    @property
    def is_done(self) -> bool:
        """Whether what came last said that the stream is complete."""
        return self._last.endswith(_DONE)

    def write_to(self, writer: FrameWriter | None) -> None:
        """Write straight to the client from now on, as long as it takes what comes."""
        self._writer = writer

    def held(self) -> bytes:
        """Return the body of an answer that is held."""
        return b"".join(self._pieces)

    def take(self) -> bytes:
        """Return what has come and was not written, and let more come."""
        data = b"".join(self._pieces)
        self._pieces.clear()
        self._num_bytes = 0
        if data:
            self._last = data
        if self._valve is not None:
            self._valve.resume()
        return data
