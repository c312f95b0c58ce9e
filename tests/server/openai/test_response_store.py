"""What is kept of answers stays within its bounds, and no tenant's burst costs another everything."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fake_client import FakeClient
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import serve

from quire.config.api import ApiConfig
from quire.server.api.openai import response_store
from quire.server.api.openai.response_store import AskedInput, ResponseStore, StoredResponse
from quire.server.http.errors import ApiError
from quire.server.http.off_loop import SMALL

MAX_RESPONSES, MAX_BYTES = 5, 2000


def response(name: str, num_chars: int = 1) -> StoredResponse:
    return StoredResponse(
        {"id": name, "text": "x" * num_chars},
        AskedInput.of([{"id": "item"}], [{"role": "user"}]),
        [],
    )


WHAT = st.sampled_from(["put", "get", "delete"])
STEPS = st.lists(
    st.tuples(WHAT, st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 2500)),
    max_size=30,
)


@settings(deadline=None)
@given(STEPS)
def test_the_bounds_hold_and_what_is_held_is_what_is_counted(
    steps: list[tuple[str, str, str, int]],
) -> None:
    store = ResponseStore(MAX_RESPONSES, MAX_BYTES)
    for what, tenant, name, num_chars in steps:
        if what == "put":
            store.put(tenant, response(name, num_chars))
            if response(name, num_chars).num_bytes <= MAX_BYTES:
                assert store.get(tenant, name).body == {"id": name, "text": "x" * num_chars}
        else:
            try:
                store.get(tenant, name) if what == "get" else store.delete(tenant, name)
            except ApiError as error:
                assert error.status == 404
        assert len(store) <= MAX_RESPONSES and store.num_bytes <= MAX_BYTES
        assert store.num_bytes == sum(entry.num_bytes for entry in store._entries.values())


def test_whoever_holds_most_makes_room() -> None:
    store = ResponseStore(MAX_RESPONSES, 1 << 20)
    store.put("small", response("only"))
    for number in range(20):
        store.put("large", response(f"r{number}"))
    assert store.get("small", "only").input_items == [{"id": "item"}]
    assert len(store) == MAX_RESPONSES and store.get("large", "r19").messages == [{"role": "user"}]
    with pytest.raises(ApiError):
        store.get("large", "r1")


def test_a_client_cannot_choose_under_which_id_an_answer_is_kept() -> None:
    """The same id twice replaced an answer and left its size on the account,
    until nothing was kept any more, of anybody."""
    config = ApiConfig(max_stored_bytes=20_000)
    with serve(FakeClient(), config) as server, httpx.Client(base_url=server.url) as http:
        answers: list[dict[str, Any]] = []
        for _ in range(40):
            answer = http.post("/v1/responses", json={"input": "x", "request_id": "mine"})
            assert (
                answer.status_code == 200
                and answer.headers["x-quire-ignored-fields"] == "request_id"
            )
            answers.append(answer.json())
        assert len({answer["id"] for answer in answers}) == 40
        assert http.get(f"/v1/responses/{answers[-1]['id']}").json() == answers[-1]


def test_a_kept_answer_is_given_in_one_piece() -> None:
    """A client that asks for a stream would wait for events in what it gets."""
    with serve(FakeClient()) as server, httpx.Client(base_url=server.url) as http:
        answer = http.post("/v1/responses", json={"input": "x"}).json()
        path = f"/v1/responses/{answer['id']}"
        assert http.get(path, params={"stream": "false"}).json() == answer
        refused = http.get(path, params={"stream": "true"})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "stream"


def test_what_was_asked_is_listed_in_parts() -> None:
    messages = [{"role": "user", "content": f"part {number}"} for number in range(5)]
    with serve(FakeClient()) as server, httpx.Client(base_url=server.url) as http:
        answer = http.post("/v1/responses", json={"input": messages}).json()
        path = f"/v1/responses/{answer['id']}/input_items"
        whole = http.get(path, params={"order": "asc"}).json()
        texts = [item["content"][0]["text"] for item in whole["data"]]
        assert texts == [f"part {number}" for number in range(5)] and not whole["has_more"]
        first = http.get(path, params={"limit": 2}).json()
        assert [item["id"] for item in first["data"]] == [item["id"] for item in whole["data"]][
            :2:-1
        ] and first["has_more"]
        rest = http.get(path, params={"limit": 3, "after": first["last_id"]}).json()
        assert [item["id"] for item in rest["data"]] == [item["id"] for item in whole["data"]][
            2::-1
        ] and not rest["has_more"]
        assert http.get(path, params={"after": "msg_nowhere"}).status_code == 400


def test_what_is_large_is_written_and_read_beside_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where the request that needs it is small."""
    threads: dict[str, set[str]] = {"encode": set(), "decode": set()}

    def encode(value: Any) -> bytes:
        data = msgspec.json.encode(value)
        if len(data) > SMALL:
            threads["encode"].add(threading.current_thread().name)
        return data

    def decode(data: bytes) -> Any:
        if len(data) > SMALL:
            threads["decode"].add(threading.current_thread().name)
        return msgspec.json.decode(data)

    noting = SimpleNamespace(json=SimpleNamespace(encode=encode, decode=decode))
    monkeypatch.setattr(response_store, "msgspec", noting)
    long = {"input": "one two " * (SMALL // 4), "truncation": "auto"}
    with serve(FakeClient()) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        first = http.post("/v1/responses", json=long).json()["id"]
        again = {"input": "x", "truncation": "auto", "previous_response_id": first}
        further = http.post("/v1/responses", json=again).json()["id"]
        with http.stream("POST", "/v1/responses", json={**again, "stream": True}) as stream:
            assert "response.completed" in stream.read().decode()
        items = http.get(f"/v1/responses/{first}/input_items").json()["data"]
        assert items[0]["content"][0]["text"] == long["input"]
        assert http.get(f"/v1/responses/{further}").json()["previous_response_id"] == first
    both = {name.rpartition("_")[0] for each in threads.values() for name in each}
    assert both == {"quire-bodies"} and all(threads.values())
