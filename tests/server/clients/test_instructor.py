"""instructor's modes for OpenAI's and Anthropic's APIs.

Modes whose form the server enforces run on a model that was never taught any of them. Modes that
only ask for JSON in words, or leave the call to the model, are for models that can do so: here the
engine writes what such a model would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec
import openai
import pydantic
import pytest
from fake_client import FakeClient, Script
from servers import MODEL, RunningServer, serve

from quire.engine.front.model_info import ModelInfo

# of modes that programs go on using
pytestmark = pytest.mark.filterwarnings("ignore:Mode:DeprecationWarning")


@pytest.fixture(scope="module")
def instructor() -> Any:
    """Imported by the one worker that needs it: that takes seconds."""
    return pytest.importorskip("instructor")


@pytest.fixture(scope="module")
def anthropic(instructor: Any) -> Any:
    return pytest.importorskip("anthropic")


ASK = [{"role": "user", "content": "Which city, and for how many days?"}]


class Stay(pydantic.BaseModel):
    """Where somebody stays, and how long."""

    city: Literal["Oslo", "Rome"]
    days: int
    company: bool | None = None


def ask(client: Any, **fields: Any) -> Any:
    fields = {"response_model": Stay, "max_retries": 0, "max_tokens": 200, **fields}
    return client.chat.completions.create(**{"model": MODEL, "messages": ASK, **fields})


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
def test_modes_of_openai(server: RunningServer, instructor: Any, mode: str) -> None:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=60) as plain:
        stay = ask(instructor.from_openai(plain, mode=instructor.Mode[mode]), temperature=0.0)
        assert stay.city in ("Oslo", "Rome") and isinstance(stay.days, int)


def test_a_stream_of_parts(server: RunningServer, instructor: Any) -> None:
    with openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=60) as plain:
        client = instructor.from_openai(plain, mode=instructor.Mode.TOOLS)
        fields = {"response_model": instructor.Partial[Stay], "stream": True, "temperature": 0.0}
        *_, last = ask(client, **fields)
        assert last.city in ("Oslo", "Rome")


@pytest.mark.parametrize(
    "mode", ["ANTHROPIC_TOOLS", "ANTHROPIC_REASONING_TOOLS", "ANTHROPIC_PARALLEL_TOOLS"]
)
def test_modes_of_anthropic(
    server: RunningServer, instructor: Any, anthropic: Any, mode: str
) -> None:
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


STAY = '{"city": "Rome", "days": 3}'
CALL = f'<tool_call>{{"name": "Stay", "arguments": {STAY}}}</tool_call>'
IN_WORDS = {
    "JSON": STAY,
    "MD_JSON": f"Here it is.\n```json\n{STAY}\n```",
    "PARALLEL_TOOLS": CALL + CALL,
    "ANTHROPIC_JSON": f"Here it is.\n```json\n{STAY}\n```",
    "ANTHROPIC_PARALLEL_TOOLS": CALL + CALL,
}


class Roomy(FakeClient):
    """A model whose context holds a schema in words."""

    @property
    def model(self) -> ModelInfo:
        return msgspec.structs.replace(super().model, max_model_len=2048)


@pytest.mark.parametrize("mode", IN_WORDS)
def test_modes_that_leave_the_form_to_the_model(instructor: Any, anthropic: Any, mode: str) -> None:
    fake = Roomy(Script(pieces=[IN_WORDS[mode]]))
    is_parallel = "PARALLEL" in mode
    fields: dict[str, Any] = {"response_model": Iterable[Stay] if is_parallel else Stay}
    if mode == "PARALLEL_TOOLS":
        fields["tool_choice"] = "auto"
    with serve(fake) as server:
        if mode.startswith("ANTHROPIC"):
            plain: Any = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
            make = instructor.from_anthropic
        else:
            plain = openai.OpenAI(base_url=server.v1, api_key="none", max_retries=0, timeout=60)
            make = instructor.from_openai
        with plain:
            client = make(plain, mode=instructor.Mode[mode])
            answer = ask(client, **fields, model="fake", max_tokens=20)
            stays = list(answer) if is_parallel else [answer]
    assert [(stay.city, stay.days) for stay in stays] == [("Rome", 3)] * (2 if is_parallel else 1)
