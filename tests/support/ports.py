"""Ports for programs that must be told one: a server that can write nowhere, one whose address
others are given before it runs or that is started anew at the same, a connector's `kv_port`. All
others take 0, and say which they have.
"""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def reserved_port() -> int:
    """Return a port on which only those listen who were told of it.

    A socket stays bound to it until this process ends, so that the system gives it to no other
    (xdist's workers, connections on their way out). It does not listen, and lets addresses be
    shared, as servers do (SO_REUSEADDR): one of them can listen there, again and again.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((HOST, 0))
        port: int = sock.getsockname()[1]
        sock.detach()
    return port
