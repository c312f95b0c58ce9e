"""The clients of a server: every request is sent once, every event timed,
and a failure is not taken for a fast answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from timing import timed

from benchmarks import serving
from quire.bench.workload import BenchRequest, random_workload

ASKED: list[dict[str, Any]] = []
FAILING, TEXTLESS = 999, 998
"""First token ids of prompts that are answered in these ways."""


class Handler(BaseHTTPRequestHandler):
    """Streams one event a token, the first after 50 ms."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ASKED.append(body)
        bad = len(body["prompt"]) == 1
        self.send_response(400 if bad else 200)
        self.end_headers()
        if bad:
            self.wfile.write(b"too short")
            return
        time.sleep(0.05)
        for number in range(body["max_tokens"]):
            event: dict[str, Any] = {"choices": [{"text": str(number)}]}
            if body["prompt"][0] == FAILING:
                event = {"error": "gone"}
            elif body["prompt"][0] == TEXTLESS:
                event = {"choices": [{"text": "", "token_ids": [number]}]}
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b'data: {"choices": [], "usage": {}}\n\ndata: [DONE]\n\n')

    def log_message(self, *_: object) -> None:
        """Quiet."""


@pytest.fixture
def url() -> Iterator[str]:
    ASKED.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@timed
def test_every_request_is_sent_once_and_timed(url: str) -> None:
    requests = random_workload(5, (4, 9), (2, 5)).requests(0, 900)
    result = serving.run_clients(url, "m", requests, 2)
    assert sorted(body["prompt"] for body in ASKED) == sorted(each.token_ids for each in requests)
    assert result["num_events"] == sum(each.num_output for each in requests)
    assert result["ttft_s"]["p50"] >= 0.05 and result["itl_s"]["p50"] < result["ttft_s"]["p50"]
    assert result["wall_s"] >= 3 * 0.05  # five requests, two at a time
    assert all(body["stream"] and body["ignore_eos"] and body["temperature"] == 0 for body in ASKED)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [([5], "400\\): too short"), ([FAILING, 5], 'stream_error\\): "gone"')],
)
def test_failures_are_no_measurement(url: str, token_ids: list[int], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        serving.run_clients(url, "m", [BenchRequest(token_ids, 2)], 1)


def test_tokens_without_a_text_are_timed_by_their_ids(url: str) -> None:
    requests = [BenchRequest([TEXTLESS, 5], 4)]
    assert serving.run_clients(url, "m", requests, 1)["num_events"] == 4
