"""instructor's modes for OpenAI's and Anthropic's APIs, on a model that was never taught any of
them.

Modes that only ask for JSON in words, or leave the call to the model, are for models that can do
so.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import anthropic
import openai
import pydantic
import pytest
from servers import MODEL, RunningServer

instructor = pytest.importorskip("instructor")
# of modes that programs go on using
pytestmark = pytest.mark.filterwarnings("ignore:Mode:DeprecationWarning")

ASK = [{"role": "user", "content": "Which city, and for how many days?"}]


class Stay(pydantic.BaseModel):
    """Where somebody stays, and how long."""

    city: Literal["Oslo", "Rome"]
    days: int
    company: bool | None = None


def ask(client: Any, **fields: Any) -> Any:
    fields = {"response_model": Stay, "max_retries": 0, "max_tokens": 200, **fields}
    return client.chat.completions.create(model=MODEL, messages=ASK, **fields)


@pytest.mark.parametrize(
    "mode",
    [
        "FUNCTIONS",
        "TOOLS",
        "TOOLS_STRICT",
        "JSON_O1",
        "JSON_SCHEMA",
        "RESPONSES_TOOLS",
        "RESPONSES_TOOLS_WITH_INBUILT_TOOLS",
    ],
)
def test_modes_of_openai(server: RunningServer, mode: str) -> None:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=60) as plain:
        stay = ask(instructor.from_openai(plain, mode=instructor.Mode[mode]), temperature=0.0)
        assert stay.city in ("Oslo", "Rome") and isinstance(stay.days, int)


def test_a_stream_of_parts(server: RunningServer) -> None:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=60) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        fields = {"response_model": instructor.Partial[Stay], "stream": True, "temperature": 0.0}
        *_, last = ask(client, **fields)
        assert last.city in ("Oslo", "Rome")


@pytest.mark.parametrize(
    "mode", ["ANTHROPIC_TOOLS", "ANTHROPIC_REASONING_TOOLS", "ANTHROPIC_PARALLEL_TOOLS"]
)
def test_modes_of_anthropic(server: RunningServer, mode: str) -> None:
    with anthropic.Anthropic(
        base_url=server.url, api_key="none", max_retries=0, timeout=60
    ) as plain:
        client = instructor.from_anthropic(plain, mode=instructor.Mode[mode])
        if mode != "ANTHROPIC_PARALLEL_TOOLS":
            assert ask(client).city in ("Oslo", "Rome")
        else:  # where the model may call or not
            assert all(
                isinstance(each, Stay) for each in ask(client, response_model=Iterable[Stay])
            )
