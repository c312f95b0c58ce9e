"""The Responses API with the official client."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from servers import MODEL

from quire.server.errors import ApiError
from quire.server.openai.response_store import ResponseStore, StoredResponse


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
        ({"tools": [{"type": "web_search"}]}, "tools"),
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
