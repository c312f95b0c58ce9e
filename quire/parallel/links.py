"""Connections between the processes of a group that share no memory: how they find one another,
and how each knows that the other belongs to the group.

The first process has a doorway, at an address that the others are told together with a secret.
Each opens one of its own, says there where that is, and is told where all are; then each pair of
processes that exchange anything connects. Both ends of a connection prove that they know the
secret, for nonces of this connection, before anything else is read from it. With certificates all
of this and what follows is within TLS; otherwise what passes is neither encrypted nor signed, and
the network between the hosts of a group must be one's own.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import queue
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.common.tls import TlsContexts
from quire.errors import ConfigError, EngineError
from quire.parallel.bridge import bridged

_NONCE_BYTES = 32
_PROOF_BYTES = 32
_MAX_RECORD_BYTES = 64 << 10
GREETING_TIMEOUT_S = 10.0
"""For a stranger to say who it is."""
_RETRY_S = 0.1
_MAX_GREETINGS = 256
"""Connections that are being greeted at a time; more are closed. A group of 64 has less."""


class Credentials(NamedTuple):
    """What a process of a group shows, and wants to be shown."""

    secret: bytes
    tls: TlsContexts | None = None
    """Without it, nothing is encrypted."""


class Introduced(NamedTuple):
    """A connection of another process of the group, and what it said first."""

    sock: socket.socket
    record: Mapping[str, Any]


class Doorway:
    """A listening socket, and a thread that admits those who know the secret and, where there is
    TLS, have a certificate."""

    def __init__(self, host: str, wanted: Credentials) -> None:
        """Raises ConfigError where this host has no such address."""
        self._secret, self._tls = wanted
        self._arrivals: queue.SimpleQueue[Introduced] = queue.SimpleQueue()
        self._greetings = threading.BoundedSemaphore(_MAX_GREETINGS)
        self._is_closed = threading.Event()
        try:
            family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(address[:2], family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                f"the processes of the model cannot be waited for at {host!r}: {error.strerror}; "
                "give an address of this host"
            ) from None
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        threading.Thread(target=self._listen, name="quire-doorway", daemon=True).start()

    def take(self, timeout_s: float) -> Introduced | None:
        """Wait so long for the next one; None where there is none."""
        with contextlib.suppress(queue.Empty):
            return self._arrivals.get(timeout=timeout_s)
        return None

    def close(self) -> None:
        """Admit no more. Idempotent."""
        self._is_closed.set()
        with contextlib.suppress(OSError):  # which wakes the thread
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        while (arrival := self.take(0.0)) is not None:
            arrival.sock.close()

    def _listen(self) -> None:
        while not self._is_closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError:  # it is closed, a connection ended too early, or files have run out
                self._is_closed.wait(_RETRY_S)
                continue
            if not self._greetings.acquire(blocking=False):
                sock.close()
                continue
            try:
                threading.Thread(target=self._greet, args=(sock,), daemon=True).start()
            except RuntimeError:  # no thread is to be had
                sock.close()
                self._greetings.release()

    def _greet(self, sock: socket.socket) -> None:
        try:
            deadline_s = time.monotonic() + GREETING_TIMEOUT_S
            if self._tls is not None:
                sock.settimeout(GREETING_TIMEOUT_S)
                sock = self._tls.server.wrap_socket(sock, server_side=True)
            asked = receive_exactly(sock, _NONCE_BYTES, deadline_s)
            answered = secrets.token_bytes(_NONCE_BYTES)
            sock.sendall(answered + _proof(self._secret, b"admits", asked, answered))
            proof = receive_exactly(sock, _PROOF_BYTES, deadline_s)
            if not hmac.compare_digest(proof, _proof(self._secret, b"dials", asked, answered)):
                raise OSError("a stranger")
            self._arrivals.put(Introduced(sock, receive_record(sock, deadline_s)))
        except (OSError, ValueError):
            sock.close()
        finally:
            self._greetings.release()


def dial(
    address: tuple[str, int], shown: Credentials, record: Mapping[str, Any], deadline_s: float
) -> socket.socket:
    """Connect to a doorway, and say this first. Raises EngineError where no process is there by
    then, or one that lacks the same credentials."""
    secret, tls = shown
    name = f"a process of the model at {address[0]}:{address[1]}"
    try:
        sock = socket.create_connection(address, max(0.1, deadline_s - time.monotonic()))
    except OSError as error:
        raise EngineError(f"{name} cannot be reached: {error.strerror or error}") from None
    try:
        if tls is not None:
            sock.settimeout(max(0.1, deadline_s - time.monotonic()))
            sock = tls.client.wrap_socket(sock)
        asked = secrets.token_bytes(_NONCE_BYTES)
        sock.sendall(asked)
        answer = receive_exactly(sock, _NONCE_BYTES + _PROOF_BYTES, deadline_s)
        answered, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
        if not hmac.compare_digest(proof, _proof(secret, b"admits", asked, answered)):
            raise EngineError(f"{name} does not know this group's secret")
        sock.sendall(_proof(secret, b"dials", asked, answered))
        send_record(sock, record)
    except OSError as error:
        sock.close()
        raise EngineError(f"{name} does not answer: {error}") from None
    except BaseException:
        sock.close()
        raise
    return sock


def prepare(sock: socket.socket, silence_s: float) -> int:
    """Return the descriptor of a connection for what ranks exchange; `sock` has it no more. A
    connection whose other end's host is cut off ends by itself some time after `silence_s`, also
    while nothing is sent, or what was sent is not acknowledged. A process that is stopped
    acknowledges as before, until its host has no room for more signs of life."""
    sock.setblocking(True)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    seconds = max(1, round(silence_s))
    for name, value in (
        ("TCP_KEEPIDLE", seconds), ("TCP_KEEPINTVL", seconds), ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 4000 * seconds),  # else the system tries for 15 minutes
    ):  # fmt: skip
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return bridged(sock) if isinstance(sock, ssl.SSLSocket) else sock.detach()


def send_record(sock: socket.socket, record: Mapping[str, Any]) -> None:
    """Send values of JSON. Raises OSError."""
    content = json.dumps(record).encode()
    assert len(content) <= _MAX_RECORD_BYTES, "a record that is too long"
    sock.sendall(len(content).to_bytes(4, "big") + content)


def receive_record(sock: socket.socket, deadline_s: float) -> Mapping[str, Any]:
    """Wait for what `send_record` sent. Raises OSError or ValueError."""
    num_bytes = int.from_bytes(receive_exactly(sock, 4, deadline_s), "big")
    if num_bytes > _MAX_RECORD_BYTES:
        raise ValueError("a record that is too long")
    record = json.loads(receive_exactly(sock, num_bytes, deadline_s))
    if not isinstance(record, dict):
        raise ValueError("a record that is none")
    return record


def receive_exactly(sock: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Wait for so many bytes. Raises OSError where they do not come by then."""
    found = b""
    while len(found) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0.0:
            raise TimeoutError("no answer in time")
        sock.settimeout(left_s)
        part = sock.recv(num_bytes - len(found))
        if not part:
            raise ConnectionError("the connection has ended")
        found += part
    return found


def _proof(secret: bytes, side: bytes, asked: bytes, answered: bytes) -> bytes:
    return hmac.digest(secret, b"quire ranks " + side + asked + answered, "sha256")
