"""A process that may open no more files says so, once, and serves those that are connected."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from served import Served, cpu_s, serving, until

from quire.server.http.exhaustion import ExhaustionLog

MESSAGE = "socket.accept() out of system resource"


def test_the_same_is_said_once_a_minute_and_the_rest_as_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times_s = iter((0.0, 1.0, 59.0, 60.0, 61.0))
    log = ExhaustionLog(lambda: next(times_s))
    loop = asyncio.new_event_loop()
    error = OSError(errno.EMFILE, "x")
    error.__traceback__ = None
    for _ in range(5):
        log(loop, {"message": MESSAGE, "exception": error})
    assert len(caplog.records) == 2 and "EMFILE" in caplog.text and "raise ulimit -n" in caplog.text
    caplog.clear()
    log(loop, {"message": "something else", "exception": error})
    log(loop, {"message": MESSAGE, "exception": ValueError()})
    assert [record.name for record in caplog.records] == ["asyncio", "asyncio"]
    assert all(record.levelno == logging.ERROR for record in caplog.records)
    loop.close()


@pytest.mark.slow
def test_without_a_file_to_spare_nothing_spins_and_what_is_open_is_served() -> None:
    with serving("--header-timeout-s", "300") as served:
        served.await_ready()
        log = _log_of(served)
        pid = served.process.pid
        limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        open_one = socket.create_connection(("127.0.0.1", served.port))
        _ask(open_one)
        num_open = 1 + max(int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir())
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (num_open, limits[1]))
        burst = [socket.create_connection(("127.0.0.1", served.port)) for _ in range(50)]
        until(lambda: any("no connection can be accepted now (EMFILE)" in line for line in log))
        before_s, began_s = cpu_s(pid), time.monotonic()
        while time.monotonic() - began_s < 2.5:  # in which asyncio tries thrice
            _ask(open_one)
            time.sleep(0.05)
        assert cpu_s(pid) - before_s < 0.7 * (time.monotonic() - began_s), (
            "a loop that spins takes all of a processor"
        )
        assert sum("no connection can be accepted" in line for line in log) == 1
        assert not any("Traceback" in line for line in log)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
        for connection in burst:
            connection.settimeout(60)
            _ask(connection)
        for connection in (open_one, *burst):
            connection.close()


def _ask(connection: socket.socket) -> None:
    connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
    received = b""
    while b'"alive"}' not in received:
        piece: Any = connection.recv(10_000)
        assert piece, "the connection was closed"
        received += piece
    assert b" 200 " in received


def _log_of(served: Served) -> list[str]:
    """What the server writes from here on, as it comes."""
    lines: list[str] = []
    source = served.process.stderr
    assert source is not None
    threading.Thread(target=lambda: lines.extend(iter(source.readline, "")), daemon=True).start()
    return lines
