"""A port that is reserved is given to no other, and can be listened on by who was told of it."""

from __future__ import annotations

import socket

import pytest
from ports import HOST, reserved_port


def test_a_reserved_port_can_be_listened_on_again_and_again_and_by_no_other() -> None:
    port = reserved_port()
    assert port != reserved_port()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=60.0).close()
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((HOST, port))
        with (
            socket.create_server((HOST, port)) as listener,
            socket.create_connection((HOST, port), timeout=60.0),
        ):
            listener.accept()[0].close()
