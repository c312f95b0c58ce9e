"""Frames: whole, bounded, typed, or the connection is over."""

from __future__ import annotations

import pickle
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from quire.engine.process.channel import Channel, ChannelClosed, FrameTooLarge, ProtocolError
from quire.engine.process.messages import Abort, Down, Finish, Heartbeat, Ready, Up

Pair = tuple[Channel[Up], Channel[Down], socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """The server's channel, the engine's, and their sockets."""
    ours, theirs = socket.socketpair()
    yield Channel(ours, Up), Channel(theirs, Down), ours, theirs
    ours.close()
    theirs.close()


def test_messages_arrive_in_order_however_the_bytes_are_cut(pair: Pair) -> None:
    server, engine, ours, _ = pair
    sent = [Finish(number, number % 3) if number % 2 else Abort(number) for number in range(200)]
    content = bytearray()
    for message in sent:
        body = msgspec.msgpack.encode(message)
        content += struct.pack(">4sI", b"QRE\x01", len(body)) + body
    rng = random.Random(1)
    received: list[Down] = []
    while content:
        num_bytes = rng.randint(1, 40)
        ours.sendall(content[:num_bytes])
        del content[:num_bytes]
        received += engine.receive()
    assert received == sent
    del server


def test_what_the_other_end_does_not_take_is_kept_and_sent_later(pair: Pair) -> None:
    server, engine, _, _ = pair
    for number in range(20_000):
        server.send(Finish(number, 0))
    assert server.num_unsent_bytes > 0
    received: list[Down] = []
    while len(received) < 20_000:
        received += engine.receive()
        server.flush()
    assert [each.number for each in received if isinstance(each, Finish)] == list(range(20_000))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"a": 1}),
        pickle.dumps([1, 2, 3], protocol=0),
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x80",
        struct.pack(">4sI", b"QRE\x02", 1) + b"\xc0",
        struct.pack(">4sI", b"QRE\x01", 2**32 - 1),
        struct.pack(">4sI", b"QRE\x01", 1) + b"\xc1",
        struct.pack(">4sI", b"QRE\x01", 5) + b"\x91\x91\x91\x91\x91",
    ],
    ids=["pickle", "pickle0", "http", "one byte", "version", "oversize", "no msgpack", "nested"],
)
def test_what_is_not_of_the_protocol_is_refused(pair: Pair, data: bytes) -> None:
    _, engine, ours, _ = pair
    ours.sendall(data)
    with pytest.raises(ProtocolError):
        engine.receive()


@pytest.mark.parametrize(
    "message",
    [
        {"type": "Run", "code": "1"},
        {"type": "Abort", "number": 1, "extra": 2},
        {"type": "Abort", "number": "1"},
        {"type": "Ready"},
    ],
    ids=["unknown type", "unknown field", "wrong type", "of the other end"],
)
def test_unknown_messages_and_fields_are_refused(pair: Pair, message: dict[str, object]) -> None:
    server, engine, _, _ = pair
    server.send(message)
    with pytest.raises(ProtocolError, match="not one of ours"):
        engine.receive()


def test_a_message_that_is_too_large_is_not_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        small: Channel[Up] = Channel(ours, Up, max_frame_bytes=64)
        with pytest.raises(FrameTooLarge, match="limit of 64"):
            small.send({"text": "x" * 100})
        assert small.num_unsent_bytes == 0


def test_the_end_is_told_after_the_last_message(pair: Pair) -> None:
    server, engine, _, _ = pair
    engine.send(Ready(1.0))
    engine.send(Heartbeat(num_steps=3))
    engine.close()
    assert server.receive() == [Ready(1.0), Heartbeat(num_steps=3)]
    with pytest.raises(ChannelClosed):
        server.receive()


@pytest.mark.slow
def test_an_engine_ends_itself_on_nonsense_and_when_its_server_goes(tmp_path: Path) -> None:
    """Pickled bytes, and the end of the connection, both end the process:
    it keeps no connection that it cannot trust."""
    for data in (pickle.dumps(print), b""):
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", _ENGINE, str(theirs.fileno())]
        with subprocess.Popen(
            command, pass_fds=[theirs.fileno()], stderr=subprocess.DEVNULL
        ) as process:
            theirs.close()
            ours.sendall(data)
            if not data:
                ours.close()
            assert process.wait(30) == 0
            if data:
                assert ours.recv(100) == b"", "closed without an answer"
        ours.close()


_ENGINE = (
    "import os, sys; from quire.engine.process.host import main; sys.exit(main(int(sys.argv[1]), "
    "os.getppid()))"
)
