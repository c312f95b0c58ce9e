"""LlamaIndex against a running server: `python -m examples.apps.llama_index_chat "Tell me a story
about a fox."` beside `quire serve --port 8000`. Needs the package llama-index-llms-openai-like.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def model(url: str, name: str = "quire-storyteller") -> Any:
    """The server's model; its context is needed because LlamaIndex cannot know it."""
    return OpenAILike(
        api_base=url, api_key="none", model=name, is_chat_model=True, context_window=512,
        temperature=0.0, max_tokens=60,
    )  # fmt: skip


def stream(llm: Any, question: str, system: str = "") -> Iterator[str]:
    """The pieces of an answer."""
    messages = [ChatMessage(role="system", content=system)] if system else []
    for part in llm.stream_chat([*messages, ChatMessage(role="user", content=question)]):
        yield part.delta or ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask and show the answer as it comes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("question")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    args = parser.parse_args(arguments)
    for piece in stream(model(args.url), args.question):
        print(piece, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
