"""Sleeping and other weights over HTTP: for admin keys, with requests that wait, are refused, or go
on."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path

import httpx
import pytest
from batching import begin, client_of, results, wait
from safetensors.torch import load_file, save_file
from servers import serve_model

from quire.common.pages import CAN_DISCARD
from quire.config.api import ApiConfig
from quire.server.quota.tenants import Tenant, key_ring
from quire.weights.folder import resolve_model

pytestmark = pytest.mark.skipif(not CAN_DISCARD, reason="this system does not take pages back")

BODY = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
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


@pytest.mark.slow
def test_lines_of_a_batch_wait_or_are_sent_again_after_a_long_sleep(tmp_path: Path) -> None:
    timeout_s = 5.0
    limits = ApiConfig(data_folder=str(tmp_path), request_timeout_s=timeout_s, max_batch_lines=4)
    with serve_model(limits) as server, client_of(server) as client:
        bodies = [{**BODY, "prompt": f"Once upon a time {number}"} for number in range(24)]

        def answered(body: dict[str, object]) -> str:
            answer = httpx.post(f"{server.v1}/completions", json=body, timeout=60).json()
            return str(answer["choices"][0]["text"])

        expected = {f"r{number}": answered(body) for number, body in enumerate(bodies)}
        url = "/v1/completions"
        text = "\n".join(
            json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})
            for name, body in zip(expected, bodies, strict=True)
        )
        batch = begin(client, text, url)
        wait(client, batch.id, "in_progress")
        httpx.post(f"{server.url}/sleep", timeout=60)
        time.sleep(timeout_s + 0.5)
        httpx.post(f"{server.url}/wake_up", timeout=60)
        ended = wait(client, batch.id, "completed")
        assert ended.error_file_id is None
        found = results(client, ended.output_file_id)
        assert expected == {
            name: each["response"]["body"]["choices"][0]["text"] for name, each in found.items()
        }


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


def other_weights(folder: Path) -> None:
    """Write the shipped model with weaker weights."""
    shutil.copytree(resolve_model("quire-storyteller"), folder)
    for path in folder.glob("*.safetensors"):
        tensors = {name: tensor * 0.5 for name, tensor in load_file(path).items()}
        path.chmod(0o644)
        save_file(tensors, path, {"format": "pt"})


def test_answers_are_of_the_weights_that_they_name(tmp_path: Path) -> None:
    other_weights(tmp_path / "allowed" / "step-1")
    other_weights(tmp_path / "outside")
    (tmp_path / "allowed" / "link").symlink_to(tmp_path / "outside")
    body = {**BODY, "max_tokens": 20, "timings": True}
    config = ApiConfig(weights_folder=str(tmp_path / "allowed"))
    with serve_model(config) as server, httpx.Client(base_url=server.url, timeout=60) as client:

        def answer() -> tuple[str, str, str]:
            given = client.post("/v1/completions", json=body)
            answered = given.json()
            return (
                answered["choices"][0]["text"],
                given.headers["x-quire-weight-version"],
                answered["system_fingerprint"],
            )

        former = answer()
        assert former[1] == "0" == client.get("/weight_version").json()["weight_version"]
        update = {"folder": "step-1", "version": "step-1", "requests": "finish"}
        assert client.post("/update_weights", json=update).json() == {"weight_version": "step-1"}
        later = answer()
        assert later[1] == "step-1" == client.get("/weight_version").json()["weight_version"]
        assert later[0] != former[0] and later[2] != former[2]
        for folder in ("../outside", "link", "absent", str(tmp_path / "outside"), "\0"):
            refused = client.post("/update_weights", json={"folder": folder})
            assert refused.status_code == 400, folder
            assert str(tmp_path / "allowed") not in refused.text
        (tmp_path / "allowed" / "step-2").mkdir()
        (tmp_path / "allowed" / "step-2" / "config.json").write_text("{}")
        broken = client.post("/update_weights", json={"folder": "step-2"})
        assert broken.status_code == 400 and broken.json()["error"]["code"] == "invalid_weights"
        assert str(tmp_path) not in broken.text
        assert client.post("/update_weights", json={**update, "version": "a b"}).status_code == 400
        assert answer() == later


def test_weights_are_taken_where_the_operator_named_a_folder() -> None:
    with serve_model() as server:
        refused = httpx.post(f"{server.url}/update_weights", json={"folder": "x"})
        assert refused.status_code == 403 and "--weights-folder" in refused.text
