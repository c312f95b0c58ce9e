"""Anthropic's Messages API with the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from fake_client import FakeClient, Script
from servers import MODEL, RunningServer, serve

CAT: list[Any] = [{"role": "user", "content": "Tell me of a cat."}]


@pytest.fixture
def claude(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0) as client:
        yield client


def ask(client: anthropic.Anthropic, messages: Any = CAT, **fields: Any) -> Any:
    fields = {"max_tokens": 6, **fields, "extra_body": {"temperature": 0, **fields.get("extra_body", {})}}
    return client.messages.create(model=MODEL, messages=messages, **fields)


def test_an_answer(claude: anthropic.Anthropic) -> None:
    answer = ask(claude)
    assert (answer.type, answer.role, answer.stop_reason) == ("message", "assistant", "max_tokens")
    assert answer.content[0].text and answer.usage.output_tokens == 6
    again = ask(claude)
    assert again.content[0].text == answer.content[0].text
    usage = again.usage
    assert usage.cache_read_input_tokens > 0
    count = claude.messages.count_tokens(model=MODEL, messages=CAT).input_tokens
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def test_stop_sequences_and_system(claude: anthropic.Anthropic) -> None:
    text = ask(claude, system="Be kind.", max_tokens=12).content[0].text
    stopped = ask(claude, system=[{"type": "text", "text": "Be kind."}], max_tokens=12, stop_sequences=[text[4:8]])
    assert stopped.content[0].text == text[: text.index(text[4:8])]
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", text[4:8])


def test_a_last_turn_of_the_assistant_is_continued(claude: anthropic.Anthropic) -> None:
    answer = ask(claude, [*CAT, {"role": "assistant", "content": "Once upon"}])
    assert answer.content[0].text.startswith(" a time")


def test_a_stream(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model=MODEL, max_tokens=6, messages=CAT, extra_body={"temperature": 0}) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert final.content[0].text == ask(claude).content[0].text  # type: ignore[union-attr]
    assert final.stop_reason == "max_tokens" and final.usage.output_tokens == 6


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"name": "f", "input_schema": {}}]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"temperature": 1.5},
        {"max_tokens": 0},
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    ],
)
def test_what_is_refused(claude: anthropic.Anthropic, fields: dict[str, Any]) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        ask(claude, extra_body=fields)
    body: Any = caught.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert body["request_id"] == caught.value.request_id
    assert set(body["error"]) == {"type", "message", "param", "code"}


def test_a_stream_that_fails_ends_with_an_error() -> None:
    with serve(FakeClient(Script(error="no luck"))) as server:
        client = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
        with client, pytest.raises(anthropic.APIStatusError, match="no luck"):
            for _ in client.messages.create(model="fake", max_tokens=5, messages=CAT, stream=True):
                pass
