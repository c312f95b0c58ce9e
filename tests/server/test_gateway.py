"""The door: T05 (nothing without a key), T10 (numbers at their ends), T16 (no leaks)."""

from __future__ import annotations

import json
import logging
import random
import socket
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, Script
from servers import routes_of, serve
from timing import timed

from quire.common.json_logs import JsonFormatter
from quire.config.api import ApiConfig
from quire.errors import UnavailableError
from quire.server.app import build_app
from quire.server.quota.tenants import Tenant, key_ring

pytestmark = timed

KEYS = key_ring([(Tenant("a"), ["sk-right-key"])])
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")
CHAT = "/v1/chat/completions"


def raw(port: int, request: bytes) -> bytes:
    """What the server says to these very bytes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while chunk := connection.recv(65536):
            answer += chunk
        return answer


def test_t05_every_route_and_spelling_needs_a_key() -> None:
    config = ApiConfig()
    paths = {route.path for route in routes_of(build_app(config, FakeClient(), KEYS))}
    assert {
        "/livez",
        "/readyz",
        CHAT,
        "/metrics",
        "/tokenize",
        "/inspect/steps",
        "/openapi.json",
    } <= paths
    public = {
        "/livez",
        "/readyz",
        "/ping",
        "/",
        "/dashboard",
        *(path for path in paths if path.startswith("/page/")),
    }
    odd = {
        "/livez/",
        "//livez",
        "/livez/../metrics",
        "/%6civez",
        "/livez%00",
        "/livez;x",
        "/./livez",
        "/LIVEZ",
        "/livez%2f..%2fmetrics",
        "/page/",
        "/page/../metrics",
        "/page/%2e%2e/metrics",
        "//",
        "/dashboard/",
        "/inspect",
        "/readyz/x",
        "//v1/models",
        "/v1//models",
        "/%76%31/models",
        "*",
        "http://x/livez",
        "/livez#/metrics",
    }
    with serve(FakeClient(), config, KEYS) as server:
        for path in sorted(paths | odd):
            for method in METHODS:
                is_public = path in public and method in ("GET", "HEAD")
                hosts = ("x", "localhost", "livez", "a@b", "") if method == "GET" else ("x",)
                for host in hosts:
                    line = (
                        f"{method} {path.replace('{', '').replace('}', '').replace(':path', '')} "
                        "HTTP/1.1\r\n"
                    )
                    answer = raw(
                        server.port, f"{line}host: {host}\r\nconnection: close\r\n\r\n".encode()
                    )
                    status = int(answer.split(b" ", 2)[1])
                    assert status == (200 if is_public else 401) or (
                        not is_public and status == 400
                    ), (line, host, answer)


@pytest.mark.parametrize(
    "key", ["sk-right-ke", "sk-right-keyy", "sk-wrong-key", "\xe9" * 20, "a" * 5000]
)
def test_t05_wrong_keys_are_all_answered_alike(key: str) -> None:
    with serve(FakeClient(), keys=KEYS) as server:
        answer = httpx.get(
            f"{server.v1}/models", headers={b"authorization": f"Bearer {key}".encode("latin-1")}
        )
        assert (answer.status_code, answer.json()["error"]["message"]) == (
            401,
            "a valid API key is needed",
        )


NUMBERS = [
    0,
    -1,
    1,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    -(2**63) - 1,
    10**30,
    1e308,
    -1e308,
    1e-320,
    0.5,
]
FIELDS = (
    "n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p",
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed",
    "logprobs", "top_logprobs", "prompt_logprobs", "truncate_prompt_tokens", "priority",
)  # fmt: skip


@pytest.mark.slow
def test_t10_every_number_is_bounded_or_refused() -> None:
    """Singly and in random pairs; nothing larger than the context ever reaches the engine."""
    client = FakeClient(Script(pieces=("x",)))
    rng = random.Random(0)
    bodies: list[dict[str, Any]] = [{name: value} for name in FIELDS for value in NUMBERS]
    pairs = [(rng.sample(FIELDS, 2), rng.sample(NUMBERS, 2)) for _ in range(60)]
    bodies += [dict(zip(names, values, strict=True)) for names, values in pairs]
    with serve(client) as server, httpx.Client(base_url=server.url) as http:
        for number, body in enumerate(bodies):
            chat = {"messages": [{"role": "user", "content": "x"}]}
            path, base = (CHAT, chat) if number % 2 else ("/v1/completions", {"prompt": "x"})
            response = http.post(path, content=json.dumps({**base, **body}))
            assert response.status_code in (200, 400), (body, response.text)
            assert len(response.content) < 100_000
    for request in client.requests:
        assert request.params.max_tokens is not None and request.params.max_tokens <= 512
        assert request.params.num_sequences <= 128


def test_t10_one_request_cannot_ask_for_thousands_of_sequences() -> None:
    with serve(FakeClient()) as server:
        for body in ({"prompt": ["a"] * 513}, {"prompt": ["a"] * 100, "n": 100}):
            response = httpx.post(f"{server.v1}/completions", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")


def test_t16_neither_errors_nor_logs_hold_texts_keys_or_paths(
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret = "the-secret-text"
    caplog.set_level(logging.INFO)
    client = FakeClient(Script(raises=ValueError(f"{secret} /root/x.py 0x7f00")))
    with serve(client, keys=KEYS) as server:
        key = {"authorization": "Bearer sk-right-key"}
        chat = {"messages": [{"role": "user", "content": secret}]}
        answers = [
            httpx.post(server.url + CHAT, json=chat, headers=key),
            httpx.post(server.url + CHAT, json={**chat, "stream": True}, headers=key),
            httpx.post(
                server.url + CHAT, json={**chat, "messages": [{"role": secret}]}, headers=key
            ),
            httpx.post(server.url + CHAT, content=secret, headers=key),
            httpx.get(f"{server.url}/{secret}", headers=key),
            httpx.get(server.url + CHAT, headers={"authorization": f"Bearer {secret}"}),
        ]
    assert [answer.status_code for answer in answers] == [500, 500, 400, 400, 404, 401]
    formatter = JsonFormatter()
    lines = [
        formatter.format(record) for record in caplog.records if record.name.startswith("quire")
    ]
    assert any(json.loads(line).get("status") == 500 for line in lines)
    for text in (*lines, *(answer.text for answer in answers)):
        for leak in (secret, "sk-right-key", "Traceback", "/root", "0x7f", ".py"):
            assert leak not in text


@pytest.mark.parametrize(
    ("error", "num_failures"),
    [(UnavailableError("going down", state="draining"), 0), (ValueError("a bug"), 1)],
)
def test_a_refusal_is_not_logged_as_a_failure(
    caplog: pytest.LogCaptureFixture, error: Exception, num_failures: int
) -> None:
    with serve(FakeClient(Script(raises=error))) as server:
        answer = httpx.post(
            server.url + CHAT, json={"messages": [{"role": "user", "content": "x"}]}
        )
    assert answer.status_code >= 500
    assert sum(record.levelno >= logging.ERROR for record in caplog.records) == num_failures


def test_t04_nothing_is_ever_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    urls = (
        "http://127.0.0.1:9/x",
        "file:///etc/passwd",
        "http://[::ffff:7f00:1]/",
        "data:image/png;base64,AAAA",
    )
    with serve(FakeClient()) as server, httpx.Client(base_url=server.url) as http:
        http.get("/livez")
        connects: list[object] = []
        monkeypatch.setattr(
            socket.socket, "connect", lambda self, address: connects.append(address)
        )
        for url in urls:
            part = {"type": "image_url", "image_url": {"url": url}}
            response = http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
            assert response.status_code == 400
        assert connects == []


def test_readiness_follows_the_engine() -> None:
    client = FakeClient()
    with serve(client) as server:
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        client.state = "stalled"
        for path in ("/readyz", "/health"):
            answer = httpx.get(server.url + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "stalled")
            assert answer.headers["retry-after"]
        assert httpx.get(f"{server.url}/livez").status_code == 200
        assert httpx.get(f"{server.url}/healthz/progress").json()["state"] == "stalled"
        assert httpx.get(f"{server.url}/version").json()["version"]
        assert httpx.get(f"{server.url}/load").json() == {"server_load": 0}
