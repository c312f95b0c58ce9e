"""T13: what is not quite HTTP, or too much of it, is answered with 4xx or closed, and the server goes on."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_client import FakeClient
from served import resident_bytes
from servers import RunningServer, serve
from timing import timed

from quire.config.api import ApiConfig

pytestmark = timed


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ApiConfig(header_timeout_s=0.4, body_timeout_s=0.4, max_connections=40)
    with serve(FakeClient(), config) as running:
        yield running


def say(server: RunningServer, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back to these bytes, until the server closes or says nothing for a while."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        answer = b""
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
                time.sleep(pause_s)
        with contextlib.suppress(OSError):
            while chunk := connection.recv(65536):
                answer += chunk
        return answer


GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        GET + b"x-long: " + b"a" * 40_000 + b"\r\n\r\n",
        GET + b"".join(b"x-%d: 1\r\n" % number for number in range(200)) + b"\r\n",
        GET + b"x: " + b"a" * 200_000,
        POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        POST + b"content-length: -1\r\n\r\n",
        POST + b"content-length: 1e3\r\n\r\n",
        POST + b"content-length: 99999999999999999999\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 70_000,
        GET + b"bad header\r\n\r\n",
        GET + b"nul: a\x00b\r\n\r\n",
        b"GET /v1/models\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\r\n" * 50_000,
    ],
)
def test_what_is_refused(server: RunningServer, request_bytes: bytes) -> None:
    answer = say(server, request_bytes)
    assert answer == b"" or answer.split(b" ", 2)[1][:1] == b"4", answer[:200]
    if answer:
        body, _ = json.JSONDecoder().raw_decode(answer.partition(b"\r\n\r\n")[2].decode())
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert httpx.get(f"{server.url}/livez").status_code == 200


def test_a_second_request_cannot_be_smuggled(server: RunningServer) -> None:
    inner = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\ntransfer-encoding: chunked\r\n\r\n" % (
        5 + len(inner)
    )
    answer = say(server, head + b"0\r\n\r\n" + inner)
    assert answer.count(b"HTTP/1.1") == 1 and b"process_" not in answer


def test_slow_headers_and_bodies_are_given_up(server: RunningServer) -> None:
    for pieces in ([b""], [b"GET"], [b"GET / HTTP/1.1\r\n", *(b"x: 1\r\n" for _ in range(12))]):
        started = time.monotonic()
        assert b" 408 " in say(server, *pieces, pause_s=0.05)
        assert time.monotonic() - started < 2
    answer = say(server, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n", b"{", b'"')
    assert b" 408 " in answer and b"connection: close" in answer


def test_idle_connections_are_bounded_and_end(server: RunningServer) -> None:
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(60)]
    try:
        answers = [connection.recv(4096) for connection in connections]
        assert sum(b" 503 " in answer for answer in answers) >= 20
        assert sum(b" 408 " in answer for answer in answers) >= 30
    finally:
        for connection in connections:
            connection.close()
    assert httpx.get(f"{server.url}/livez").status_code == 200


def test_a_body_that_comes_after_its_answer_does_not_end_the_connection(tmp_path: Path) -> None:
    """The clock for the next request's headers once ran from there on, and closed connections in the middle of their rest."""
    head = b"GET /v1/files HTTP/1.1\r\nhost: x\r\n"

    def answer(connection: socket.socket) -> bytes:
        data = b""
        while not data.endswith(b"}"):
            data += connection.recv(65536) or b"closed}"
        return data

    config = ApiConfig(header_timeout_s=0.3, data_folder=str(tmp_path))
    with serve(FakeClient(), config) as running, socket.create_connection(("127.0.0.1", running.port), timeout=5) as connection:
        connection.sendall(head + b"content-length: 2\r\n\r\n")
        assert b" 200 " in answer(connection)
        connection.sendall(b"{}")
        time.sleep(0.6)
        connection.sendall(head + b"\r\n")
        assert b" 200 " in answer(connection)


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    first = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = say(server, first + GET + b"\r\n")
    assert answer.count(b"HTTP/1.1 200") == 2
    assert answer.index(b'"version"') < answer.index(b'"object":"list"')


def test_an_answer_is_not_held_back_for_the_clients_acknowledgement(server: RunningServer) -> None:
    """Nagle's algorithm would hold each answer on a connection that is used again for 40 ms, and each token of a stream."""
    with httpx.Client(base_url=server.url) as http:
        elapsed_s = [http.get("/version").elapsed.total_seconds() for _ in range(40)]
        assert min(elapsed_s[20:]) < 0.03, "with the delay, every one of them takes 40 ms, however quick the machine is"


def test_t13_thousands_of_idle_connections_cost_little_and_hold_nobody_up() -> None:
    """Each costs a few kilobytes for the seconds that it is granted; meanwhile others are served as always."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_idle = min(4000, (hard if hard != resource.RLIM_INFINITY else 1 << 20) // 2 - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * num_idle + 200), hard))
    with serve(FakeClient(), ApiConfig(header_timeout_s=60)) as server:
        before = resident_bytes(os.getpid())
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(num_idle)]
        try:
            with httpx.Client(base_url=server.url) as http:
                waits_s = sorted(http.get("/livez").elapsed.total_seconds() for _ in range(20))
            assert waits_s[-2] < 0.3
            assert resident_bytes(os.getpid()) - before < num_idle * (24 << 10)
        finally:
            for connection in idle:
                connection.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
