"""Sleeping over HTTP: for admin keys, with requests that wait, are refused, or go on."""

from __future__ import annotations

import json
import threading

import httpx
import pytest
from servers import serve_model

from quire.common.pages import CAN_DISCARD
from quire.config.api import ApiConfig
from quire.server.quota.tenants import Tenant, key_ring

pytestmark = pytest.mark.skipif(not CAN_DISCARD, reason="this system does not take pages back")

BODY = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


def test_a_stream_goes_on_after_waking_and_others_wait() -> None:
    with serve_model() as server, httpx.Client(base_url=server.url, timeout=60) as client:
        expected = client.post("/v1/completions", json=BODY).json()["choices"][0]["text"]
        pieces, begun, slept = list[str](), threading.Event(), threading.Event()

        def read() -> None:
            with client.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        pieces.append(json.loads(line[6:])["choices"][0]["text"])
                        begun.set()
                        slept.wait(60)

        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(60)
        for level in (1, 2):
            assert client.post(f"/sleep?level={level}").json() == {"is_sleeping": True}
            assert client.get("/is_sleeping").json() == {"is_sleeping": True}
            ready = client.get("/readyz")
            assert ready.status_code == 503 and "sleeping" in ready.text
            assert client.post("/wake_up?tags=weights").json() == {"is_sleeping": True}
            assert client.post("/wake_up").json() == {"is_sleeping": False}
        client.post("/sleep")
        slept.set()
        late = list[httpx.Response]()
        waiter = threading.Thread(
            target=lambda: late.append(client.post("/v1/completions", json=BODY))
        )
        waiter.start()
        waiter.join(0.1)
        assert waiter.is_alive()
        client.post("/wake_up?tags=weights,kv_cache")
        for thread in (reader, waiter):
            thread.join(60)
        assert "".join(pieces) == expected == late[0].json()["choices"][0]["text"]


def test_requests_are_refused_where_the_operator_wants_that() -> None:
    with serve_model(when_asleep="refuse") as server:
        httpx.post(f"{server.url}/sleep")
        refused = httpx.post(f"{server.v1}/completions", json=BODY)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "sleeping"
        assert int(refused.headers["retry-after"]) > 0
        httpx.post(f"{server.url}/wake_up")
        assert httpx.post(f"{server.v1}/completions", json=BODY).status_code == 200


def test_wrong_levels_tags_and_keys_are_refused() -> None:
    keys = key_ring(
        [(Tenant("boss", is_admin=True), ["top-secret"]), (Tenant("user"), ["low-secret"])]
    )
    with serve_model(ApiConfig(), keys) as server:

        def post(path: str, key: str = "top-secret") -> httpx.Response:
            return httpx.post(f"{server.url}{path}", headers={"x-api-key": key})

        for path in ("/sleep?level=3", "/sleep?level=x", "/wake_up?tags=weight", "/wake_up?tags=,"):
            assert post(path).status_code == 400, path
        for path in ("/sleep", "/wake_up"):
            assert post(path, "low-secret").status_code == 403
        assert (
            httpx.get(f"{server.url}/is_sleeping", headers={"x-api-key": "low-secret"}).status_code
            == 403
        )
        assert post("/sleep?level=2").status_code == 200
