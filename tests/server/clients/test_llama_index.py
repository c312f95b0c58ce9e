"""LlamaIndex's `OpenAILike` pointed at the server."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

import pytest
from servers import MODEL, RunningServer

ASK = "Tell me of a cat."


def _llm(server: RunningServer, **options: Any) -> Any:
    chosen = {
        "model": MODEL,
        "is_chat_model": True,
        "temperature": 0.0,
        "max_tokens": 8,
        "max_retries": 0,
        "timeout": 30.0,
    }
    # imported by the one worker that needs it: that takes seconds
    openai_like = pytest.importorskip("llama_index.llms.openai_like")
    return openai_like.OpenAILike(
        api_base=server.v1, api_key="none", context_window=512, **{**chosen, **options}
    )


def test_completions_of_both_kinds_and_their_streams(server: RunningServer) -> None:
    for is_chat in (True, False):
        llm = _llm(server, is_chat_model=is_chat)
        whole = llm.complete(ASK)
        assert whole.text and whole.raw.usage.completion_tokens == 8
        streamed = list(llm.stream_complete(ASK))
        assert streamed[-1].text == whole.text == "".join(each.delta or "" for each in streamed)


def test_chats_their_streams_and_asyncio(server: RunningServer) -> None:
    llm = _llm(server)
    message = importlib.import_module("llama_index.core.llms").ChatMessage
    messages = [message(role="system", content="Be brief."), message(role="user", content=ASK)]
    whole = llm.chat(messages).message.content
    assert whole and [*llm.stream_chat(messages)][-1].message.content == whole

    async def ask() -> list[Any]:
        answers = await asyncio.gather(llm.achat(messages), llm.achat(messages))
        streamed = [each async for each in await llm.astream_chat(messages)]
        await llm._get_aclient().close()
        return [*(each.message.content for each in answers), streamed[-1].message.content]

    assert asyncio.run(ask()) == [whole] * 3


def test_a_mistake_is_an_exception_with_our_words(server: RunningServer) -> None:
    llm = _llm(server, model="other")
    with pytest.raises(Exception, match="is not served here"):
        llm.complete(ASK)
