"""What a consumer and a producer say to each other over a socket: a few frames of MessagePack, each
of bounded length, and chunks of bytes behind one of them.

    consumer                                   producer
    hello: version, identity, engine, nonce -> the same but the engine, and a proof
    pull: proof, lease, content, tokens     -> what: tokens, starts, chunks with their checksums
                                               the chunks' bytes (TCP), or a descriptor (a socket
                                               of this machine)
    done                                    ->

Where both ends have a secret, each proves to the other that it knows it, for these two nonces, and
every later frame carries a code (BLAKE2b with a key, RFC 7693) that no other can make. Checksums
of the chunks are in such a frame, so the bytes are covered, too. Every read and write has a
deadline.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import struct
import time
from typing import NamedTuple, TypeVar

import msgspec

VERSION = 1
MAX_FRAME_BYTES = 4 << 20
_LENGTH = struct.Struct("<I")
_CODE_BYTES = 16
_NONCE_BYTES = 16
_NO_KEY = bytes(16)

Frame = TypeVar("Frame", bound=msgspec.Struct)


class WireError(Exception):
    """The other end is not what it should be, or says what it should not."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first frame in each direction."""

    version: int
    identity: bytes
    """Of all that decides the bits of keys and values besides the prompt."""
    nonce: bytes
    engine: str = ""
    """The producer that is meant."""
    proof: bytes = b""
    """Of the producer."""


class PullRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a consumer wants."""

    lease: str
    content: bytes
    first: int
    end: int
    wait_s: float
    """How long to wait for a lease that is not there yet."""


class ChunkHead(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One chunk: its tokens, and where its bytes are in what was given."""

    first: int
    end: int
    start: int
    num_bytes: int
    checksum: bytes


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a producer gives."""

    refusal: str = ""
    """Why it gives nothing."""
    num_tokens: int = 0
    starts: tuple[int, ...] = ()
    chunks: tuple[ChunkHead, ...] = ()


class PullDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The consumer has everything, and its checksums are right."""


class EndFacts(NamedTuple):
    """What one end of a connection knows."""

    identity: bytes
    secret: bytes
    """Empty where there is none."""


class Line:
    """One connection, from one end."""

    def __init__(self, sock: socket.socket, settings: EndFacts, deadline_s: float) -> None:
        """`deadline_s` is on the monotonic clock: after it, everything raises TimeoutError."""
        self.socket, self.deadline_s = sock, deadline_s
        self._settings = settings
        self._key = b""
        self._num_sent = self._num_received = 0

    # -- the beginning
    # ----------------------------------------------------------------------------------------------

    def greet(self, engine: str) -> None:
        """The consumer's beginning. Raises WireError where the producer is another one."""
        nonce = os.urandom(_NONCE_BYTES)
        identity, secret = self._settings
        self._send(msgspec.msgpack.encode(Hello(VERSION, identity, nonce, engine)))
        answer = self._decoded(self._receive(), Hello)
        keys = _keys(secret, nonce, answer.nonce, answer.identity)
        if not hmac.compare_digest(answer.proof, keys.proof):
            raise WireError("the producer has another secret")
        if answer.identity != identity:
            raise WireError("the producer computes with other weights, formats or kernels")
        if answer.engine != engine:
            raise WireError(f"it is {answer.engine[:64]!r} that answers there")
        self._key = keys.session

    def welcome(self, engine: str) -> None:
        """The producer's beginning. Raises WireError for another version."""
        asked = self._decoded(self._receive(), Hello)
        if asked.version != VERSION or len(asked.nonce) != _NONCE_BYTES:
            raise WireError(f"version {asked.version} of the protocol, not {VERSION}")
        nonce = os.urandom(_NONCE_BYTES)
        identity, secret = self._settings
        keys = _keys(secret, asked.nonce, nonce, identity)
        hello = Hello(VERSION, identity, nonce, engine, keys.proof)
        self._send(msgspec.msgpack.encode(hello))
        self._key = keys.session

    # -- frames
    # ----------------------------------------------------------------------------------------------

    def send(self, frame: msgspec.Struct) -> None:
        """Send a frame with its code."""
        data = msgspec.msgpack.encode(frame)
        self._send(self._code(data, self._num_sent, is_own=True) + data)
        self._num_sent += 1

    def receive(self, kind: type[Frame]) -> Frame:
        """Receive a frame of a kind. Raises WireError for any other, and for a wrong code."""
        data = self._receive()
        code, data = data[:_CODE_BYTES], data[_CODE_BYTES:]
        expected = self._code(data, self._num_received, is_own=False)
        if not hmac.compare_digest(code, expected):
            raise WireError("a frame that the other end did not make")
        self._num_received += 1
        return self._decoded(data, kind)

    def send_bytes(self, data: memoryview) -> None:
        """Send bytes that a frame has announced."""
        self._limit()
        self.socket.sendall(data)

    def receive_bytes(self, count: int) -> memoryview:
        """Receive so many bytes."""
        buffer = memoryview(bytearray(count))
        done = 0
        while done < count:
            self._limit()
            got = self.socket.recv_into(buffer[done:], min(count - done, 1 << 20))
            if not got:
                raise WireError("the connection ended too early")
            done += got
        return buffer

    def _code(self, data: bytes, number: int, *, is_own: bool) -> bytes:
        # own frames of one end are not to be given back to it as the other's
        side = b"own" if is_own is self._is_consumer else b"other"
        digest = hashlib.blake2b(digest_size=_CODE_BYTES, key=self._key or _NO_KEY, person=side)
        digest.update(number.to_bytes(8, "little") + data)
        return digest.digest()

    _is_consumer = True

    def as_producer(self) -> Line:
        """Return this line as the producer's end."""
        self._is_consumer = False
        return self

    def _send(self, data: bytes) -> None:
        assert len(data) <= MAX_FRAME_BYTES, "a frame that is too long"
        self.send_bytes(memoryview(_LENGTH.pack(len(data)) + data))

    def _receive(self) -> bytes:
        (length,) = _LENGTH.unpack(self.receive_bytes(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise WireError(f"a frame of {length} bytes")
        return bytes(self.receive_bytes(length))

    def _decoded(self, data: bytes, kind: type[Frame]) -> Frame:
        try:
            return msgspec.msgpack.decode(data, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise WireError(f"not a {kind.__name__}") from error

    def _limit(self) -> None:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the other end took too long")
        self.socket.settimeout(left_s)


class _Keys(NamedTuple):
    proof: bytes
    """Of the producer. The consumer's is the code of its first frame."""
    session: bytes


def _keys(secret: bytes, asked: bytes, answered: bytes, identity: bytes) -> _Keys:
    if not secret:
        return _Keys(b"", b"")
    facts = b"quire kv transfer" + asked + answered + identity

    def key(name: bytes) -> bytes:
        return hmac.digest(secret, name + facts, "sha256")

    return _Keys(key(b"proof"), key(b"session"))
