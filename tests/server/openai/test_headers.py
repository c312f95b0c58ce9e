"""OpenAI behaviours 17 to 26: headers, and the list of models."""

from __future__ import annotations

import httpx
import openai
import pytest
from fake_client import FakeClient
from servers import MODEL, RunningServer, serve

from quire.config.api import ApiConfig
from quire.server.quota.tenants import Tenant, key_ring

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_17_every_answer_has_a_request_id(client: openai.OpenAI, http: httpx.Client) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=1)  # type: ignore[arg-type]
    assert answer._request_id and answer._request_id.startswith("req_")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("none")
    assert caught.value.request_id
    body = {"messages": MESSAGES, "max_tokens": 1, "stream": True}
    for response in (
        http.post("/v1/chat/completions", json=body),
        http.get("/nowhere"),
        http.get("/livez"),
    ):
        assert response.headers["x-request-id"]


@pytest.mark.parametrize("name", ["x-request-id", "X-Client-Request-Id"])
@pytest.mark.parametrize(
    ("value", "is_echoed"),
    [
        ("abc-1_2.3:4", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a b", False),
        ("a\tb", False),
        ("<script>", False),
    ],
)
def test_18_a_clients_request_id_is_echoed_only_if_it_is_safe(
    http: httpx.Client, name: str, value: str, is_echoed: bool
) -> None:
    assert (
        http.get("/v1/models", headers={name: value}).headers["x-request-id"] == value
    ) is is_echoed


def test_19_20_content_types(http: httpx.Client) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["openai-processing-ms"]) >= 0
    stream = http.post("/v1/chat/completions", json={**body, "stream": True})
    assert stream.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert stream.headers["cache-control"] == "no-cache"
    assert stream.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("authorization", "Bearer sk-right-key")], 200),
        ([("authorization", "bearer sk-right-key")], 200),
        ([("AUTHORIZATION", "BEARER   sk-right-key")], 200),
        ([("x-api-key", "sk-right-key")], 200),
        ([], 401),
        ([("authorization", "sk-right-key")], 401),
        ([("authorization", "Basic sk-right-key")], 401),
        ([("authorization", "Bearer sk-right-key"), ("authorization", "Bearer sk-right-key")], 401),
        ([("authorization", "Bearer sk-right-key"), ("x-api-key", "sk-right-key")], 401),
    ],
)
def test_22_exactly_one_key(headers: list[tuple[str, str]], status: int) -> None:
    with serve(FakeClient(), keys=key_ring([(Tenant("a"), ["sk-right-key"])])) as server:
        assert httpx.get(f"{server.v1}/models", headers=headers).status_code == status


def test_23_models_are_listed(client: openai.OpenAI) -> None:
    models = client.models.list()
    assert models.object == "list"
    (model,) = models.data
    assert (model.id, model.object) == (MODEL, "model")
    assert isinstance(model.created, int) and model.owned_by


def test_24_26_ids_with_slashes_and_aliases() -> None:
    config = ApiConfig(served_model_name=("org/model, alias",))
    with (
        serve(FakeClient(), config) as server,
        openai.OpenAI(base_url=server.v1, api_key="x") as client,
    ):
        assert [model.id for model in client.models.list()] == ["org/model", "alias"]
        assert client.models.retrieve("org/model").id == "org/model"
        for name in ("org/model", "alias"):
            assert client.chat.completions.create(model=name, messages=MESSAGES).model == name  # type: ignore[arg-type]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="fake", messages=MESSAGES)  # type: ignore[arg-type]


def test_25_an_unknown_model_is_404(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_90_connections_are_used_again_and_bodies_may_be_announced(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        assert http.post("/v1/completions", content=b"{").status_code == 400
        pool = http._transport._pool  # type: ignore[attr-defined]
        before = list(pool.connections)
        response = http.post(
            "/v1/completions",
            json={"prompt": "a", "max_tokens": 1},
            headers={"expect": "100-continue"},
        )
        assert response.status_code == 200
        assert list(pool.connections) == before
        response = http.post(
            "/v1/completions", content=b"\x1f\x8b", headers={"content-encoding": "gzip"}
        )
        assert response.status_code == 415


def test_91_root_path_head_and_no_cors() -> None:
    with serve(FakeClient(), ApiConfig(root_path="/llm")) as server:
        assert httpx.get(f"{server.url}/llm/v1/models").status_code == 200
        assert httpx.get(f"{server.v1}/models").status_code == 200
        assert httpx.get(f"{server.url}/llmv1/models").status_code == 404
        assert httpx.head(f"{server.v1}/models").status_code == 200
        answer = httpx.get(f"{server.v1}/models", headers={"origin": "https://example.org"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
