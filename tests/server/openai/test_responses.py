"""The Responses API with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import httpx
import openai
import pytest
from fake_client import FakeClient, Script
from servers import MODEL, RunningServer, serve

from quire.config.api import ApiConfig
from quire.server.api.openai.response_store import AskedInput, ResponseStore, StoredResponse
from quire.server.http.errors import ApiError
from quire.server.quota.tenants import KeyRing, Tenant, key_ring

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
    assert [event.sequence_number for event in events] == sorted(
        {event.sequence_number for event in events}
    )
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
        (
            {
                "tools": [
                    {"type": "function", "name": "f", "parameters": {"not": {}}, "strict": True}
                ]
            },
            "tools[0].parameters",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "top_logprobs": 1}, "top_logprobs"),
        (
            {"input": [{"type": "function_call", "call_id": "x", "name": "f", "arguments": "["}]},
            "input[0].arguments",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]},
            "input[0].name",
        ),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, "input[0].content"),
        ({"background": True}, "background"),
        ({"include": ["reasoning.encrypted_content", "everything"]}, "include"),
        ({"input": [{"type": "reasoning", "encrypted_content": 5}]}, "input[0].encrypted_content"),
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
    return ask(
        client,
        "How is the weather?",
        **{"max_output_tokens": 200, "tools": TOOLS, "tool_choice": "required", **fields},
    )


def test_56_57_58_59_calls_and_what_follows_them(client: openai.OpenAI) -> None:
    first = call(client, parallel_tool_calls=False)
    (item,) = first.output
    assert (item.type, item.status, item.name) == (
        "function_call",
        "completed",
        "weather",
    ) and not first.output_text
    assert json.loads(item.arguments)["city"] in ("Oslo", "Rome")
    assert first.tools[0].name == "weather" and first.status == "completed"
    outputs: list[Any] = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "Sun"}
    ]
    second = ask(client, outputs, previous_response_id=first.id, temperature=0)
    said: Any = [{"role": "user", "content": "How is the weather?"}, item.model_dump(), *outputs]
    assert ask(client, said, temperature=0).output_text == second.output_text != ""
    kinds = [each.type for each in client.responses.input_items.list(second.id).data]
    assert kinds == ["function_call_output"]
    named = call(
        client, tool_choice={"type": "function", "name": "weather"}, parallel_tool_calls=True
    )
    assert [each.name for each in named.output] == ["weather"]
    allowed: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "weather"}],
    }
    assert {
        each.type for each in call(client, tool_choice=allowed, max_output_tokens=40).output
    } == {"function_call"}
    assert {each.type for each in call(client, tool_choice="none", max_output_tokens=4).output} == {
        "message"
    }


@pytest.mark.slow
def test_74_a_stream_of_a_call(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "parallel_tool_calls": False,
        "extra_body": {"seed": 3},
        "temperature": 1,
    }
    whole = call(client, **fields).output[0]
    with client.responses.stream(
        model=MODEL,
        input="How is the weather?",
        tools=TOOLS,
        tool_choice="required",
        max_output_tokens=200,
        **fields,
    ) as stream:
        events = list(stream)
        final: Any = stream.get_final_response().output[0]
    deltas = [
        event.delta for event in events if event.type == "response.function_call_arguments.delta"
    ]
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert deltas, "one where a busy machine has sent the tokens together"
    assert "".join(deltas) == done.arguments == whole.arguments == final.arguments
    assert final.parsed_arguments is None or final.parsed_arguments == json.loads(whole.arguments)
    assert [event.type for event in events][-2:] == [
        "response.output_item.done",
        "response.completed",
    ]


def test_a_call_that_is_cut_is_incomplete_and_the_conversation_goes_on(
    client: openai.OpenAI,
) -> None:
    cut = call(client, max_output_tokens=12)
    assert cut.status == cut.output[-1].status == "incomplete"
    assert ask(client, "Go on", previous_response_id=cut.id).output_text


PIECES = [
    "<think>\nHm",
    "m</think>\n",
    "\nYes",
    '<tool_call>{"name": "weather", "arg',
    'uments": {"a": 1}}',
    "</tool_call>",
]


def test_thoughts_text_and_calls_are_items_of_their_own() -> None:
    config = ApiConfig(reasoning_parser="think")
    with (
        serve(FakeClient(Script(pieces=PIECES)), config) as server,
        openai.OpenAI(base_url=server.v1, api_key="x") as client,
    ):
        whole = client.responses.create(model="fake", input="x", tools=TOOLS)
        thoughts, message, called = whole.output
        assert (
            thoughts.type == "reasoning" and thoughts.content and thoughts.content[0].text == "Hmm"
        )
        assert message.type == "message" and whole.output_text == "Yes"
        assert called.type == "function_call" and (called.name, called.arguments) == (
            "weather",
            '{"a": 1}',
        )
        events = list(client.responses.create(model="fake", input="x", tools=TOOLS, stream=True))
        last: Any = events[-1]
        assert [(each.type, each.status) for each in last.response.output] == [
            (each.type, "completed") for each in whole.output
        ]
        assert (
            "".join(
                event.delta for event in events if event.type == "response.reasoning_text.delta"
            )
            == "Hmm"
        )
        assert (
            "".join(event.delta for event in events if event.type == "response.output_text.delta")
            == "Yes"
        )
        added = [
            event.output_index for event in events if event.type == "response.output_item.added"
        ]
        assert added == [0, 1, 2]
        again = client.responses.create(
            model="fake",
            input=[*whole.output, {"role": "user", "content": "x"}],  # type: ignore[list-item]
        )
        assert again.usage is not None and again.usage.input_tokens > 0
        assert client.responses.create(
            model="fake", input="y", previous_response_id=whole.id
        ).output_text


@contextmanager
def thinker(tmp_path: Path, keys: KeyRing | None = None) -> Iterator[RunningServer]:
    """A server whose model thinks before it answers, and whose prompts show what it thought."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for each in messages %}{{ each.reasoning_content }}{{ each.content }}{% endfor %}"
    )
    config = ApiConfig(reasoning_parser="think", chat_template=str(template))
    with serve(
        FakeClient(Script(pieces=["<think>\nHm", "m, caf\u00e9</think>\n", "\nYes"])), config, keys
    ) as server:
        yield server


SEALED = {"include": ["reasoning.encrypted_content"], "store": False, "input": "x"}


def num_tokens(
    http: httpx.Client, items: list[dict[str, Any]], **headers: str
) -> tuple[int, str | None]:
    """Tokens of a prompt of these items, and what of them was ignored."""
    answer = http.post(
        "/v1/responses/input_tokens",
        json={"input": [*items, {"role": "user", "content": "x"}]},
        headers=headers,
    )
    assert answer.status_code == 200, answer.text
    return answer.json()["input_tokens"], answer.headers.get("x-quire-ignored-fields")


def test_sealed_thoughts_come_back_also_where_nothing_else_of_them_does(tmp_path: Path) -> None:
    with thinker(tmp_path) as server, httpx.Client(base_url=server.url) as http:
        thoughts, message = http.post("/v1/responses", json=SEALED).json()["output"]
        assert (
            thoughts["content"][0]["text"] == "Hmm, caf\u00e9"
            and message["content"][0]["text"] == "Yes"
        )
        events = http.post("/v1/responses", json={**SEALED, "stream": True}).text.splitlines()
        done = [
            json.loads(line[6:])
            for line in events
            if '"response.output_item.done"' in line and line.startswith("data")
        ]
        assert done[0]["item"]["encrypted_content"] == thoughts["encrypted_content"], (
            "the same thoughts, the same seal"
        )
        bare = {
            "type": "reasoning",
            "id": thoughts["id"],
            "summary": [],
            "encrypted_content": thoughts["encrypted_content"],
        }
        whole, _ = num_tokens(http, [thoughts, message])
        assert num_tokens(http, [bare, message]) == (whole, None)
        less, _ = num_tokens(http, [message])
        kept = http.post("/v1/responses", json={**SEALED, "store": True}).json()
        assert kept["output"][0]["encrypted_content"]
        plain = http.post("/v1/responses", json={"input": "x"}).json()["output"][0]
        assert "encrypted_content" not in plain and whole > less


def test_what_was_not_sealed_here_for_this_tenant_is_not_believed(tmp_path: Path) -> None:
    keys = key_ring([(Tenant("one"), ["sk-key-of-one"]), (Tenant("two"), ["sk-key-of-two"])])
    one, two = ({"authorization": f"Bearer sk-key-of-{name}"} for name in ("one", "two"))
    with (
        thinker(tmp_path, keys) as server,
        thinker(tmp_path) as other,
        httpx.Client(base_url=server.url) as http,
    ):
        thoughts, message = http.post("/v1/responses", json=SEALED, headers=one).json()["output"]
        mine = thoughts["encrypted_content"]
        foreign = httpx.post(f"{other.url}/v1/responses", json=SEALED).json()["output"][0][
            "encrypted_content"
        ]

        def read(sealed: str, who: dict[str, str]) -> tuple[int, str | None]:
            return num_tokens(
                http,
                [{"type": "reasoning", "summary": [], "encrypted_content": sealed}, message],
                **who,
            )

        longest, ignored = read(mine, one)
        assert ignored is None
        changed = mine[:60] + ("A" if mine[60] != "A" else "B") + mine[61:]
        for sealed, who in (
            (mine, two),
            (foreign, one),
            (changed, one),
            (mine[:-4], one),
            ("gAAAA...", one),
            ("quire1.\u00e9", one),
        ):
            count, ignored = read(sealed, who)
            assert count < longest and ignored == "input[0].encrypted_content", (
                "named, and no part of the prompt"
            )
        shown = {"type": "reasoning", "content": thoughts["content"], "encrypted_content": foreign}
        assert num_tokens(http, [shown, message], **one) == (longest, None), (
            "what stands beside it is readable"
        )


def test_an_operator_may_have_unreadable_thoughts_refused() -> None:
    config = ApiConfig(reasoning_parser="think", strict_fields=True)
    with serve(FakeClient(Script()), config) as server:
        items = [
            {"type": "reasoning", "encrypted_content": "gAAAA"},
            {"role": "user", "content": "x"},
        ]
        error = httpx.post(f"{server.v1}/responses", json={"input": items}).json()["error"]
        assert error["param"] == "input[0].encrypted_content"


def test_every_documented_include_is_known(client: openai.OpenAI) -> None:
    from openai.types.responses import ResponseIncludable

    answer = ask(client, include=list(get_args(ResponseIncludable)), temperature=0)
    assert answer.output_text == ask(client, temperature=0).output_text
    assert len(answer.output[0].content[0].logprobs) == 4, (
        "each is given where there is something to give"
    )
    with pytest.raises(openai.BadRequestError, match="everything"):
        ask(client, extra_body={"include": ["everything"]})


def test_the_tokens_of_an_input_are_counted(client: openai.OpenAI) -> None:
    first = ask(client, instructions="Be brief.")
    assert client.responses.input_tokens.count(
        model=MODEL, input="Tell me of a cat.", instructions="Be brief."
    ).input_tokens == (first.usage.input_tokens)
    count = client.responses.input_tokens.count
    later = ask(client, "And then?", previous_response_id=first.id, tools=TOOLS, tool_choice="none")
    counted = count(
        input="And then?", previous_response_id=first.id, tools=TOOLS, tool_choice="none"
    )
    assert (counted.input_tokens, counted.object) == (
        later.usage.input_tokens,
        "response.input_tokens",
    )
    assert count(previous_response_id=first.id).input_tokens < counted.input_tokens
    for fields in (
        {},
        {"input": [{"type": "message", "role": "user", "content": 5}]},
        {"input": "x", "conversation": "c"},
    ):
        with pytest.raises(openai.BadRequestError):
            client.post("/responses/input_tokens", body=fields, cast_to=object)
    with pytest.raises(openai.NotFoundError):
        count(model="another", input="x")


def test_an_answer_of_nothing_is_an_empty_message_without_deltas() -> None:
    with (
        serve(FakeClient(Script(pieces=()))) as server,
        openai.OpenAI(base_url=server.v1, api_key="x") as client,
    ):
        assert [each.type for each in client.responses.create(model="fake", input="x").output] == [
            "message"
        ]
        kinds = [
            event.type for event in client.responses.create(model="fake", input="x", stream=True)
        ]
        assert "response.output_text.delta" not in kinds
        assert kinds[-4:] == [
            "response.output_text.done", "response.content_part.done", "response.output_item.done",
            "response.completed",
        ]  # fmt: skip


def test_the_store_is_bounded_and_each_tenants_own() -> None:
    store = ResponseStore(2, 10_000)
    for name in ("a", "b", "c"):
        store.put("x", StoredResponse({"id": name}, AskedInput.of([], []), []))
    assert len(store) == 2
    assert store.get("x", "c").body == {"id": "c"}
    for tenant, name in (("x", "a"), ("y", "c")):
        with pytest.raises(ApiError):
            store.get(tenant, name)
    store.put("x", StoredResponse({"id": "large"}, AskedInput.of([{"text": "x" * 20_000}], []), []))
    assert len(store) == 2
    store.put("x", StoredResponse({"id": "most"}, AskedInput.of([{"text": "x" * 9_960}], []), []))
    assert len(store) == 1
