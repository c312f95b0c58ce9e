"""The prefix cache over HTTP: filling, counting and clearing it, keeping prompts, events."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import serve_model

from quire.server.quota.tenants import Tenant, key_ring

PROMPT = "Once upon a time there was a little girl who had a big red ball. " * 4
BODY = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "timings": True}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    tenants = [
        (Tenant("operator", is_admin=True), ["key-admin-0001"]),
        (Tenant("a"), ["key-a-0001"]),
        (Tenant("b"), ["key-b-0001"]),
    ]
    with serve_model(keys=key_ring(tenants), kv_cache_memory="8MiB") as server:
        yield server.url


def as_(url: str, name: str) -> httpx.Client:
    headers = {"authorization": f"Bearer key-{name}-0001"}
    return httpx.Client(base_url=url, timeout=60, headers=headers)


def ask(client: httpx.Client, **fields: Any) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """(text, details of the prompt's tokens, why they were not all cached)."""
    answer = client.post("/v1/completions", json={**BODY, **fields})
    assert answer.status_code == 200, answer.text
    body = answer.json()
    (timings,) = body["timings"]
    details = body["usage"]["prompt_tokens_details"]
    return body["choices"][0]["text"], details, timings["prompt_cache_diagnostics"]


def follow(client: httpx.Client, **query: Any) -> dict[str, Any]:
    answer = client.get("/v1/kv_events", params=query)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_a_warmed_prompt_is_found_and_is_its_tenants_alone(url: str) -> None:
    with as_(url, "a") as a, as_(url, "b") as b, as_(url, "admin") as admin:
        warmed = a.post("/v1/cache/warm", json={"prompt": PROMPT, "ttl": "5m"}).json()
        assert warmed["cached_tokens"] == 0 and warmed["cache_write_tokens"] > 32
        cold_text, cold, why = ask(b)
        assert cold["cached_tokens"] == 0 and why["type"] == "cache_miss"
        assert why["reason"] == "new" and why["cache_missed_tokens"] == cold["cache_write_tokens"]
        text, details, why = ask(a)
        assert text == cold_text and why == {"type": "cache_hit"}
        assert details["cached_tokens"] >= warmed["cache_write_tokens"]
        _, _, why = ask(a, prompt=PROMPT[: len(PROMPT) // 2] + "And then came a dog. " * 8)
        assert why["reason"] == "differs" and why["evicted_tokens"] == 0
        shown = admin.get("/v1/cache").json()
        counts = {each["tenant"]: each for each in shown["tenants"]}
        assert counts["a"]["num_cached_tokens"] > counts["b"]["num_cached_tokens"] > 0
        assert counts["a"]["num_kept_blocks"] == shown["num_kept_blocks"] > 0
        assert counts["b"]["num_kept_blocks"] == 0
        cleared = admin.delete("/v1/cache", params={"tenant": "a"}).json()
        assert cleared["num_blocks"] > 0
        shown = admin.get("/v1/cache").json()
        assert [each["tenant"] for each in shown["tenants"]] == ["b"]
        assert shown["num_kept_blocks"] == 0
        assert ask(a)[1]["cached_tokens"] == 0
        assert ask(b)[1]["cached_tokens"] > 0
        again = a.post("/v1/cache/warm", json={"messages": [{"role": "user", "content": PROMPT}]})
        assert again.json()["cache_write_tokens"] > 0


def test_events_tell_what_is_cached_and_which_request_asked_for_it(url: str) -> None:
    with as_(url, "admin") as client:
        client.delete("/v1/cache")
        base = follow(client)
        assert base["is_snapshot"] and base["events"] == []
        place = {"log": base["log"], "since": base["last"]}
        waited = follow(client, **place, wait_ms=100)
        assert waited["events"] == [] and waited["last"] == base["last"]
        ask(client)
        batch = follow(client, **place, wait_ms=20_000, tokens=1)
        kinds = [each["type"] for each in batch["events"]]
        assert kinds[0] == "PromptBlocks" and "BlockStored" in kinds
        assert [each["seq"] for each in batch["events"]] == list(
            range(base["last"] + 1, batch["last"] + 1)
        )
        stored = [each for each in batch["events"] if each["type"] == "BlockStored"]
        hashes = [name for each in stored for name in each["block_hashes"]]
        assert stored[0]["parent_block_hash"] is None and stored[0]["lora_id"] is None
        size = batch["block_size"]
        assert all(len(each["token_ids"]) == size * len(each["block_hashes"]) for each in stored)
        prompt = batch["events"][0]
        assert set(prompt["block_hashes"]) <= set(hashes)
        assert len(prompt["block_hashes"]) == prompt["num_tokens"] // size
        snapshot = follow(client, log="another", since=batch["last"])
        assert snapshot["is_snapshot"]
        shown = {name for each in snapshot["events"] for name in each["block_hashes"]}
        assert shown == set(hashes)
        assert all(each["token_ids"] == [] for each in snapshot["events"])
        client.delete("/v1/cache")
        gone = follow(client, log=batch["log"], since=batch["last"])
        assert [each["type"] for each in gone["events"]] == ["AllBlocksCleared"]


def test_what_the_cache_holds_is_for_admin_keys(url: str) -> None:
    with as_(url, "a") as client:
        for method, path in (
            ("GET", "/v1/cache"), ("DELETE", "/v1/cache"), ("GET", "/v1/kv_events"),
        ):  # fmt: skip
            answer = client.request(method, path)
            assert answer.status_code == 403 and "admin" in answer.text
        answer = client.post("/v1/cache/warm", json={})
        assert answer.status_code == 400 and "messages or prompt" in answer.text
        answer = client.post("/v1/cache/warm", json={"prompt": "x", "ttl": "1y"})
        assert answer.status_code == 400 and "ttl" in answer.text
        assert client.get("/v1/kv_events?replica=3").status_code == 403
    with as_(url, "admin") as client:
        assert client.get("/v1/kv_events?replica=3").status_code == 404


def test_prompts_are_kept_by_the_words_of_both_apis(url: str) -> None:
    with as_(url, "admin") as client:

        def num_kept() -> int:
            return int(client.get("/v1/cache").json()["num_kept_blocks"])

        client.delete("/v1/cache")
        plain = ask(client, prompt_cache_retention="in_memory")
        assert num_kept() == 0
        kept = ask(client, prompt_cache_retention="24h")
        assert kept[0] == plain[0] and num_kept() > 0
        client.delete("/v1/cache")
        control = {"type": "ephemeral", "ttl": "1h"}
        block = {"type": "text", "text": PROMPT, "cache_control": control}
        message: dict[str, Any] = {
            "model": "quire-storyteller", "max_tokens": 2, "messages": [{"role": "user", "content": [block]}],
        }  # fmt: skip
        assert client.post("/v1/messages", json=message).status_code == 200
        assert num_kept() > 0
        control["ttl"] = "2h"
        answer = client.post("/v1/messages", json=message)
        assert answer.status_code == 400 and "cache_control.ttl" in answer.text
