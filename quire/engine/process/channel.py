"""One end of the connection between two processes: frames of typed messages over a socket pair,
never blocking.

A frame is a magic number, the length of its content, and the content. Whatever is not exactly that
(another magic number, a length above the limit, a content that is no message) raises ProtocolError,
and the connection is closed for good: what follows could not be trusted. No byte received is ever
executed, looked up as a name or used as a size before it was checked.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from quire.errors import EngineError

MAX_FRAME_BYTES = 64 << 20
"""A prompt of a million tokens takes five megabytes."""
_HEADER = struct.Struct(">4sI")
_MAGIC = b"QRE\x01"
_RECEIVE_BYTES = 1 << 18

Incoming = TypeVar("Incoming")


class Waitable(Protocol):
    """What can be waited for."""

    def fileno(self) -> int:
        """Return the operating system's number of it."""
        ...


class ProtocolError(EngineError):
    """The other end does not speak this protocol."""


class ChannelClosed(EngineError):
    """The other end is gone."""


class FrameTooLarge(EngineError):
    """A message is too large to be sent; nothing was."""


def wait(
    readers: Sequence[Waitable], writers: Sequence[Waitable], timeout_s: float | None
) -> set[int]:
    """Wait until something can be received from one of `readers` or sent to one of `writers`, or an
    end of one is seen; their `fileno`s. A server with a thousand connections has descriptors that
    `select` cannot take, hence `poll`.
    """
    poll = select.poll()
    for each in writers:
        poll.register(each.fileno(), select.POLLOUT)
    for each in readers:
        is_both = any(each is other for other in writers)
        poll.register(each.fileno(), select.POLLIN | (select.POLLOUT if is_both else 0))
    return {fileno for fileno, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)}


class Channel(Generic[Incoming]):
    """Sends any message, receives those of one type. Sending is safe from several threads."""

    def __init__(
        self, sock: socket.socket, incoming: Any, *, max_frame_bytes: int = MAX_FRAME_BYTES
    ) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._max_frame_bytes = max_frame_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Incoming] = msgspec.msgpack.Decoder(incoming)
        self._received = bytearray()
        self._unsent = bytearray()
        self._lock = threading.Lock()
        """Guards `_unsent` and the order of what is sent."""

    def fileno(self) -> int:
        """Return the file descriptor, for `wait`."""
        return self._socket.fileno()

    @property
    def num_unsent_bytes(self) -> int:
        """What the other end has not taken yet; who sends must look,
        and pause above a limit of its own."""
        return len(self._unsent)

    def send(self, message: object) -> None:
        """Send, or keep for `flush` what the other end does not take now. Raises ChannelClosed,
        FrameTooLarge."""
        content = self._encoder.encode(message)
        if len(content) > self._max_frame_bytes:
            raise FrameTooLarge(
                f"a message of {len(content)} bytes exceeds the limit of {self._max_frame_bytes}"
            )
        with self._lock:
            self._unsent += _HEADER.pack(_MAGIC, len(content))
            self._unsent += content
            self._flush()

    def flush(self) -> None:
        """Send what is left, as far as the other end takes it. Raises ChannelClosed."""
        with self._lock:
            self._flush()

    def receive(self) -> Sequence[Incoming]:
        """Return every message that is there now, possibly none. Raises ChannelClosed,
        or ProtocolError."""
        is_closed = False
        try:
            while True:
                data = self._socket.recv(_RECEIVE_BYTES)
                is_closed = not data
                self._received += data
                if len(data) < _RECEIVE_BYTES or len(self._received) > self._max_frame_bytes:
                    break
        except BlockingIOError:
            pass
        except OSError:  # reset: what came before it still counts
            is_closed = True
        messages = self._take_frames()
        if is_closed and not messages:
            raise ChannelClosed("the other end has closed the connection")
        return messages

    def close(self) -> None:
        """Close. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.close()

    def _flush(self) -> None:
        try:
            while self._unsent:
                num_sent = self._socket.send(memoryview(self._unsent)[:_RECEIVE_BYTES])
                del self._unsent[:num_sent]
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosed(f"the connection broke: {type(error).__name__}") from error

    def _take_frames(self) -> list[Incoming]:
        messages: list[Incoming] = []
        data, start = self._received, 0
        while len(data) > start:
            if not _MAGIC.startswith(bytes(data[start : start + len(_MAGIC)])):
                raise ProtocolError("a frame does not begin as ours do")
            if len(data) - start < _HEADER.size:
                break
            _, length = _HEADER.unpack_from(data, start)
            if length > self._max_frame_bytes:
                raise ProtocolError(
                    f"a frame of {length} bytes exceeds the limit of {self._max_frame_bytes}"
                )
            end = start + _HEADER.size + length
            if len(data) < end:
                break
            try:
                messages.append(
                    self._decoder.decode(memoryview(data)[start + _HEADER.size : end].tobytes())
                )
            except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
                raise ProtocolError(
                    f"a message is not one of ours: {type(error).__name__}"
                ) from error
            start = end
        if start:
            del data[:start]
        return messages
