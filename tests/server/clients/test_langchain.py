"""LangChain's `ChatOpenAI` pointed at the server."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pydantic
import pytest
from servers import MODEL, RunningServer

pytestmark = pytest.mark.slow  # the packages take seconds to import
ASK = "Tell me of a cat."


@pytest.fixture
def llm(server: RunningServer) -> Any:
    return pytest.importorskip("langchain_openai").ChatOpenAI(
        base_url=server.v1,
        api_key="none",
        model=MODEL,
        temperature=0.7,
        max_tokens=8,
        seed=7,
        max_retries=0,
        timeout=30,
    )


def test_an_answer_its_stream_and_their_counts(llm: Any) -> None:
    answer = llm.invoke([("system", "Be brief."), ("user", ASK)])
    assert answer.content and answer.usage_metadata["output_tokens"] == 8
    assert (
        answer.response_metadata["finish_reason"] == "length"
        and answer.response_metadata["model_name"] == MODEL
    )
    pieces = list(llm.stream([("system", "Be brief."), ("user", ASK)], stream_usage=True))
    assert "".join(piece.content for piece in pieces) == answer.content
    assert (
        sum(piece.usage_metadata["output_tokens"] for piece in pieces if piece.usage_metadata) == 8
    )


def test_batches_and_asyncio_give_the_same(llm: Any) -> None:
    alone = llm.invoke(ASK).content
    assert [each.content for each in llm.batch([ASK] * 3)] == [alone] * 3

    async def gather() -> list[str]:
        answers = await llm.abatch([ASK, ASK])
        streamed = [piece.content async for piece in llm.astream(ASK)]
        await llm.root_async_client.close()
        return [*(each.content for each in answers), "".join(streamed)]

    assert asyncio.run(gather()) == [alone] * 3


def test_stops_and_log_probabilities(llm: Any) -> None:
    text = llm.invoke(ASK).content
    stop = text.split()[2]
    assert stop not in llm.bind(stop=[stop]).invoke(ASK).content
    record = llm.bind(logprobs=True, top_logprobs=2).invoke(ASK).response_metadata["logprobs"]
    assert len(record["content"]) == 8 and len(record["content"][0]["top_logprobs"]) == 2


def test_a_mistake_is_an_exception_with_our_words(server: RunningServer, llm: Any) -> None:
    with pytest.raises(Exception, match="is not served here"):
        pytest.importorskip("langchain_openai").ChatOpenAI(
            base_url=server.v1, api_key="none", model="other", max_retries=0
        ).invoke(ASK)
    with pytest.raises(Exception, match="temperature"):
        llm.bind(temperature=9).invoke(ASK)


class Stay(pydantic.BaseModel):
    """Where somebody stays, and how long."""

    city: Literal["Oslo", "Rome"]
    days: int
    company: bool | None = None


@pytest.mark.parametrize("strict", [True, None])
@pytest.mark.parametrize("method", ["function_calling", "json_schema"])
def test_structured_output(llm: Any, method: str, strict: bool | None) -> None:
    stay = llm.with_structured_output(Stay, method=method, strict=strict).invoke(
        ASK, max_tokens=200
    )
    assert stay.city in ("Oslo", "Rome") and abs(stay.days) < 1 << 53


def test_bound_tools_with_and_without_strict(llm: Any) -> None:
    for strict in (True, None):
        bound = llm.bind_tools([Stay], tool_choice="Stay", strict=strict)
        [call] = bound.invoke(ASK, max_tokens=200).tool_calls
        assert (
            call["name"] == "Stay"
            and set(call["args"]) <= {"city", "days", "company"}
            and Stay(**call["args"])
        )
