"""T23 and T07 on a server in earnest: who leaves stops being computed for at once, in every phase;
and no tenant finds in the cache what another has put there.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, Script
from served import Served, frozen, until
from servers import serve
from timing import timed

from quire.core.grammars import Grammar
from quire.grammar.judge import judge

pytestmark = [timed, pytest.mark.slow]

COMPLETIONS = "/v1/completions"
LONG: dict[str, Any] = {
    "prompt": "Once upon a time",
    "max_tokens": 480,
    "n": 24,
    "ignore_eos": True,
}
"""As many steps as tokens and more, so that an end after a part of them is no natural one."""


def _send(served: Served, body: dict[str, Any]) -> socket.socket:
    """A request whose answer nobody has read yet."""
    content = json.dumps({**LONG, **body}).encode()
    key = served.headers["x-api-key"].encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: %s\r\ncontent-length: %d\r\n\r\n"
    )
    connection.sendall(head % (key, len(content)) + content)
    return connection


def _reset(connection: socket.socket) -> None:
    """Leave without a word: the other end sees a reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def _stops_at_once(served: Served, num_steps: float) -> None:
    """Nothing is left of those who left, and most of what they asked for was never computed:
    `num_steps` there were before."""
    for _ in range(2):
        served.await_idle()
        time.sleep(0.3)  # should the server not even have heard of it
    assert served.progress()["num_steps"] - num_steps < LONG["max_tokens"] / 2


def _before_anything(served: Served, leave: Callable[[socket.socket], None]) -> None:
    connection = _send(served, {"stream": True})
    leave(connection)


def _while_it_streams(served: Served, leave: Callable[[socket.socket], None]) -> None:
    connection = _send(served, {"stream": True})
    assert b"200" in connection.recv(400)
    leave(connection)


def _without_a_stream(served: Served, leave: Callable[[socket.socket], None]) -> None:
    connection = _send(served, {})
    until(lambda: served.progress()["num_running"] > 0)
    leave(connection)


def _while_it_waits(served: Served, leave: Callable[[socket.socket], None]) -> None:
    """More sequences than rows: some of them wait."""
    connections = [_send(served, {"stream": True, "n": 128}) for _ in range(4)]
    until(lambda: served.progress()["num_waiting"] > 0)
    for connection in connections:
        leave(connection)


def _with_a_full_pipe(served: Served, leave: Callable[[socket.socket], None]) -> None:
    connection = _send(served, {"stream": True, "n": 32, "logprobs": 5})
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    until(lambda: served.progress()["num_running"] > 20)
    leave(connection)


def _with_its_body_half_sent(served: Served, leave: Callable[[socket.socket], None]) -> None:
    key = served.headers["x-api-key"].encode()
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=60)
    connection.sendall(
        b'POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: %s\r\ncontent-length: 100\r\n\r\n{"prompt"'
        % key
    )
    leave(connection)


def _while_the_engine_is_frozen(served: Served, leave: Callable[[socket.socket], None]) -> None:
    with frozen(served.engine_pid):
        connection = _send(served, {"stream": True})
        until(lambda: served.progress()["num_requests"] > 0)
        leave(connection)
        until(lambda: served.progress()["num_requests"] == 0)
    served.await_ready()


PHASES: dict[str, Callable[[Served, Callable[[socket.socket], None]], None]] = {
    "before anything": _before_anything,
    "while it streams": _while_it_streams,
    "without a stream": _without_a_stream,
    "while it waits": _while_it_waits,
    "with a full pipe": _with_a_full_pipe,
    "with its body half sent": _with_its_body_half_sent,
    "while the engine is frozen": _while_the_engine_is_frozen,
}


@pytest.mark.parametrize("leave", [socket.socket.close, _reset], ids=["close", "reset"])
@pytest.mark.parametrize("phase", PHASES)
def test_t23_who_leaves_is_not_computed_for(
    served: Served, phase: str, leave: Callable[[socket.socket], None]
) -> None:
    served.await_idle()
    num_steps = served.progress()["num_steps"]
    PHASES[phase](served, leave)
    _stops_at_once(served, num_steps)


def test_t23_who_leaves_while_a_grammar_is_awaited_is_aborted_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    is_asked, may_go_on = threading.Event(), threading.Event()

    async def check(grammar: Grammar) -> None:
        is_asked.set()
        while not may_go_on.is_set():
            await asyncio.sleep(0.005)

    monkeypatch.setattr(judge, "check_async", check)
    client = FakeClient(Script(begins=False))
    body = b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}}'
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(
        body
    )
    with serve(client) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
            connection.sendall(head + body)
            assert is_asked.wait(60)
        may_go_on.set()
        until(lambda: client.num_aborted)
        assert (client.num_aborted, client.streams) == (1, [])


def test_t23_a_reader_of_a_byte_at_a_time_gets_all_of_it_and_holds_nobody_up(
    served: Served,
) -> None:
    slow = _send(served, {"stream": True, "max_tokens": 40, "n": 1})
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    received = bytearray(slow.recv(1))
    with served.client() as http:
        assert http.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 5}).status_code == 200
    while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        received += slow.recv(1)
    slow.close()
    served.await_idle()


def _cached(served: Served, key: str, **fields: Any) -> int:
    body = {
        "prompt": "A tale that only one of them knows, of a fox and a crow and a cheese, and more.",
        "max_tokens": 1,
        **fields,
    }
    with httpx.Client(base_url=served.url, headers={"x-api-key": key}, timeout=60) as http:
        usage = http.post(COMPLETIONS, json=body).json()["usage"]
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return cached


def test_t07_a_tenant_finds_in_the_cache_only_what_is_its_own(served: Served) -> None:
    """Nor does a salt of the body's own make a way from one to the other."""
    first, second = "sk-key-of-first", "sk-key-of-second"
    assert _cached(served, first) == 0
    warm = _cached(served, first)
    assert warm > 10
    assert _cached(served, second) == 0
    assert _cached(served, second) == warm
    assert _cached(served, first, cache_salt="mine") == 0
    assert _cached(served, second, cache_salt="mine") == 0
    assert _cached(served, first, cache_salt="mine") == warm
    for guess in ("first", "5:first", "second"):
        assert _cached(served, second, cache_salt=guess) == 0
