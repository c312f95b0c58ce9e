"""The Responses API with the official client."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from fake_client import FakeClient, Script
from servers import MODEL, serve

from quire.config.api import ApiConfig
from quire.server.errors import ApiError
from quire.server.openai.response_store import ResponseStore, StoredResponse

TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    }
]


def ask(client: openai.OpenAI, text: Any = "Tell me of a cat.", **fields: Any) -> Any:
    return client.responses.create(model=MODEL, input=text, **{"max_output_tokens": 4, **fields})


def test_an_answer(client: openai.OpenAI) -> None:
    answer = ask(client, temperature=0)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text and answer.usage.output_tokens == 4
    assert answer.usage.total_tokens == answer.usage.input_tokens + 4
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Tell me of a cat."}]}]
    assert ask(client, items, temperature=0).output_text == answer.output_text


def test_an_answer_is_continued_kept_and_forgotten(client: openai.OpenAI) -> None:
    first = ask(client)
    second = ask(client, "And of a dog.", previous_response_id=first.id, instructions="Be brief.")
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(first.id).output_text == first.output_text
    (item,) = client.responses.input_items.list(first.id).data
    assert item.type == "message"
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, previous_response_id=first.id)
    assert caught.value.param == "previous_response_id"


def test_an_answer_that_is_not_to_be_stored_is_not(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ask(client, store=False).id)


def test_a_stream(client: openai.OpenAI) -> None:
    whole = ask(client, temperature=0)
    with client.responses.stream(
        model=MODEL, input="Tell me of a cat.", max_output_tokens=4, temperature=0, store=True
    ) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-1] == "response.incomplete"
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == whole.output_text
    last: Any = events[-1]
    assert client.responses.retrieve(last.response.id).output_text == text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "bad name"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "strict": "x"}]}, "tools[0].strict"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {"not": {}}, "strict": True}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"tools": TOOLS, "top_logprobs": 1}, "top_logprobs"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "["}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, "input[0].content"),
        ({"background": True}, "background"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"temperature": 3}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": []}, "input"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, extra_body=fields)
    assert caught.value.param == param


def call(client: openai.OpenAI, **fields: Any) -> Any:
    return ask(client, "How is the weather?", **{"max_output_tokens": 200, "tools": TOOLS, "tool_choice": "required", **fields})


def test_56_57_58_59_calls_and_what_follows_them(client: openai.OpenAI) -> None:
    first = call(client, parallel_tool_calls=False)
    (item,) = first.output
    assert (item.type, item.status, item.name) == ("function_call", "completed", "weather") and not first.output_text
    assert json.loads(item.arguments)["city"] in ("Oslo", "Rome")
    assert first.tools[0].name == "weather" and first.status == "completed"
    outputs: list[Any] = [{"type": "function_call_output", "call_id": item.call_id, "output": "Sun"}]
    second = ask(client, outputs, previous_response_id=first.id, temperature=0)
    said: Any = [{"role": "user", "content": "How is the weather?"}, item.model_dump(), *outputs]
    assert ask(client, said, temperature=0).output_text == second.output_text != ""
    kinds = [each.type for each in client.responses.input_items.list(second.id).data]
    assert kinds == ["function_call_output"]
    named = call(client, tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=True)
    assert [each.name for each in named.output] == ["weather"]
    allowed: Any = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    assert {each.type for each in call(client, tool_choice=allowed, max_output_tokens=40).output} == {"function_call"}
    assert {each.type for each in call(client, tool_choice="none", max_output_tokens=4).output} == {"message"}


def test_74_a_stream_of_a_call(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"parallel_tool_calls": False, "extra_body": {"seed": 3}, "temperature": 1}
    whole = call(client, **fields).output[0]
    with client.responses.stream(
        model=MODEL, input="How is the weather?", tools=TOOLS, tool_choice="required", max_output_tokens=200, **fields
    ) as stream:
        events = list(stream)
        final: Any = stream.get_final_response().output[0]
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert len(deltas) > 1 and "".join(deltas) == done.arguments == whole.arguments == final.arguments
    assert final.parsed_arguments is None or final.parsed_arguments == json.loads(whole.arguments)
    assert [event.type for event in events][-2:] == ["response.output_item.done", "response.completed"]


def test_a_call_that_is_cut_is_incomplete_and_the_conversation_goes_on(client: openai.OpenAI) -> None:
    cut = call(client, max_output_tokens=12)
    assert cut.status == cut.output[-1].status == "incomplete"
    assert ask(client, "Go on", previous_response_id=cut.id).output_text


PIECES = ["<think>\nHm", "m</think>\n", "\nYes", '<tool_call>{"name": "weather", "arg', 'uments": {"a": 1}}', "</tool_call>"]


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    config = ApiConfig(reasoning_parser="think")
    with serve(FakeClient(Script(pieces=PIECES)), config) as server, openai.OpenAI(base_url=server.v1, api_key="x") as client:
        whole = client.responses.create(model="fake", input="x", tools=TOOLS)
        thoughts, message, called = whole.output
        assert thoughts.type == "reasoning" and thoughts.content and thoughts.content[0].text == "Hmm"
        assert message.type == "message" and whole.output_text == "Yes"
        assert called.type == "function_call" and (called.name, called.arguments) == ("weather", '{"a": 1}')
        events = list(client.responses.create(model="fake", input="x", tools=TOOLS, stream=True))
        last: Any = events[-1]
        assert [(each.type, each.status) for each in last.response.output] == [
            (each.type, "completed") for each in whole.output
        ]
        assert "".join(event.delta for event in events if event.type == "response.reasoning_text.delta") == "Hmm"
        assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Yes"
        added = [event.output_index for event in events if event.type == "response.output_item.added"]
        assert added == [0, 1, 2]
        again = client.responses.create(model="fake", input=[*whole.output, {"role": "user", "content": "x"}])  # type: ignore[list-item]
        assert again.usage is not None and again.usage.input_tokens > 0
        assert client.responses.create(model="fake", input="y", previous_response_id=whole.id).output_text


def test_an_answer_of_nothing_is_an_empty_message_without_deltas() -> None:
    with serve(FakeClient(Script(pieces=()))) as server, openai.OpenAI(base_url=server.v1, api_key="x") as client:
        assert [each.type for each in client.responses.create(model="fake", input="x").output] == ["message"]
        kinds = [event.type for event in client.responses.create(model="fake", input="x", stream=True)]
        assert "response.output_text.delta" not in kinds
        assert kinds[-4:] == [
            "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
        ]  # fmt: skip


def test_the_store_is_bounded_and_each_tenants_own() -> None:
    store = ResponseStore(2, 10_000)
    for name in ("a", "b", "c"):
        store.put("x", StoredResponse({"id": name}, [], []))
    assert len(store) == 2
    assert store.get("x", "c").body == {"id": "c"}
    for tenant, name in (("x", "a"), ("y", "c")):
        with pytest.raises(ApiError):
            store.get(tenant, name)
    store.put("x", StoredResponse({"id": "large"}, [{"text": "x" * 20_000}], []))
    assert len(store) == 2
    store.put("x", StoredResponse({"id": "most"}, [{"text": "x" * 9_960}], []))
    assert len(store) == 1
