"""A chat in the terminal, streamed, without a server: `python -m examples.apps.chat_bot`.

Keeps the conversation, and forgets its oldest turns when the model's context is full. An empty line
ends it.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from quire import AsyncLLM, SamplingParams
from quire.errors import RequestError

MAX_ANSWER_TOKENS = 200
Message = dict[str, str]


def fit(llm: AsyncLLM, messages: list[Message], system: list[Message]) -> list[int]:
    """Drop the oldest turns until a whole answer fits; the prompt's tokens."""
    tokenizer = llm.get_tokenizer()
    limit = llm.model_config.max_model_len - MAX_ANSWER_TOKENS
    while True:
        encoded = tokenizer.apply_chat_template(system + messages, add_generation_prompt=True)
        prompt: list[int] = encoded["input_ids"]
        if len(prompt) <= limit or len(messages) == 1:
            return prompt
        del messages[: 2 if len(messages) > 2 else 1]


async def chat(llm: AsyncLLM, lines: Iterable[str], system: str) -> list[Message]:
    """Answer line after line; the conversation that is remembered at the end."""
    instructions = [{"role": "system", "content": system}] if system else []
    messages: list[Message] = []
    for line in lines:
        if not line.strip():
            break
        messages.append({"role": "user", "content": line.strip()})
        prompt = fit(llm, messages, instructions)
        params = SamplingParams(temperature=0.3, max_tokens=MAX_ANSWER_TOKENS, seed=len(messages))
        shown = ""
        try:
            async for output in llm.generate(prompt, params):
                text = output.outputs[0].text
                print(text[len(shown) :], end="", flush=True)
                shown = text
        except RequestError as error:  # such as a line that is longer than the context
            print(error)
            messages.pop()
            continue
        print()
        messages.append({"role": "assistant", "content": shown})
    return messages


def typed() -> Iterable[str]:
    """Lines from the keyboard, until it ends."""
    with suppress(EOFError):
        while True:
            yield input("> ")


def main(arguments: Sequence[str] | None = None, lines: Iterable[str] | None = None) -> None:
    """Load the model and chat."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="quire-storyteller")
    parser.add_argument("--system", default="", help="instructions for the model")
    args = parser.parse_args(arguments)
    llm = AsyncLLM(args.model)
    try:
        asyncio.run(chat(llm, typed() if lines is None else lines, args.system))
    finally:
        llm.close()


if __name__ == "__main__":
    main()
