"""An agent with tools: `python -m examples.apps.agent "What is the weather in Paris?"` beside
`quire serve --port 8000`. Runs what the model calls until it answers. Needs the package openai.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import Any

from openai import OpenAI


def get_weather(city: str) -> str:
    """Get the weather of a city."""
    return {"Paris": "sunny", "London": "rainy", "Oslo": "snow"}.get(city, "not found")


def find_birthday(name: str) -> str:
    """Find the birthday of a person."""
    return {"Anna": "in May", "Tom": "tomorrow"}.get(name, "not found")


TOOLS: dict[str, Callable[..., str]] = {t.__name__: t for t in (get_weather, find_birthday)}


def declared(tool: Callable[..., str]) -> dict[str, Any]:
    """A function as the API wants it declared: all of its arguments are texts."""
    texts = {
        name: {"type": "string", "maxLength": 40}
        for name in tool.__annotations__
        if name != "return"
    }
    schema = {"type": "object", "properties": texts, "required": list(texts)}
    named = {"name": tool.__name__, "description": tool.__doc__}
    return {"type": "function", "function": {**named, "parameters": schema}}


def run(name: str, arguments: str) -> str:
    """The result of a call, or what is wrong with it."""
    try:
        return TOOLS[name](**json.loads(arguments))
    except (KeyError, TypeError, ValueError) as error:
        return f"failed: {error!r}"


def ask(client: Any, question: str, max_calls: int = 3) -> list[Any]:
    """The conversation about a question, which begins with a call."""
    model, messages = client.models.list().data[0].id, [{"role": "user", "content": question}]
    tools, choice = [declared(tool) for tool in TOOLS.values()], "required"
    for _ in range(max_calls):
        answered = client.chat.completions.create(
            model=model, messages=messages, tools=tools, tool_choice=choice,
            max_tokens=120, parallel_tool_calls=False,
        )  # fmt: skip
        answer = answered.choices[0].message
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or []:
            result = run(call.function.name, call.function.arguments)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if answered.choices[0].finish_reason != "tool_calls":
            break
        choice = "auto"
    return messages


def main(arguments: Sequence[str] | None = None) -> None:
    """Ask, and show the conversation."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("question")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    args = parser.parse_args(arguments)
    for message in ask(OpenAI(base_url=args.url, api_key="none"), args.question):
        print(f"{message['role']}: {message.get('content') or json.dumps(message['tool_calls'])}")


if __name__ == "__main__":
    main()
