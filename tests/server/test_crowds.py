"""Thousands of connections at once, of all kinds: memory stays bounded, everybody is answered,
/livez at once."""

from __future__ import annotations

import asyncio
import json
import resource
import time

import pytest
from served import Served, resident_bytes, serving
from timing import timed

pytestmark = [timed, pytest.mark.slow]

NUM_EACH = 2000
LIVE = b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
BODY = b'{"prompt": "a", "max_tokens": 1}'
ASK = (
    b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (
        len(BODY),
        BODY,
    )
)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def test_thousands_of_connections_that_idle_dawdle_or_ask() -> None:
    """2,000 that are kept alive, 2,000 that never end their request,
    and 2,000 requests at once on the former."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * NUM_EACH + 200
    if hard != resource.RLIM_INFINITY and hard < 2 * wanted:
        pytest.skip("this machine lets nobody open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        with serving("--header-timeout-s", "300", "--queue-timeout-s", "300") as served:
            served.await_ready()
            asyncio.run(asyncio.wait_for(_crowd(served), 240))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _crowd(served: Served) -> None:
    pid = served.process.pid
    watcher = await _connect(served)
    await _answer(watcher, LIVE)
    before = resident_bytes(pid)
    kept = [await _connect(served) for _ in range(NUM_EACH)]
    for connection in kept:
        await _answer(connection, LIVE)
    slow = [await _connect(served) for _ in range(NUM_EACH)]
    for _, writer in slow:
        writer.write(ASK[:-5])
    waits_s = [await _timed_livez(watcher) for _ in range(20)]
    assert sorted(waits_s)[10] < 0.3, "a millisecond on an idle machine"
    assert resident_bytes(pid) - before < 2 * NUM_EACH * (24 << 10)
    asking = asyncio.gather(*(_answer(connection, ASK) for connection in kept))
    while not asking.done():
        waits_s.append(await _timed_livez(watcher))
        await asyncio.sleep(0.02)
    answers = await asking
    assert len(answers) == NUM_EACH and all(
        answer["usage"]["completion_tokens"] == 1 for answer in answers
    )
    assert max(waits_s) < 2.0, "while 2,000 requests are read, prepared and answered"
    assert resident_bytes(pid) - before < 2 * NUM_EACH * (24 << 10) + NUM_EACH * (32 << 10)
    for _, writer in (watcher, *kept, *slow):
        writer.close()


async def _connect(served: Served) -> Connection:
    return await asyncio.open_connection("127.0.0.1", served.port)


async def _timed_livez(connection: Connection) -> float:
    began_s = time.monotonic()
    await _answer(connection, LIVE)
    return time.monotonic() - began_s


async def _answer(connection: Connection, request: bytes) -> dict[str, dict[str, int]]:
    """The body of a good answer."""
    reader, writer = connection
    writer.write(request)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    assert b" 200 " in head.split(b"\r\n")[0], body
    answer: dict[str, dict[str, int]] = json.loads(body)
    return answer
