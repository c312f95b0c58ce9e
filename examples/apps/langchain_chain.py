"""A LangChain chain against a running server: `python -m examples.apps.langchain_chain fox owl`
beside `quire serve --port 8000`. Needs the package langchain-openai.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI
from pydantic import SecretStr


def chain(url: str, model: str = "quire-storyteller") -> Any:
    """A prompt, the model and a parser: `{"hero": ...}` to a story's text."""
    prompt = ChatPromptTemplate.from_messages([("user", "Tell me a story about a {hero}.")])
    options: Any = {"temperature": 0.0, "max_completion_tokens": 60}
    llm = ChatOpenAI(base_url=url, api_key=SecretStr("none"), model=model, **options)
    return prompt | llm | StrOutputParser()


def main(arguments: Sequence[str] | None = None) -> None:
    """One story streamed, the others as a batch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("hero", nargs="+")
    parser.add_argument("--url", default="http://localhost:8000/v1")
    args = parser.parse_args(arguments)
    stories = chain(args.url)
    for piece in stories.stream({"hero": args.hero[0]}):
        print(piece, end="", flush=True)
    print()
    for story in stories.batch([{"hero": hero} for hero in args.hero[1:]]):
        print(f"\n{story}")


if __name__ == "__main__":
    main()
