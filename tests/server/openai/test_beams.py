"""Beam search over HTTP: vLLM's `use_beam_search`."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from served import Served
from servers import MODEL

from quire import LLM, BeamSearchParams

PROMPT = "Once upon a time there was a"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": 12, "use_beam_search": True, **fields}


def test_the_choices_are_the_best_beams_in_their_order(http: httpx.Client, served: Served) -> None:
    """In the server's process and in one of its own."""
    given = {"n": 3, "length_penalty": 0.5, "early_stopping": "never"}
    with LLM(MODEL, kv_cache_memory="16MiB", num_threads=1) as llm:
        params = BeamSearchParams(3, 12, length_penalty=0.5, early_stopping="never")
        [expected] = llm.beam_search(PROMPT, params)
    answer = http.post("/v1/completions", json=body(**given, temperature=1.0, seed=3))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [(each["index"], each["text"], each["finish_reason"]) for each in found["choices"]] == [
        (place, each.text, each.finish_reason) for place, each in enumerate(expected.sequences)
    ]
    num_tokens = sum(len(each.token_ids) for each in expected.sequences)
    assert found["usage"]["completion_tokens"] == num_tokens
    headers = {"authorization": "Bearer sk-key-of-first"}
    apart = httpx.post(
        f"{served.url}/v1/completions", json=body(**given), headers=headers, timeout=60
    ).json()
    assert [each["text"] for each in apart["choices"]] == [each.text for each in expected.sequences]


def test_chats_have_beams(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    given = {"model": MODEL, "messages": messages, "max_tokens": 8, "use_beam_search": True, "n": 2}
    answer = http.post("/v1/chat/completions", json=given)
    assert answer.status_code == 200, answer.text
    texts = [each["message"]["content"] for each in answer.json()["choices"]]
    assert len(set(texts)) == 2 and "x-quire-ignored-fields" not in answer.headers
    alone = http.post("/v1/chat/completions", json={**given, "n": 1, "length_penalty": 1.0})
    assert len(alone.json()["choices"]) == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"stream": True}, "use_beam_search"), ({"logprobs": 1}, "logprobs"),
        ({"top_p": 0.5}, "top_p"), ({"stop": ["x"]}, "stop"), ({"best_of": 2}, "best_of"),
        ({"length_penalty": 11}, "length_penalty"), ({"early_stopping": "soon"}, "early_stopping"),
        ({"use_beam_search": "yes"}, "use_beam_search"), ({"n": 129}, "n"),
        ({"stop_token_ids": [*range(3, 20)]}, "stop_token_ids"),
        ({"guided_regex": "a"}, "structured_outputs"),
    ],
)  # fmt: skip
def test_what_beams_cannot_have_is_refused_by_name(
    http: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    answer = http.post("/v1/completions", json=body(**fields))
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_rules_of_beams_alone_are_ignored_by_name(http: httpx.Client) -> None:
    given = body(use_beam_search=False, length_penalty=0.5, early_stopping=True)
    answer = http.post("/v1/completions", json=given)
    assert answer.status_code == 200, answer.text
    ignored = answer.headers["x-quire-ignored-fields"]
    assert "length_penalty" in ignored and "early_stopping" in ignored
