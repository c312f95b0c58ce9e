"""A page to chat with a running server, by Gradio: `python -m examples.apps.gradio_page` beside
`quire serve --port 8000`. Needs the packages gradio and openai.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from openai import OpenAI


def answer(client: OpenAI, message: str, history: Sequence[dict[str, Any]]) -> Iterator[str]:
    """The answer so far, again and again as it grows."""
    kept = [{"role": each["role"], "content": each["content"]} for each in history]
    messages: Any = [*kept, {"role": "user", "content": message}]
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id, messages=messages, max_tokens=200, stream=True
    )
    text = ""
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        yield text


def page(url: str) -> Any:
    """The page; `launch()` serves it."""
    import gradio

    client = OpenAI(base_url=url, api_key="none")

    def chat(message: str, history: list[dict[str, Any]]) -> Iterator[str]:
        yield from answer(client, message, history)

    return gradio.ChatInterface(
        chat,
        title="Quire",
        examples=["Tell me a story about a fox.", "Tell me a story about a king and a dragon."],
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve the page on this machine."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", default="http://localhost:8000/v1")
    args = parser.parse_args(arguments)
    page(args.url).launch(server_name="127.0.0.1")


if __name__ == "__main__":
    main()
