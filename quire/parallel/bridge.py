"""What stands between an encrypted connection and the native code, which knows plain descriptors: a
pair of sockets within the process, and a thread that passes bytes on in both directions.

Its cost is that of one more copy, of the cipher, and of waking a thread of Python for each message.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import threading

_BUFFER_BYTES = 256 << 10
_TURNS = 16
"""Pieces that go in one direction before the other one is looked at."""


def bridged(outer: ssl.SSLSocket) -> int:
    """Return a descriptor whose bytes go through a connection; `outer` belongs to the bridge from
    now on. Whichever end is over, the other one ends as well."""
    inner, given = socket.socketpair()
    bridge = _Bridge(outer, inner)
    threading.Thread(target=bridge.run, name="quire-tls", daemon=True).start()
    return given.detach()


class _Bridge:
    def __init__(self, outer: ssl.SSLSocket, inner: socket.socket) -> None:
        self._outer, self._inner = outer, inner
        self._rooms = memoryview(bytearray(_BUFFER_BYTES)), memoryview(bytearray(_BUFFER_BYTES))
        self._outward, self._inward = self._rooms[0][:0], self._rooms[1][:0]
        """What was taken from one end and not yet by the other."""
        self._outer_events = self._inner_events = 0
        """What is waited for at each."""
        self._is_busy = False
        """Whether there may be more at once."""

    def run(self) -> None:
        """Pass on until one end is over."""
        with contextlib.suppress(OSError), self._outer, self._inner:
            self._outer.setblocking(False)
            self._inner.setblocking(False)
            while True:
                self._outer_events = self._inner_events = 0
                self._is_busy = False
                self._send_out()
                self._take_in()
                self._wait()

    def _send_out(self) -> None:
        try:
            for _ in range(_TURNS):
                if not self._outward:
                    self._outward = self._read(self._inner, self._rooms[0])
                self._outward = self._outward[self._outer.send(self._outward) :]
        except ssl.SSLWantReadError:
            self._outer_events |= select.POLLIN
        except ssl.SSLWantWriteError:
            self._outer_events |= select.POLLOUT
        except BlockingIOError:
            self._inner_events |= select.POLLIN
        else:
            self._is_busy = True

    def _take_in(self) -> None:
        try:
            for _ in range(_TURNS):
                if not self._inward:
                    self._inward = self._read(self._outer, self._rooms[1])
                self._inward = self._inward[self._inner.send(self._inward) :]
        except ssl.SSLWantReadError:
            self._outer_events |= select.POLLIN
        except ssl.SSLWantWriteError:
            self._outer_events |= select.POLLOUT
        except BlockingIOError:
            self._inner_events |= select.POLLOUT
        else:
            self._is_busy = True

    @staticmethod
    def _read(sock: socket.socket, room: memoryview) -> memoryview:
        count = sock.recv_into(room)
        if not count:
            raise ConnectionError("the other end is over")
        return room[:count]

    def _wait(self) -> None:
        """Wait until something can be passed on. Raises OSError where one end is over; that a rank
        is silent, its group notices."""
        poll = select.poll()
        poll.register(self._outer, self._outer_events)
        poll.register(self._inner, self._inner_events)
        ended = select.POLLERR | select.POLLHUP | select.POLLNVAL
        if any(events & ended for _, events in poll.poll(0 if self._is_busy else None)):
            raise ConnectionError("the other end is over")
