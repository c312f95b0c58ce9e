"""T13: what is not quite HTTP, or too much of it, is answered with 4xx or closed,
and the server goes on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import socket
from collections.abc import Iterator

import httpx
import pytest
from fake_client import FakeClient, Script
from served import resident_bytes, until
from servers import RunningServer, serve
from timing import timed

from quire.config.api import ApiConfig
from quire.server.quota.tenants import Tenant, key_ring

pytestmark = timed


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """As patient as it is by default: nothing here is a matter of time."""
    with serve(FakeClient()) as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[RunningServer]:
    """A server that waits for nobody."""
    with serve(FakeClient(), ApiConfig(header_timeout_s=0.4, body_timeout_s=0.4)) as running:
        yield running


def connect(server: RunningServer) -> socket.socket:
    """A connection on which nothing has been said."""
    return socket.create_connection(("127.0.0.1", server.port), timeout=60)


def say(server: RunningServer, *pieces: bytes, end: bytes | None = None) -> bytes:
    """What comes back to these bytes, until the server closes or the answer ends with `end`."""
    with connect(server) as connection:
        with contextlib.suppress(OSError):
            for piece in pieces:
                connection.sendall(piece)
        return hear(connection, end)


def hear(connection: socket.socket, end: bytes | None = None) -> bytes:
    """What comes, until the server closes or it ends with `end`."""
    answer = b""
    with contextlib.suppress(OSError):
        while (end is None or not answer.endswith(end)) and (chunk := connection.recv(65536)):
            answer += chunk
    return answer


GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
SECOND = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
"""What must never be served where it is not a request of its own."""


def with_length(value: bytes) -> bytes:
    """A request whose body's length is said like this."""
    return POST + b"content-length:" + value + b"\r\n\r\n{}" + SECOND


def with_coding(value: bytes) -> bytes:
    """A request whose body is coded like this."""
    return POST + b"transfer-encoding:" + value + b"\r\n\r\n0\r\n\r\n" + SECOND


REFUSED: dict[str, list[bytes]] = {
    "url_too_long": [
        b"GET /" + b"a" * 9000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    ],
    "headers_too_large": [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /" + b"a" * 100_000,
        GET + b"x-long: " + b"a" * 40_000 + b"\r\n\r\n",
        GET + b"".join(b"x-%d: 1\r\n" % number for number in range(200)) + b"\r\n",
        GET + b"x: " + b"a" * 200_000,
        b"\r\n" * 50_000,
    ],
    "invalid_http": [
        CHUNKED + b"1\r\nx\r\n" * 70_000,
        CHUNKED + b"2;" + b"a" * 60_000 + b"\r\n{}\r\n0\r\n\r\n",
        CHUNKED + b"1;" + b"a" * 400 + b"\r\n{\r\n" + (b"1;" + b"a" * 400 + b"\r\nx\r\n") * 200,
        CHUNKED + b"2\r\n{}\r\n0\r\n" + b"x-trailer: a\r\n" * 10_000,
        CHUNKED + b"0" * 100_000,
        # the length of the body
        POST + b"content-length: 2\r\ncontent-length: 3\r\n\r\n{}x",
        POST + b"content-length: 2\r\ncontent-length: 2\r\n\r\n{}" + SECOND,
        POST + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
        POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n" + SECOND,
        POST
        + b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n"
        + SECOND,
        POST + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n" + SECOND,
        b"POST /v1/completions HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
        *map(
            with_length,
            [
                b" -1",
                b" +2",
                b" 1e3",
                b" 0x2",
                b" 2_0",
                b"",
                b" 2 2",
                b" 2,2",
                b" 2, 3",
                b"\r\n 2",
                b" 2\x0b",
            ],
        ),
        *map(with_length, [b" 99999999999999999999", b" 18446744073709551618", b" \xc2\xb2"]),
        *map(
            with_coding,
            [
                b" chunked, identity",
                b" gzip, chunked",
                b" chunked, chunked",
                b" identity",
                b" xchunked",
                b"",
            ],
        ),
        *map(
            with_coding,
            [b" gzip\r\ntransfer-encoding: chunked", b" chunked\r\ntransfer-encoding: gzip"],
        ),
        *map(
            with_coding,
            [b" \x0bchunked", b"\r\n chunked", b" chunked\x00", b' "chunked"', b" chunked;q=1"],
        ),
        # chunks
        *(
            CHUNKED + size + b"\r\n{}\r\n0\r\n\r\n" + SECOND
            for size in (b"zz", b"-2", b"+2", b"0x2", b" 2", b"2 ", b"", b"2_")
        ),
        *(
            CHUNKED + size + b"\r\n{}\r\n0\r\n\r\n" + SECOND
            for size in (b"2;a\nb", b"2;\x00", b"FFFFFFFFFFFFFFFF2")
        ),
        *(
            CHUNKED + b"2\r\n{}" + end + SECOND
            for end in (b"0\r\n\r\n", b"\n0\r\n\r\n", b"}\r\n0\r\n\r\n", b"\r0\r\n\r\n")
        ),
        CHUNKED + b"2\n{}\n0\n\n" + SECOND,
        CHUNKED + b"2\r\n{}\r\n0\r\ncontent-length: 3\r\n\r\n" + SECOND,
        CHUNKED + b"2\r\n{}\r\n0\r\nbad trailer\r\n\r\n" + SECOND,
        # headers
        *(
            GET + line + b"\r\n\r\n"
            for line in (
                b"bad header",
                b"a b: c",
                b"a : b",
                b": b",
                b" a: b",
                b"\xe9: x",
                b"a\x00: x",
            )
        ),
        *(
            GET + b"a: " + value + b"\r\n\r\n"
            for value in (b"\x00", b"a\x00b", b"\x01", b"\x7f", b"a\rb", b"a\nb", b"a\r\n b")
        ),
        GET + b"host: y\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nconnection: close\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\nhost: x\r\nhost: y\r\n\r\n",
        GET + b"\n" + SECOND,
        b"GET /v1/models HTTP/1.1\nhost: x\n\n",
        # request lines
        b"GET /v1/models\r\n\r\n",
        *(
            b"GET /v1/models " + what + b"\r\nhost: x\r\n\r\n"
            for what in (b"HTTP/0.9", b"HTTP/1.2", b"HTTP/2.0", b"RTSP/1.0")
        ),
        *(
            b"GET /v1/models " + what + b"\r\nhost: x\r\n\r\n"
            for what in (b"http/1.1", b"HTTP/1.1 ", b"HTTP/11", b" HTTP/1.1")
        ),
        *(
            b"GET " + what + b" HTTP/1.1\r\nhost: x\r\n\r\n"
            for what in (b"/a b", b"/\xe9", b"/\0", b"/\x7f", b"x", b"", b" /")
        ),
        *(
            what + b" / HTTP/1.1\r\nhost: x\r\n\r\n"
            for what in (b"get", b"GE T", b"G\x00T", b"FROB", b"DESCRIBE", b"A" * 40)
        ),
        b"GET\t/v1/models HTTP/1.1\r\nhost: x\r\n\r\n",
        b"SOURCE / ICE/1.0\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n" + SECOND,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
}
"""What the protocol itself refuses, before anything else sees it, by the code of its error."""


@pytest.mark.parametrize(
    ("code", "request_bytes"), [(code, each) for code in REFUSED for each in REFUSED[code]]
)
def test_what_is_refused(server: RunningServer, code: str, request_bytes: bytes) -> None:
    answer = say(server, request_bytes)
    assert num_answers(answer) == 1 and answer.split(b" ", 2)[1][:1] == b"4", answer[:200]
    head, _, body = answer.partition(b"\r\n\r\n")
    error, end = json.JSONDecoder().raw_decode(body.decode())
    assert set(error["error"]) == {"message", "type", "param", "code"} and end == len(body)
    assert error["error"]["code"] == code
    assert b"connection: close" in head
    assert b" 200 OK" in say(server, GET + b"\r\n")


@pytest.mark.slow
def test_what_is_refused_by_others(server: RunningServer, hasty: RunningServer) -> None:
    """A length that can be read is too large for the route,
    and a head that does not end is waited for."""
    answer = say(server, with_length(b" 9223372036854775808"), end=b"}}")
    assert num_answers(answer) == 1 and b'"request_too_large"' in answer
    answer = say(hasty, b"GET /v1/models HTTP/1.1\r\nhost: x\n\r\n")
    assert num_answers(answer) == 1 and b'"header_timeout"' in answer


def num_answers(answer: bytes) -> int:
    """How many there are."""
    return len(re.findall(rb"HTTP/1\.1 [1-5]", answer))


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (GET + b"a: b \t \r\n\r\n", 200),
        (GET + b"empty:\r\nobs: \xff\r\n\r\n", 200),
        (b"\r\n\r\n" + GET + b"\r\n", 200),
        (b"GET /v1/models HTTP/1.0\r\n\r\n", 200),
        (b"GET /v1/models HTTP/1.0\r\nconnection: keep-alive\r\n\r\n", 200),
        (b"GET http://x/v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 404),
        (b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 404),
        (b"DELETE /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n", 405),
        (POST + b'content-length: 20 \r\n\r\n{"prompt":"x","n":1}', 200),
        (CHUNKED + b'14\r\n{"prompt":"x","n":1}\r\n0\r\n\r\n', 200),
        (
            CHUNKED + b'a;x="y";z\r\n{"prompt":\r\n000a\r\n"x","n":1}\r\n0\r\ntrailer: 1\r\n\r\n',
            200,
        ),
        (GET + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n", 200),
        (GET + b"expect: the-unexpected\r\n\r\n", 200),
    ],
)
def test_what_is_unusual_and_served(
    server: RunningServer, request_bytes: bytes, status: int
) -> None:
    answer = say(server, request_bytes)
    assert num_answers(answer) == 1 and int(answer.split(b" ", 2)[1]) == status, answer[:300]
    for cut in range(1, len(request_bytes), 7):
        pieces = say(server, request_bytes[:cut], request_bytes[cut:])
        assert int(pieces.split(b" ", 2)[1]) == status and num_answers(pieces) == 1, (
            cut,
            pieces[:300],
        )


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c", b"TLS/1.0"])
def test_another_protocol_is_not_taken_up_and_the_request_is_served(
    server: RunningServer, protocol: bytes
) -> None:
    """Also its body, which llhttp would take for the other protocol's:
    so some clients begin every connection."""
    ask = (
        b"connection: Upgrade, HTTP2-Settings\r\nUPGRADE: "
        + protocol
        + b"\r\nhttp2-settings: AA\r\n"
    )
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + ask + b"content-length: 14\r\n\r\n"
    answer = say(server, head + b'{"prompt":"x"}' + GET + ask + b"\r\n")
    assert answer.count(b"HTTP/1.1 200 OK") == num_answers(answer) == 2


def test_trailers_are_no_headers() -> None:
    """What a client appends to a body is told apart from what a proxy before us has checked."""
    with serve(FakeClient(), keys=key_ring([(Tenant("a"), ["sk-right-key"])])) as server:
        chunk = b'14\r\n{"prompt":"x","n":1}\r\n0\r\n'
        assert b" 401 " in say(
            server, CHUNKED + chunk + b"authorization: Bearer sk-right-key\r\n\r\n"
        )
        keyed = CHUNKED.replace(
            b"host: x\r\n", b"host: x\r\nauthorization: Bearer sk-right-key\r\n"
        )
        assert b" 200 " in say(
            server, keyed + chunk + b"x-request-id: mine\r\nx-api-key: other\r\n\r\n"
        )


@pytest.mark.parametrize("path", [b"/version", b"/v1/nothing"])
def test_head_is_answered_without_a_body(server: RunningServer, path: bytes) -> None:
    head, _, body = say(
        server, b"HEAD " + path + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    ).partition(b"\r\n\r\n")
    assert (
        b"content-length: " in head
        and b"content-length: 0" not in head
        and b"transfer-encoding" not in head
    )
    assert body == b"" and head.count(b"connection: close") == 1


def test_an_old_client_gets_a_stream_that_ends_with_the_connection(server: RunningServer) -> None:
    body = b'{"prompt":"x","stream":true}'
    head = (
        b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\nexpect: 100-continue\r\n\r\n"
        % len(body)
    )
    answer_head, _, events = say(server, head + body).partition(b"\r\n\r\n")
    assert (
        b" 200 " in answer_head
        and b"transfer-encoding" not in answer_head
        and b"connection: close" in answer_head
    )
    assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


def test_a_body_that_waits_to_be_asked_for_is_asked_for_once(server: RunningServer) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nexpect: 100-Continue\r\ncontent-length: 14\r\n\r\n"
    with connect(server) as connection:
        connection.sendall(head)
        assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b'{"prompt":')
        connection.sendall(b'"x"}')
        assert b"HTTP/1.1 200 OK" in connection.recv(65536)
    answer = say(
        server,
        head.replace(b"host: x\r\n", b"host: x\r\nconnection: close\r\n") + b'{"prompt":"x"}',
    )
    assert b" 100 " not in answer and b" 200 " in answer


def test_a_second_request_cannot_be_smuggled(server: RunningServer) -> None:
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\ntransfer-encoding: chunked\r\n\r\n"
        % (5 + len(SECOND))
    )
    answer = say(server, head + b"0\r\n\r\n" + SECOND)
    assert num_answers(answer) == 1 and b"process_" not in answer


def test_what_follows_a_chunked_body_at_once_is_left_for_another_connection(
    server: RunningServer,
) -> None:
    chunked = (
        CHUNKED.replace(b"connection: close\r\n", b"") + b'14\r\n{"prompt":"x","n":1}\r\n0\r\n\r\n'
    )
    answer = say(server, chunked + SECOND)
    assert num_answers(answer) == 1 and b" 200 " in answer and b"connection: close" in answer
    with connect(server) as connection:
        for request in (chunked, chunked, GET + b"\r\n"):
            connection.sendall(request)
            answer = hear(connection, b"}")
            assert num_answers(answer) == 1 and b" 200 " in answer


def test_slow_headers_and_bodies_are_given_up(hasty: RunningServer) -> None:
    for pieces in ([], [b"GET"]):
        assert b" 408 " in say(hasty, *pieces)
    answer = say(
        hasty,
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n",
        b"{",
        b'"',
    )
    assert b" 408 " in answer and b"connection: close" in answer


def test_a_line_now_and_then_gains_no_time(hasty: RunningServer) -> None:
    with connect(hasty) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")

        def is_answered() -> bool:
            with contextlib.suppress(OSError):
                connection.sendall(b"x: 1\r\n")
            return bool(select.select([connection], [], [], 0.05)[0])

        until(is_answered, 30)
        assert b" 408 " in hear(connection)


def test_connections_are_bounded() -> None:
    with serve(FakeClient(), ApiConfig(max_connections=20)) as server:
        connections = [connect(server) for _ in range(30)]
        assert all(b" 503 " in hear(connection) for connection in connections[20:])
        for connection in connections:
            connection.close()

        def is_served() -> bool:
            with contextlib.suppress(httpx.TransportError):  # refused before it has said all
                return httpx.get(f"{server.url}/livez").status_code == 200
            return False

        until(is_served)


def test_idle_connections_end(hasty: RunningServer) -> None:
    connections = [connect(hasty) for _ in range(30)]
    assert all(b" 408 " in hear(connection) for connection in connections)
    for connection in connections:
        connection.close()
    assert httpx.get(f"{hasty.url}/livez").status_code == 200


def test_pipelined_requests_are_answered_in_order(server: RunningServer) -> None:
    first = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = say(server, 100 * first + GET + b"\r\n")
    assert answer.count(b"HTTP/1.1 200") == 101
    assert answer.index(b'"version"') < answer.index(b'"object":"list"')


def test_more_than_can_be_kept_ahead_is_not_served_and_the_connection_ends(
    server: RunningServer,
) -> None:
    first = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = say(server, first * 20_000)
    assert 1 <= answer.count(b"HTTP/1.1 200") == num_answers(answer) < 20_000
    assert b" 200 OK" in say(server, GET + b"\r\n")


def test_what_is_wrong_with_the_next_request_does_not_harm_this_ones_answer(
    server: RunningServer,
) -> None:
    answer = say(server, b"GET /version HTTP/1.1\r\nhost: x\r\n\r\nnonsense\r\n\r\n")
    assert (
        answer.startswith(b"HTTP/1.1 200 ")
        and b"HTTP/1.1 400 " in answer
        and num_answers(answer) == 2
    )


def test_a_client_that_leaves_is_noticed_although_it_sent_more(server: RunningServer) -> None:
    """Reading goes on while something is held."""
    client = FakeClient(Script(begins=False))
    with serve(client) as slow:
        with connect(slow) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n"
                + b'{"prompt":"x"}'
                + SECOND
            )
            until(lambda: client.streams)
        until(lambda: client.num_aborted == 1)


def test_an_answer_is_not_held_back_for_the_clients_acknowledgement(server: RunningServer) -> None:
    """Nagle's algorithm would hold each answer on a connection that is used again for 40 ms,
    and each token of a stream."""
    with httpx.Client(base_url=server.url) as http:
        times_s = (http.get("/version").elapsed.total_seconds() for _ in range(500))
        assert any(time_s < 0.03 for number, time_s in enumerate(times_s) if number >= 20), (
            "each of them takes 40 ms longer"
        )


@pytest.mark.slow
def test_t13_thousands_of_idle_connections_cost_little_and_hold_nobody_up() -> None:
    """Each costs a few kilobytes for the seconds that it is granted;
    meanwhile others are served as always."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_idle = min(4000, (hard if hard != resource.RLIM_INFINITY else 1 << 20) // 2 - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * num_idle + 200), hard))
    with serve(FakeClient(), ApiConfig(header_timeout_s=60)) as server:
        before = resident_bytes(os.getpid())
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(num_idle)]
        try:
            with httpx.Client(base_url=server.url) as http:
                waits_s = sorted(http.get("/livez").elapsed.total_seconds() for _ in range(20))
            assert waits_s[10] < 0.3, "a millisecond on an idle machine"
            assert resident_bytes(os.getpid()) - before < num_idle * (24 << 10)
        finally:
            for connection in idle:
                connection.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
