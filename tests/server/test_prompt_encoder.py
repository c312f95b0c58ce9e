"""T20: what a body's size makes long is done beside the event loop."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx
import pytest
from fake_client import FakeClient
from servers import serve

from quire.server.api import prompt_encoder
from quire.server.api.anthropic import messages as anthropic_messages
from quire.server.api.openai import chat, responses
from quire.text.chat import ChatTemplate

SMALL: Any = {}
LARGE: Any = {"a": ["x"] * 20_000}
"""Of more bytes than are looked at where they are."""


def called_with(path: str, arguments: Any) -> dict[str, Any]:
    """A body with an earlier call, as each API has it."""
    function = {"name": "f", "arguments": json.dumps(arguments)}
    if path == "/v1/chat/completions":
        return {
            "messages": [{"role": "assistant", "tool_calls": [{"id": "a", "function": function}]}]
        }
    if path == "/v1/responses":
        return {"input": [{"type": "function_call", "call_id": "a", **function}]}
    call = {"type": "tool_use", "id": "a", "name": "f", "input": arguments}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}
    return {
        "model": "fake",
        "max_tokens": 2,
        "messages": [{"role": "assistant", "content": [call]}, result],
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_t20_large_bodies_are_digested_in_threads_of_their_own(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What holds the interpreter's lock in the one thread for that,
    what lets go of it in another."""
    places: list[str] = []

    def watched(owner: Any, name: str) -> None:
        plain = getattr(owner, name)

        def watch(*args: Any, **kwargs: Any) -> Any:
            places.append(threading.current_thread().name)
            return plain(*args, **kwargs)

        monkeypatch.setattr(owner, name, watch)

    for owner in (chat, responses):
        watched(owner, "for_template")
    watched(anthropic_messages, "messages_of")
    watched(prompt_encoder, "_num_chars")
    watched(ChatTemplate, "render")
    with serve(FakeClient()) as server:
        for arguments, expected in (
            (SMALL, ["test-server"] * 3),
            (LARGE, ["quire-bodies", "quire-bodies", "quire-text"]),
        ):
            places.clear()
            httpx.post(server.url + path, json=called_with(path, arguments), timeout=30)
            assert [name.partition("_")[0] for name in places[:3]] == expected
