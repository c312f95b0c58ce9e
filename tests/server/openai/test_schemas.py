"""Answers validated against OpenAI's own schemas."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from referencing import Registry
from referencing.jsonschema import DRAFT202012

CAT = [{"role": "user", "content": "Tell me of a cat."}]


@cache
def registry(path: Path) -> Registry[Any]:
    """The document, under a name that references can be made to."""
    document = _with_nulls(json.loads(gzip.decompress(path.read_bytes())))
    registered: Registry[Any] = Registry().with_resource("urn:openai", DRAFT202012.create_resource(document))
    return registered


def _with_nulls(node: Any) -> Any:
    """The document still says `nullable`, as OpenAPI 3.0 did; JSON Schema knows only types."""
    if isinstance(node, list):
        return [_with_nulls(each) for each in node]
    if not isinstance(node, dict):
        return node
    node = {key: _with_nulls(value) for key, value in node.items()}
    return {"anyOf": [node, {"type": "null"}]} if node.get("nullable") is True else node


@pytest.fixture
def check(shared: Path) -> Any:
    """`check(body, name)` validates against a component of OpenAI's document."""
    documents = registry(shared / "data/conformance/openai_extended.json.gz")

    def validate(body: Any, name: str) -> None:
        schema = {"$ref": f"urn:openai#/components/schemas/{name}"}
        jsonschema.Draft202012Validator(schema, registry=documents).validate(body)

    return validate


@pytest.mark.parametrize("fields", [{}, {"n": 2, "logprobs": True, "top_logprobs": 2}, {"service_tier": "auto"}])
def test_chat_completions(http: httpx.Client, check: Any, fields: dict[str, Any]) -> None:
    body = {"messages": CAT, "max_tokens": 3, **fields}
    check(http.post("/v1/chat/completions", json=body).json(), "CreateChatCompletionResponse")
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for block in http.post("/v1/chat/completions", json=stream).text.split("\n\n")[:-2]:
        check(json.loads(block.removeprefix("data: ")), "CreateChatCompletionStreamResponse")


def test_completions(http: httpx.Client, check: Any) -> None:
    body = {"prompt": "Once upon", "max_tokens": 3, "logprobs": 2, "n": 2}
    check(http.post("/v1/completions", json=body).json(), "CreateCompletionResponse")


def test_models(http: httpx.Client, check: Any) -> None:
    check(http.get("/v1/models").json(), "ListModelsResponse")


def test_errors(http: httpx.Client, check: Any) -> None:
    for response in (http.get("/v1/none"), http.post("/v1/completions", content=b"{")):
        check(response.json(), "ErrorResponse")


TOOLS = [{"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_logprobs": 2},
        {"instructions": "Be brief.", "metadata": {"a": "b"}},
        {"tools": TOOLS, "tool_choice": "required", "max_output_tokens": 60, "temperature": 1, "seed": 1},
    ],
)
def test_responses(http: httpx.Client, check: Any, fields: dict[str, Any]) -> None:
    body = {"input": "Hello", "max_output_tokens": 3, **fields}
    check(http.post("/v1/responses", json=body).json(), "Response")
    for block in http.post("/v1/responses", json={**body, "stream": True}).text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        check(event, "ResponseStreamEvent")
