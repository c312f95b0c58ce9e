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
from fake_client import FakeClient
from referencing import Registry
from referencing.jsonschema import DRAFT202012
from served import until
from servers import serve

from quire.config.api import ApiConfig

CAT = [{"role": "user", "content": "Tell me of a cat."}]


@cache
def registry(path: Path) -> Registry[Any]:
    """The document, under a name that references can be made to."""
    document = _with_nulls(json.loads(gzip.decompress(path.read_bytes())))
    registered: Registry[Any] = Registry().with_resource(
        "urn:openai", DRAFT202012.create_resource(document)
    )
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


@pytest.mark.parametrize(
    "fields", [{}, {"n": 2, "logprobs": True, "top_logprobs": 2}, {"service_tier": "auto"}]
)
def test_chat_completions(http: httpx.Client, check: Any, fields: dict[str, Any]) -> None:
    body = {"messages": CAT, "max_tokens": 3, **fields}
    check(http.post("/v1/chat/completions", json=body).json(), "CreateChatCompletionResponse")
    stream = {**body, "stream": True, "stream_options": {"include_usage": True}}
    for block in http.post("/v1/chat/completions", json=stream).text.split("\n\n")[:-2]:
        check(json.loads(block.removeprefix("data: ")), "CreateChatCompletionStreamResponse")


def test_completions(http: httpx.Client, check: Any) -> None:
    body = {"prompt": "Once upon", "max_tokens": 3, "logprobs": 2, "n": 2}
    check(http.post("/v1/completions", json=body).json(), "CreateCompletionResponse")


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 2, "n": 2}, {"stream_options": {"include_usage": True}}]
)
def test_streams_of_completions(http: httpx.Client, check: Any, fields: dict[str, Any]) -> None:
    body = {"prompt": "Once upon", "max_tokens": 3, "stream": True, **fields}
    blocks = http.post("/v1/completions", json=body).text.split("\n\n")[:-2]
    assert len(blocks) > 2
    for block in blocks:
        chunk = json.loads(block.removeprefix("data: "))
        for choice in chunk["choices"]:  # OpenAI's document describes the last chunk alone
            choice["finish_reason"] = choice["finish_reason"] or "length"
        if chunk.get("usage", 0) is None:
            del chunk["usage"]
        check(chunk, "CreateCompletionResponse")


NOTHING = {"type": "object", "properties": {}}
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": NOTHING, "strict": True}}
]


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": CHAT_TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"enum": [1]}, "strict": True},
            }
        },
    ],
)
def test_calls_and_forms_of_chats(http: httpx.Client, check: Any, fields: dict[str, Any]) -> None:
    body = {"messages": CAT, "max_tokens": 60, "seed": 1, **fields}
    answer = http.post("/v1/chat/completions", json=body).json()
    check(answer, "CreateChatCompletionResponse")
    message = answer["choices"][0]["message"]
    assert message.get("tool_calls") or message["content"] == "1"
    for block in http.post("/v1/chat/completions", json={**body, "stream": True}).text.split(
        "\n\n"
    )[:-2]:
        check(json.loads(block.removeprefix("data: ")), "CreateChatCompletionStreamResponse")


def test_files_and_batches(check: Any, tmp_path: Path) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5]}}
    config = ApiConfig(data_folder=str(tmp_path))
    with serve(FakeClient(), config) as server, httpx.Client(base_url=server.v1) as http:
        file = http.post(
            "/files", files={"file": ("a.jsonl", json.dumps(line))}, data={"purpose": "batch"}
        ).json()
        check(file, "OpenAIFile")
        check(http.get("/files").json(), "ListFilesResponse")
        wish = {
            "input_file_id": file["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
            "metadata": {"a": "b"},
        }
        batch = http.post("/batches", json=wish).json()
        check(batch, "Batch")
        until(lambda: http.get(f"/batches/{batch['id']}").json()["status"] == "completed")
        check(http.get(f"/batches/{batch['id']}").json(), "Batch")
        check(http.get("/batches").json(), "ListBatchesResponse")
        failed = http.post("/batches", json={**wish, "endpoint": "/v1/chat/completions"}).json()
        until(lambda: http.get(f"/batches/{failed['id']}").json()["status"] == "failed")
        check(http.get(f"/batches/{failed['id']}").json(), "Batch")


def test_models(http: httpx.Client, check: Any) -> None:
    models = http.get("/v1/models").json()
    check(models, "ListModelsResponse")
    check(http.get(f"/v1/models/{models['data'][0]['id']}").json(), "Model")


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
        {
            "tools": TOOLS,
            "tool_choice": "required",
            "max_output_tokens": 60,
            "temperature": 1,
            "seed": 1,
        },
    ],
)
def test_responses(http: httpx.Client, check: Any, fields: dict[str, Any]) -> None:
    body = {"input": "Hello", "max_output_tokens": 3, **fields}
    answer = http.post("/v1/responses", json=body).json()
    check(answer, "Response")
    check(http.get(f"/v1/responses/{answer['id']}").json(), "Response")
    for block in http.post("/v1/responses", json={**body, "stream": True}).text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        check(event, "ResponseStreamEvent")
