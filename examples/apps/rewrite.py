"""Rewrite a text sentence by sentence, as a translation is made: `python -m examples.apps.rewrite
--instruction "Say it in French:" story.txt`.

All sentences are one batch. Each is given with the instruction and the sentence before it, and a
grammar keeps an answer to one line, so that the result has the lines of the original.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from quire import LLM, SamplingParams
from quire.core.structure import StructuredOutputsParams
from quire.errors import RequestError

ONE_LINE = r"[^\n]{1,300}"


def sentences(text: str) -> list[str]:
    """The sentences of a text, without empty ones."""
    return [part.strip() for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part.strip()]


def messages(instruction: str, before: str, sentence: str) -> list[dict[str, str]]:
    """A chat that asks for one sentence in other words."""
    context = f"(Before it: {before})\n" if before else ""
    return [{"role": "user", "content": f"{instruction}\n{context}{sentence}"}]


def rewrite(llm: LLM, text: str, instruction: str, max_tokens: int = 60) -> list[tuple[str, str]]:
    """Pairs of a sentence and what became of it; a sentence whose answer failed stays."""
    parts = sentences(text)
    chats = [
        messages(instruction, before, part)
        for before, part in zip(["", *parts], parts, strict=False)
    ]
    grammar = StructuredOutputsParams(regex=ONE_LINE)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, structured_outputs=grammar)
    answers = answered(llm, chats, params)
    return [
        (part, part if text is None else text) for part, text in zip(parts, answers, strict=True)
    ]


def answered(
    llm: LLM, chats: Sequence[list[dict[str, str]]], params: SamplingParams
) -> list[str | None]:
    """The answers; None for a chat that has none, or is longer than the context: it is found by
    halves."""
    try:
        outputs = llm.chat(list(chats), params, use_tqdm=False)
    except RequestError:
        half = len(chats) // 2
        if half == 0:
            return [None]
        return [*answered(llm, chats[:half], params), *answered(llm, chats[half:], params)]
    return [each.outputs[0].text.strip() if each.error is None else None for each in outputs]


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite a file, or what comes in."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="default: standard input")
    parser.add_argument("--model", default="quire-storyteller")
    parser.add_argument("--instruction", default="Tell it to a child:")
    args = parser.parse_args(arguments)
    text = sys.stdin.read() if args.file is None else args.file.read_text(encoding="utf-8")
    with LLM(args.model) as llm:
        for before, after in rewrite(llm, text, args.instruction):
            print(f"- {before}\n+ {after}")


if __name__ == "__main__":
    main()
