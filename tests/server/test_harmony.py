"""Calls of gpt-oss under the three chat APIs, in one piece and streamed, and the chat that goes on
behind them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_client import FakeClient, Script
from servers import RunningServer, serve

from quire.config.api import ApiConfig
from quire.text.chat import ChatTemplate

ANSWER = (
    "<|channel|>analysis<|message|>Weather.<|end|><|start|>assistant<|channel|>commentary"
    "<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
    '<|constrain|>json<|message|>{"city": "Oslo"}'
)
PIECES = [ANSWER[place : place + 5] for place in range(0, len(ANSWER), 5)]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "parameters": SCHEMA}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    config = ApiConfig(tool_parser="harmony", reasoning_parser="harmony")
    with serve(FakeClient(Script(pieces=PIECES)), config) as running:
        yield running


def post(server: RunningServer, path: str, **body: Any) -> Any:
    response = httpx.post(f"{server.v1}/{path}", json={"model": "fake", **body}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json() if not body.get("stream") else events_of(response.text)


def events_of(text: str) -> list[Any]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_chat_completions(server: RunningServer) -> None:
    fields = {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}]}
    (choice,) = post(server, "chat/completions", **fields)["choices"]
    message = choice["message"]
    (call,) = message["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Weather.", "I look.")
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    chunks = post(server, "chat/completions", **fields, stream=True)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    parts = [part["function"] for delta in deltas for part in delta.get("tool_calls", ())]
    assert "".join(part.get("arguments", "") for part in parts) == '{"city": "Oslo"}'
    assert parts[0]["name"] == "weather" and len(parts) > 2
    assert "".join(delta.get("content") or "" for delta in deltas) == "I look."
    (silent,) = post(server, "chat/completions", messages=ASK)["choices"]
    assert silent["finish_reason"] == "stop" and "tool_calls" not in silent["message"]
    assert silent["message"]["content"].endswith('<|message|>{"city": "Oslo"}')


def test_responses(server: RunningServer) -> None:
    fields = {"input": "Weather?", "tools": [{"type": "function", **FUNCTION}]}
    output = post(server, "responses", **fields)["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert (output[2]["name"], output[2]["arguments"]) == ("weather", '{"city": "Oslo"}')
    assert output[2]["status"] == "completed"
    events = post(server, "responses", **fields, stream=True)
    kind = "response.function_call_arguments.delta"
    deltas = [event["delta"] for event in events if event["type"] == kind]
    assert "".join(deltas) == '{"city": "Oslo"}' and len(deltas) > 1


def test_messages(server: RunningServer) -> None:
    fields = {
        "messages": ASK,
        "max_tokens": 100,
        "tools": [{"name": "weather", "input_schema": SCHEMA}],
    }
    answer = post(server, "messages", **fields)
    assert answer["stop_reason"] == "tool_use"
    assert [block["type"] for block in answer["content"]] == ["thinking", "text", "tool_use"]
    assert answer["content"][2]["input"] == {"city": "Oslo"}
    events = post(server, "messages", **fields, stream=True)
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    parts = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
    assert "".join(parts) == '{"city": "Oslo"}'


def test_a_call_whose_arguments_are_no_object_is_given_as_it_is() -> None:
    broken = ANSWER.replace('"Oslo"}', "Oslo")
    config = ApiConfig(tool_parser="harmony", reasoning_parser="harmony")
    fields = {"messages": ASK, "tools": [{"type": "function", "function": FUNCTION}]}
    with serve(FakeClient(Script(pieces=[broken])), config) as server:
        (choice,) = post(server, "chat/completions", **fields)["choices"]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["arguments"] == '{"city": Oslo'
        assert choice["finish_reason"] == "stop"


def called(number: int) -> dict[str, Any]:
    function = {"name": f"f{number}", "arguments": {"n": number}}
    return {"id": f"call_{number}", "type": "function", "function": function}


def result(number: int) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": f"result {number}"}


def test_the_chat_goes_on_behind_calls_with_their_reasoning_and_all_results(shared: Path) -> None:
    path = shared / "data/tokenizers/llama_cpp_chat_templates/openai-gpt-oss-120b.jinja"
    template = ChatTemplate(path.read_text(), {})
    answer = {"role": "assistant", "content": "I look.", "reasoning_content": "Hm."}
    chat: list[dict[str, Any]] = [
        *ASK,
        {**answer, "tool_calls": [called(1), called(2)]},
        result(2),
        result(1),
    ]
    shown = template.render(template.needs.fit_messages(chat))
    turn = "<|start|>assistant"
    expected = f"{turn}<|channel|>analysis<|message|>Hm.\nI look.<|end|>"
    for number in (1, 2):
        expected += (
            f"{turn} to=functions.f{number}<|channel|>commentary json<|message|>"
            f'{{"n": {number}}}<|call|><|start|>functions.f{number} to=assistant'
            f'<|channel|>commentary<|message|>"result {number}"<|end|>'
        )
    assert shown.endswith(expected + turn)


def test_a_template_that_refuses_several_calls_is_given_one_in_each_message(shared: Path) -> None:
    path = (
        shared / "data/tokenizers/llama_cpp_chat_templates/meta-llama-Llama-3.1-8B-Instruct.jinja"
    )
    template = ChatTemplate(path.read_text(), {"bos_token": ""})
    calls = {"role": "assistant", "content": "", "tool_calls": [called(1), called(2)]}
    chat: list[dict[str, Any]] = [
        *ASK,
        calls,
        result(1),
        result(2),
        {"role": "user", "content": "And?"},
    ]
    shown = template.render(template.needs.fit_messages(chat))
    places = [shown.index(text) for text in ('"f1"', "result 1", '"f2"', "result 2", "And?")]
    assert places == sorted(places)
