"""Streamed chats say which of their characters were drafted, where a request wants to know."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from servers import RunningServer, serve_model

QUESTION = {
    "messages": [{"role": "user", "content": "Tell me a story about a brave knight."}],
    "temperature": 0.0, "max_tokens": 80, "ignore_eos": True, "stream": True,
    "stream_options": {"include_usage": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def drafting() -> Iterator[RunningServer]:
    with serve_model(speculative_config={"method": "suffix"}, kv_cache_memory="8MiB") as running:
        yield running


def _chunks(server: RunningServer, **more: Any) -> list[dict[str, Any]]:
    answer = httpx.post(f"{server.v1}/chat/completions", json=QUESTION | more, timeout=60)
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    return [json.loads(event) for event in events]


def _told(chunks: list[dict[str, Any]]) -> tuple[str, str]:
    """The text, and what of it was drafted."""
    text = drafted = ""
    for chunk in chunks:
        for choice in chunk["choices"]:
            piece = choice["delta"].get("content") or ""
            text += piece
            runs = choice.get("draft_runs") or []
            assert all(0 <= first < end <= len(piece) for first, end in runs)
            drafted += "".join(piece[first:end] for first, end in runs)
    return text, drafted


@pytest.mark.slow
def test_runs_are_told_when_they_are_wanted(drafting: RunningServer) -> None:
    for _ in range(20):  # an answer that is given again is drafted, once drafting has been tried
        chunks = _chunks(drafting, draft_runs=True)
        details = chunks[-1]["usage"]["completion_tokens_details"]
        text, drafted = _told(chunks)
        assert bool(drafted) <= bool(details["accepted_prediction_tokens"])
        if drafted:
            break
    assert 0 < len(drafted) < len(text)
    plain = _chunks(drafting)
    assert _told(plain) == (text, "")
    assert not any("draft_runs" in choice for chunk in plain for choice in chunk["choices"])
