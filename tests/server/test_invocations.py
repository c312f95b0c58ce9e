"""SageMaker's two paths are the others' under other names."""

from __future__ import annotations

import httpx
import pytest
from servers import RunningServer

CHAT = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 4, "seed": 3}
PROMPT = {"prompt": "Once upon a time", "max_tokens": 4, "seed": 3}


def test_the_body_decides(server: RunningServer, http: httpx.Client) -> None:
    assert http.get("/ping").status_code == 200
    for path, body in (("/v1/chat/completions", CHAT), ("/v1/completions", PROMPT)):
        one, two = http.post(path, json=body).json(), http.post("/invocations", json=body).json()
        assert two["object"] == one["object"]
        assert two["usage"]["total_tokens"] == one["usage"]["total_tokens"]
        for answer in (one, two):
            answer.pop("id"), answer.pop("created"), answer.pop("timings", None)
        assert one["choices"] == two["choices"]
    with http.stream("POST", "/invocations", json={**PROMPT, "stream": True}) as response:
        assert [line for line in response.iter_lines() if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("body", [b"[]", b"{", b"{}", b'{"prompt": "a", "messages": []}'])
def test_a_body_for_nothing_or_for_two_is_refused(http: httpx.Client, body: bytes) -> None:
    assert http.post("/invocations", content=body).status_code == 400
