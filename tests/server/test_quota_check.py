"""Who could not be served anyway is told before its body is looked at;
everything else is let through."""

from __future__ import annotations

import threading

import httpx
from fake_client import FakeClient, Script
from served import until
from servers import serve
from timing import timed

from quire.config.api import ApiConfig
from quire.server.http.quota_check import GENERATING_PATHS

pytestmark = timed

CHAT = {"messages": [{"role": "user", "content": "x"}], "stream": True}


def test_a_full_queue_refuses_before_the_body_is_read_and_lets_everything_else_pass() -> None:
    client = FakeClient(Script(begins=False))
    with (
        serve(client, ApiConfig(max_queued_requests=1)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        assert http.post("/v1/chat/completions", content=b"{").status_code == 400
        waiting = threading.Thread(
            target=lambda: httpx.post(f"{server.v1}/chat/completions", json=CHAT, timeout=60)
        )
        waiting.start()
        until(lambda: client.streams)
        for path in GENERATING_PATHS:
            refused = http.post(path, content=b"{")
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1, path
            assert refused.json()["error"]["code"] == "queue_full"
        assert http.post("/tokenize", content=b"{").status_code == 400
        assert http.get("/v1/models").status_code == 200
        client.script = Script()
        server.run(client.streams[0].aclose)
        server.server.should_exit = True
    waiting.join(30)
