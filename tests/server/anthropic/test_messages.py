"""Anthropic's Messages API with the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_client import FakeClient, Script
from servers import MODEL, RunningServer, serve

from quire.config.api import ApiConfig

if TYPE_CHECKING:
    import anthropic  # which takes seconds: not in workers without these tests

CAT: list[Any] = [{"role": "user", "content": "Tell me of a cat."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "weather", "description": "Weather of a city", "input_schema": SCHEMA}]


@pytest.fixture
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, messages: Any = CAT, **fields: Any) -> Any:
    fields = {
        "max_tokens": 6,
        **fields,
        "extra_body": {"temperature": 0, **fields.get("extra_body", {})},
    }
    return client.messages.create(model=MODEL, messages=messages, **fields)


def test_an_answer(claude: anthropic.Anthropic) -> None:
    answer = ask(claude)
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "max_tokens")
    assert answer.content[0].text and answer.usage.output_tokens == 6
    cold = answer.usage
    again = ask(claude)
    assert again.content[0].text == answer.content[0].text
    usage = again.usage
    assert usage.cache_read_input_tokens > 0
    count = claude.messages.count_tokens(model=MODEL, messages=CAT).input_tokens
    for each in (cold, usage):
        read, written = each.cache_read_input_tokens, each.cache_creation_input_tokens
        assert count == each.input_tokens + read + written
    assert usage.cache_creation_input_tokens == 0, "all whole blocks were there"
    assert usage.input_tokens < 16


def test_stop_sequences_and_system(claude: anthropic.Anthropic) -> None:
    text = ask(claude, system="Be kind.", max_tokens=12).content[0].text
    stopped = ask(
        claude,
        system=[{"type": "text", "text": "Be kind."}],
        max_tokens=12,
        stop_sequences=[text[4:8]],
    )
    assert stopped.content[0].text == text[: text.index(text[4:8])]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[4:8])


def test_a_last_turn_of_the_assistant_is_continued(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, [*CAT, {"role": "assistant", "content": "Once upon"}])
    assert answer.content[0].text.startswith(" a time")


def test_a_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model=MODEL, max_tokens=6, messages=CAT, extra_body={"temperature": 0}
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert final.content[0].text == ask(claude).content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 6


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"name": "bad name", "input_schema": {}}]},
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        {"tools": [{"name": "f", "input_schema": {"not": {}}, "strict": True}]},
        {
            "tools": [{"name": "f", "input_schema": {}}],
            "tool_choice": {"type": "tool", "name": "g"},
        },
        {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": "any"},
        {"tool_choice": {"type": "any"}},
        {"output_format": {"type": "json_object"}},
        {
            "messages": [
                *CAT,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}],
                },
            ]
        },
        {
            "messages": [
                *CAT,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "a", "name": "f", "input": 1}],
                },
            ]
        },
        {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [1, None]}],
                }
            ]
        },
        {"thinking": {"type": "hard", "budget_tokens": 1024}},
        {"thinking": {"type": "enabled", "budget_tokens": "many"}},
        {"context_management": {"edits": [{"type": "forget_everything"}]}},
        {"context_management": {"edits": {}}},
        {"mcp_servers": [{"type": "url", "url": "http://127.0.0.1:1", "name": "x"}]},
        {"container": "container_1"},
        {"compaction": {"type": "summarize"}},
        {"temperature": 1.5},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    ],
)
def test_what_is_refused(claude: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, extra_body=fields)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == caught.value.request_id
    assert set(body["error"]) == {"type", "message", "param", "code"}


def test_a_thread_is_refused_in_the_words_that_clients_go_on_after(
    claude: anthropic.Anthropic,
) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, extra_body={"thread": {"type": "create"}})
    body: Any = caught.value.body
    assert body["error"]["param"] == "thread"
    assert body["error"]["details"] == {
        "error_code": "thread_unsupported_request",
        "unsupported": ["thread"],
    }


def test_the_official_tool_runner_runs_to_its_end() -> None:
    import anthropic

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Weather of a city."""
        return f"Sun in {city}"

    calling = Script(
        pieces=['<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>']
    )
    fake = FakeClient(calling)
    with serve(fake) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
        turns: list[Any] = []
        with client:
            runner = client.beta.messages.tool_runner(
                model="fake", max_tokens=20, tools=[weather], messages=CAT
            )
            for turn in runner:
                turns.append(turn)
                fake.script = Script(pieces=["It is sunny."])
    assert [turn.stop_reason for turn in turns] == ["tool_use", "end_turn"]
    assert turns[0].content[-1].input == {"city": "Oslo"}
    assert turns[1].content[0].text == "It is sunny."


def test_a_form_has_no_keys_but_its_own_and_numbers_with_an_end(http: httpx.Client) -> None:
    fields = {
        "model": MODEL,
        "max_tokens": 200,
        "messages": CAT,
        "temperature": 0,
    }
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    for field in ("output_format", "output_config"):
        form = {"type": "json_schema", "schema": schema}
        body = {**fields, field: form if field == "output_format" else {"format": form}}
        answer = http.post("/v1/messages", json=body).json()
        assert answer["stop_reason"] == "end_turn", answer
        assert json.loads(answer["content"][0]["text"]).keys() == {"days"}


def call(client: anthropic.Anthropic, messages: Any = CAT, **fields: Any) -> Any:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    return ask(
        client, messages, **{"tools": TOOLS, "tool_choice": choice, "max_tokens": 100, **fields}
    )


def test_a_call_and_what_follows_it(claude: anthropic.Anthropic) -> None:
    answer = call(claude)
    (block,) = answer.content
    assert (block.type, block.name, answer.stop_reason) == ("tool_use", "weather", "tool_use")
    assert block.input["city"] in ("Oslo", "Rome")
    result = {
        "type": "tool_result",
        "tool_use_id": block.id,
        "content": [{"type": "text", "text": "Sun"}],
    }
    messages = [*CAT, {"role": "assistant", "content": answer.content}]
    said = [*messages, {"role": "user", "content": [result, {"type": "text", "text": "So?"}]}]
    assert ask(claude, said).content[0].text
    none: dict[str, Any] = {"tools": TOOLS, "tool_choice": {"type": "none"}}
    counts = [
        claude.messages.count_tokens(model=MODEL, messages=CAT, **each).input_tokens
        for each in ({}, none)
    ]
    assert counts[0] == counts[1]
    assert ask(claude, tools=TOOLS, tool_choice={"type": "none"}).content[0].type == "text"
    named = call(claude, tool_choice={"type": "tool", "name": "weather"})
    assert [each.type for each in named.content] == ["tool_use"] and named.stop_reason == "tool_use"


def test_a_stream_of_a_call(claude: anthropic.Anthropic) -> None:
    note = {"note": {"type": "string", "minLength": 30, "maxLength": 40}}
    schema = {**SCHEMA, "properties": note, "required": ["note"]}
    tools: Any = [{**TOOLS[0], "input_schema": schema}]
    whole = call(claude, tools=tools).content[0]
    choice: Any = {"type": "any", "disable_parallel_tool_use": True}
    with claude.messages.stream(
        model=MODEL,
        max_tokens=100,
        messages=CAT,
        tools=tools,
        tool_choice=choice,
        extra_body={"temperature": 0},
    ) as stream:
        parts = [event.partial_json for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    (block,) = final.content
    assert (
        block.type == "tool_use"
        and block.input == whole.input == json.loads("".join(parts))
        and len(parts) > 1
    )
    assert final.stop_reason == "tool_use"


def test_a_call_that_is_cut_is_text(claude: anthropic.Anthropic) -> None:
    answer = call(claude, max_tokens=12)
    assert answer.stop_reason == "max_tokens" and {each.type for each in answer.content} <= {"text"}


def test_an_answer_of_a_form(claude: anthropic.Anthropic) -> None:
    for fields in ({"output_format": {"type": "json_schema", "schema": SCHEMA}},
                   {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}):  # fmt: skip
        answer = ask(claude, max_tokens=60, extra_body=fields)
        assert json.loads(answer.content[0].text)["city"] in ("Oslo", "Rome")


PIECES = [
    "<think>\nHm",
    "m</think>\n",
    "\nYes",
    '<tool_call>{"name": "weather", "arg',
    'uments": {"a": 1}}',
    "</tool_call>",
]


def test_thoughts_text_and_calls_are_blocks_of_their_own() -> None:
    import anthropic

    config = ApiConfig(reasoning_parser="think")
    with serve(FakeClient(Script(pieces=PIECES)), config) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
        fields: dict[str, Any] = {
            "model": "fake",
            "max_tokens": 50,
            "messages": CAT,
            "tools": TOOLS,
        }
        fields["thinking"] = {"type": "enabled", "budget_tokens": 1024}
        with client:
            raw = client.messages.with_raw_response.create(**fields)
            assert "x-quire-ignored-fields" not in raw.headers
            whole: Any = raw.parse()
            thought, text, called = whole.content
            assert (thought.type, thought.thinking, text.text) == ("thinking", "Hmm", "Yes")
            assert (called.name, called.input, whole.stop_reason) == (
                "weather",
                {"a": 1},
                "tool_use",
            )
            with client.messages.stream(**fields) as stream:
                kinds = [event.type for event in stream]
                final: Any = stream.get_final_message()
            assert [each.type for each in final.content] == ["thinking", "text", "tool_use"]
            assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
            assert (final.content[0].thinking, final.content[1].text, final.content[2].input) == (
                "Hmm",
                "Yes",
                {"a": 1},
            )
            said = [*CAT, {"role": "assistant", "content": whole.content}]
            result = {"type": "tool_result", "tool_use_id": called.id}
            again: Any = client.messages.create(
                **{**fields, "messages": [*said, {"role": "user", "content": [result]}]}
            )
            assert again.content[1].text == "Yes"


@pytest.mark.parametrize("kind", ["enabled", "adaptive", "between_tools", "disabled"])
def test_a_model_that_does_not_think_answers_and_says_that_thinking_had_no_effect(
    http: httpx.Client, kind: str
) -> None:
    thinking = {
        "type": kind,
        **({"budget_tokens": 1024} if kind == "enabled" else {}),
        "display": "omitted",
    }
    body = {"messages": CAT, "max_tokens": 6, "temperature": 0, "model": MODEL}
    plain = http.post("/v1/messages", json=body).json()
    for more in ({}, {"stream": True}):
        answer = http.post("/v1/messages", json={**body, **more, "thinking": thinking})
        assert answer.status_code == 200
        assert answer.headers.get("x-quire-ignored-fields") == (
            None
            if kind == "disabled"
            else "thinking" + (", thinking.budget_tokens" if kind == "enabled" else "")
        )
        if not more:
            assert answer.json()["content"] == plain["content"] and len(plain["content"]) == 1
    count = http.post(
        "/v1/messages/count_tokens", json={"messages": CAT, "model": MODEL, "thinking": thinking}
    ).json()
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    assert count["input_tokens"] == sum(plain["usage"][name] for name in parts)


def test_what_agents_send_by_default_changes_nothing(claude: anthropic.Anthropic) -> None:
    neutral: dict[str, Any] = {
        "metadata": {"user_id": "u"}, "service_tier": "auto", "mcp_servers": [], "container": None,
        "stop_sequences": [],
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "speed": "standard", "cache_control": {"type": "ephemeral"}, "system": [],
        "output_config": {}, "user_profile_id": "p",
    }  # fmt: skip
    cached = {"type": "text", "text": "Tell me of a cat.", "cache_control": {"type": "ephemeral"}}
    tools = [{**TOOLS[0], "type": "custom", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    turns: list[Any] = [{"role": "user", "content": [cached]}]
    fields: Any = dict(
        model=MODEL, max_tokens=6, messages=turns, tools=tools, tool_choice={"type": "none"},
        betas=["context-management-2025-06-27", "interleaved-thinking-2025-05-14"],
        extra_body={**neutral, "temperature": 0},
    )  # fmt: skip
    raw = claude.beta.messages.with_raw_response.create(**fields)
    assert "x-quire-ignored-fields" not in raw.headers
    answer: Any = raw.parse()
    assert answer.content[0].text == ask(claude).content[0].text
    assert answer.context_management is not None and answer.context_management.applied_edits == []
    named = claude.messages.with_raw_response.create(
        model=MODEL, max_tokens=1, messages=CAT, extra_body={"speed": "fast", "inference_geo": "eu"}
    )
    assert named.headers["x-quire-ignored-fields"] == "speed, inference_geo"


def test_instructions_between_turns_and_thoughts_of_others(http: httpx.Client) -> None:
    turns = [
        *CAT,
        {
            "role": "assistant",
            "content": [
                {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "A cat."},
            ],
        },
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        {"role": "user", "content": "And?"},
    ]
    answer = http.post("/v1/messages", json={"messages": turns, "max_tokens": 2, "model": MODEL})
    assert (
        answer.status_code == 200
        and answer.headers["x-quire-ignored-fields"] == "messages[1].content[0]"
    )


def test_a_stream_that_fails_ends_with_an_error() -> None:
    import anthropic

    with serve(FakeClient(Script(error="no luck"))) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
        with client, pytest.raises(anthropic.APIStatusError, match="no luck"):
            for _ in client.messages.create(model="fake", max_tokens=5, messages=CAT, stream=True):
                pass
