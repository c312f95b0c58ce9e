"""What a model thinks before it answers, told apart in chats, through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from fake_client import FakeClient, Script
from servers import serve

from quire.config.api import ApiConfig

ASK: list[Any] = [{"role": "user", "content": "What is two and two?"}]
PIECES = ["<thi", "nk>\nTwo", " and two", "\n</think>", "\n\nFour.", ' <tool_call>{"name": "f", "arguments": {}}</tool_call>']
TOOLS: list[Any] = [{"type": "function", "function": {"name": "f"}}]


@contextmanager
def talker(pieces: list[str] = PIECES, **options: Any) -> Iterator[openai.OpenAI]:
    """A client of a server whose model says these."""
    config = ApiConfig(**{"reasoning_parser": "think", **options})
    with (
        serve(FakeClient(Script(pieces=pieces)), config) as server,
        openai.OpenAI(base_url=server.v1, api_key="x") as client,
    ):
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(**{"model": "fake", "messages": ASK, **fields})


def streamed(client: openai.OpenAI, **fields: Any) -> dict[str, str]:
    """What the deltas of a stream add up to, by name."""
    sums: dict[str, str] = {}
    for chunk in ask(client, stream=True, **fields):
        for name, value in chunk.choices[0].delta.model_dump(exclude_none=True).items() if chunk.choices else ():
            if isinstance(value, str) and name != "role":
                sums[name] = sums.get(name, "") + value
    return sums


def test_thoughts_text_and_calls_are_told_apart() -> None:
    with talker() as client:
        (choice,) = ask(client, tools=TOOLS).choices
        thoughts = {"reasoning": "Two and two", "reasoning_content": "Two and two"}
        assert choice.message.content == "Four. " and choice.message.tool_calls[0].function.name == "f"
        assert {name: getattr(choice.message, name) for name in thoughts} == thoughts
        assert choice.finish_reason == "tool_calls"
        assert streamed(client, tools=TOOLS) == {"content": "Four. ", **thoughts}
        hidden = ask(client, extra_body={"include_reasoning": False}).choices[0].message
        assert hidden.content == "".join(PIECES[4:]).strip("\n") and not hasattr(hidden, "reasoning")
        assert streamed(client, extra_body={"include_reasoning": False}) == {"content": hidden.content}


def test_thoughts_may_come_before_json_but_not_before_other_forms() -> None:
    answer = '{"a": 1}'
    with talker(["<think>Hm</think>\n", '{"a"', ": 1}"]) as client:
        message: Any = ask(client, response_format={"type": "json_object"}).choices[0].message
        assert (message.content, message.reasoning) == (answer, "Hm")
        plain = ask(client, extra_body={"guided_regex": ".*"}).choices[0].message
        assert plain.content == f"<think>Hm</think>\n{answer}" and not hasattr(plain, "reasoning")


def test_thoughts_that_the_prompt_begins(tmp_path: Path) -> None:
    """As templates do that write the first mark; `auto` recognises them."""
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for each in messages %}{{ each.reasoning_content }}{{ each.content.split('</think>')[-1] }}{% endfor %}"
        "{% if add_generation_prompt and enable_thinking is not false %}<think>\n{% endif %}"
    )
    pieces = ["Hm", "m\n</think>\n", "\nFour."]
    with talker(pieces, reasoning_parser="auto", chat_template=str(template)) as client:
        message = ask(client).choices[0].message
        assert (message.reasoning, message.content) == ("Hmm", "Four.")
        plain = ask(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices[0].message
        assert plain.content == "".join(pieces) and not hasattr(plain, "reasoning")
        counts = [
            ask(client, messages=[*ASK, {"role": "assistant", "content": "4", **thoughts}, *ASK]).usage.prompt_tokens
            for thoughts in ({}, {"reasoning": "A long thought"}, {"reasoning_content": "A long thought"})
        ]
        assert counts[0] < counts[1] == counts[2]


def test_thoughts_that_are_cut_leave_no_content() -> None:
    with talker(["<think>", "On and on"]) as client:
        message: Any = ask(client).choices[0].message
        assert message.content is None and message.reasoning == "On and on"


@pytest.mark.parametrize("parser", ["auto", "none"])
def test_a_model_without_marks_has_no_thoughts(parser: str) -> None:
    with talker(reasoning_parser=parser) as client:
        message = ask(client).choices[0].message
        assert message.content == "".join(PIECES) and not hasattr(message, "reasoning")
