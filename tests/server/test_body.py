"""Fields within fields: what nobody knows is reported by its path,
on every route and at any depth."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from servers import MODEL, serve_model

from quire.config.api import ApiConfig
from quire.server.api.openai.chat import ChatRequest
from quire.server.api.systemone import SystemOneRequest
from quire.server.http.body import decode
from quire.server.http.errors import ApiError

FUNCTION = {
    "name": "f",
    "description": "d",
    "parameters": {"type": "object", "anything": 1},
    "strict": False,
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 2,
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "3"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "f"}},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": False},
    },
    "stream_options": {"include_usage": True},
    "stream": True,
    "metadata": {"any": "thing"},
    "chat_template_kwargs": {"anything": 1},
}
RESPONSE: dict[str, Any] = {
    "model": MODEL,
    "max_output_tokens": 2,
    "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {
            "type": "function_call",
            "id": "fc_1",
            "call_id": "c",
            "name": "f",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c", "output": "3"},
        {
            "type": "message",
            "id": "m",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "a", "annotations": []}],
        },
        {"role": "user", "content": "And?"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}}},
    "metadata": {"any": "thing"},
}
MESSAGE: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 2,
    "system": [{"type": "text", "text": "Be nice.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}],
        },
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"any": 1}}],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "t",
                    "content": [{"type": "text", "text": "3"}],
                }
            ],
        },
    ],
    "tools": [
        {"name": "f", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}
    ],
    "tool_choice": {"type": "tool", "name": "f"},
    "output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}},
}
COMPLETION: dict[str, Any] = {
    "model": MODEL,
    "prompt": "Once",
    "max_tokens": 2,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}},
    },
}
TOKENIZE = {"messages": CHAT["messages"], "tools": CHAT["tools"]}
DECISION: dict[str, Any] = {
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
    "questions": [
        {"type": "predicate", "instructions": [{"type": "input_text", "text": "Is it?"}]},
        {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]},
        {"type": "score", "instructions": "How?", "levels": [{"label": "a"}, {"label": "b"}]},
    ],
}
ROUTES: list[tuple[str, dict[str, Any], set[str]]] = [
    (
        "/v1/chat/completions",
        CHAT,
        {"parameters", "schema", "metadata", "chat_template_kwargs", "arguments"},
    ),
    ("/v1/completions", COMPLETION, {"schema"}),
    ("/v1/responses", RESPONSE, {"parameters", "schema", "metadata"}),
    ("/v1/messages", MESSAGE, {"input_schema", "schema", "input"}),
    (
        "/v1/messages/count_tokens",
        {k: v for k, v in MESSAGE.items() if k != "max_tokens"},
        {"input_schema", "schema", "input"},
    ),
    ("/tokenize", TOKENIZE, {"parameters"}),
    ("/v1/decisions", DECISION, set()),
]


def _objects(value: Any, free: set[str], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    """All objects whose fields are declared, with the paths of what they hold."""
    if isinstance(value, list):
        return [
            each
            for number, item in enumerate(value)
            for each in _objects(item, free, f"{path[:-1]}[{number}].")
        ]
    if not isinstance(value, dict):
        return []
    inner = [
        each
        for name, item in value.items()
        if name not in free
        for each in _objects(item, free, f"{path}{name}.")
    ]
    return [(path, value), *inner]


@pytest.mark.parametrize(("route", "body", "free"), ROUTES, ids=[route for route, _, _ in ROUTES])
def test_what_nobody_knows_is_reported_wherever_it_stands(
    http: httpx.Client, route: str, body: dict[str, Any], free: set[str]
) -> None:
    """And what is known is not, nor what is the client's own."""
    assert "x-quire-ignored-fields" not in _posted(http, route, body).headers
    changed = json.loads(json.dumps(body))
    expected = []
    for path, fields in _objects(changed, free):
        fields["odd"] = 1
        expected.append(f"{path}odd")
    assert len(expected) > 2
    names = _posted(http, route, changed).headers["x-quire-ignored-fields"].split(", ")
    assert sorted(names) == sorted(expected)


def _posted(http: httpx.Client, route: str, body: dict[str, Any]) -> httpx.Response:
    answer = http.post(route, json=body)
    assert answer.status_code == 200, answer.text
    return answer


def test_where_unknown_fields_are_refused_so_are_those_within_fields() -> None:
    with (
        serve_model(ApiConfig(strict_fields=True)) as strict,
        httpx.Client(base_url=strict.url, timeout=60) as http,
    ):
        body = {"model": MODEL, "prompt": "Once", "max_tokens": 1}
        odd = {"type": "json_object", "odd": 1}
        answer = http.post("/v1/completions", json={**body, "response_format": odd})
        assert (
            answer.status_code == 400 and answer.json()["error"]["param"] == "response_format.odd"
        )
        assert http.post("/v1/completions", json=body).status_code == 200


def test_a_schema_beside_json_object_is_kept_as_in_llama_cpp(http: httpx.Client) -> None:
    form = {"type": "json_object", "schema": {"enum": ["yes", "no"]}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "response_format": form}
    answer = http.post("/v1/chat/completions", json=body).json()
    assert json.loads(answer["choices"][0]["message"]["content"]) in ("yes", "no")


def test_unknown_fields_of_named_records_are_reported_by_the_names() -> None:
    asked = {"type": "noul", "instructions": "a", "critera": {}, "criteria": {"true": "b", "no": 1}}
    body = json.dumps({"state": {"any": "thing"}, "questions": {"q": asked}}).encode()
    assert decode(body, SystemOneRequest)[1] == ["questions.q.critera", "questions.q.criteria.no"]


def test_many_unknown_fields_are_counted_and_cost_little() -> None:
    messages = [
        {"role": "user", "content": "Hi", **{f"x{number}": 1 for number in range(50)}}
        for _ in range(400)
    ]
    _, unknown = decode(json.dumps({"messages": messages}).encode(), ChatRequest)
    assert len(unknown) == 64 and unknown[0] == "messages[0].x0"


@pytest.mark.parametrize("others", ["", ', "unknown": 1'])
def test_bytes_that_are_no_text_are_refused_wherever_they_are(others: str) -> None:
    """The decoder looks at names that it skips only where it is asked for all of them."""
    body = b'{"messages": [{"role": "user", "conte\xce": "x"}]' + others.encode() + b"}"
    with pytest.raises(ApiError) as caught:
        decode(body, ChatRequest)
    assert caught.value.status == 400 and caught.value.code == "invalid_json"
