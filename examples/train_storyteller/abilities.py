"""What a model can do besides telling one story: name what composed requests ask for, vary, call
tools, fill objects. All of it on requests that it was not trained on.

Owns the counts; the answers come from Quire's own engine:
`python -m examples.train_storyteller.abilities --requests 100`. `--stories FILE` writes the first
answers to random requests, none left out, as a page.
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams
from quire.core.structure import StructuredOutputsParams

from .answers import ask, ask_all
from .grammar import GrammarTale, StoryGrammar
from .tales import TaleComposer
from .tasks import CALL_BEGIN, CALL_END, draw_call, draw_object

GRAM_WORDS = 6
UNSEEN_NOUNS = (
    "pineapple", "trombone", "stapler", "cowbell", "drainpipe", "suitcase", "lawnmower", "cupboard",
    "milkshake", "grandson",
)  # fmt: skip
"""Values of arguments and keys that no training data has (`kinds.STRANGE_HEROES`)."""


def composed_requests(count: int) -> list[GrammarTale]:
    """Requests with several things in them, of combinations that were never trained on."""
    composer, rng = TaleComposer(is_held_out=True), random.Random(2)
    return [composer.draw(rng) for _ in range(count)]


def repeated_share(texts: Sequence[str]) -> float:
    """How much of a text is also in the one other that is nearest to it, of their runs of six
    words, on average: 1 where each is told twice, word for word."""
    runs = [_runs(text) for text in texts]
    shares = [
        max((len(each & other) for other in runs if other is not each), default=0) / len(each)
        for each in runs
        if each
    ]
    return sum(shares) / max(len(shares), 1)


def _runs(text: str) -> set[tuple[str, ...]]:
    words = re.findall(r"[a-z']+", text.lower())
    return set(zip(*(words[start:] for start in range(GRAM_WORDS)), strict=False))


def declared(name: str, description: str, argument: str) -> dict[str, Any]:
    """A tool as the API declares it."""
    schema = {
        "type": "object",
        "properties": {argument: {"type": "string"}},
        "required": [argument],
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


def count_calls(llm: LLM, count: int) -> tuple[int, int]:
    """Of requests with one to three tools, none seen in training: (answers that call the right
    tool, and with the right argument too)."""
    rng = random.Random(3)
    drawn = [draw_call(rng, UNSEEN_NOUNS, is_held_out=True) for _ in range(count)]
    right_tools = right_calls = 0
    params = SamplingParams(temperature=0.0, max_tokens=80)
    for tools, request, tool, value in drawn:
        shown = [declared(each.name, each.description, each.argument) for each in tools]
        chat: Any = [{"role": "user", "content": request}]
        [output] = llm.chat(chat, params, use_tqdm=False, tools=shown)
        call = _call_in(output.outputs[0].text)
        right_tools += call.get("name") == tool.name
        right_calls += call == {"name": tool.name, "arguments": {tool.argument: value}}
    return right_tools, right_calls


def _call_in(text: str) -> dict[str, Any]:
    """The one call of an answer that is nothing else; {} where there is none."""
    stripped = text.strip()
    if not stripped.startswith(CALL_BEGIN) or not stripped.endswith(CALL_END):
        return {}
    try:
        call = json.loads(stripped[len(CALL_BEGIN) : -len(CALL_END)])
    except ValueError:
        return {}
    return call if isinstance(call, dict) else {}


def count_objects(llm: LLM, count: int) -> tuple[int, int, int]:
    """Of objects to read from a text, under their schema: (objects that are right, values that are
    right, values)."""
    rng = random.Random(4)
    drawn = [draw_object(rng, UNSEEN_NOUNS, is_made_up=False) for _ in range(count)]
    right = right_values = num_values = 0
    for exchange, record in drawn:
        request = exchange.head.partition("\n")[2].partition("<|im_end|>")[0]
        schema = {
            "type": "object",
            "properties": {
                key: {"type": "integer" if isinstance(value, int) else "string"}
                for key, value in record.items()
            },
            "required": list(record),
            "additionalProperties": False,
        }
        grammar = StructuredOutputsParams(json=schema)
        params = SamplingParams(temperature=0.0, max_tokens=100, structured_outputs=grammar)
        chat: Any = [{"role": "user", "content": request}]
        [output] = llm.chat(chat, params, use_tqdm=False)
        text = output.outputs[0].text
        found = json.loads(text) if output.outputs[0].finish_reason == "stop" else {}
        same = sum(found.get(key) == value for key, value in record.items())
        right, right_values = right + (same == len(record)), right_values + same
        num_values += len(record)
    return right, right_values, num_values


def write_stories(llm: LLM, path: Path, count: int) -> None:
    """The answers to random requests of both grammars, none left out or chosen, as a page."""
    rng = random.Random(5)
    sources = (StoryGrammar(is_held_out=True), TaleComposer(is_held_out=True))
    tales = [sources[number % 2].draw(rng) for number in range(count)]
    lines = [
        f"# {count} stories, not chosen",
        "",
        "The first answers of the shipped model to random requests of combinations that it was not "
        "trained on, with its own settings, its number as the seed, none left out: `python -m "
        "examples.train_storyteller.abilities --stories FILE` writes this page. ✓ marks answers "
        "that name everything in the request.",
    ]
    for number, (tale, answer) in enumerate(zip(tales, ask(llm, tales, None), strict=True), 1):
        mark = " ✓" if tale.is_named_in(answer) else ""
        quoted = "\n".join(f"> {line}".rstrip() for line in answer.strip().splitlines())
        lines += ["", f"**{number}. Tell me a story about {tale.topic}.**{mark}", "", quoted]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("quire/assets/quire-storyteller"))
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--stories", type=Path, help="write answers as a page, and count nothing")
    arguments = parser.parse_args()
    with LLM(
        str(arguments.model), max_model_len=512, kv_cache_memory="256MiB", num_threads=1
    ) as llm:
        if arguments.stories is not None:
            write_stories(llm, arguments.stories, 50)
            return
        number = arguments.requests
        tales = composed_requests(number)
        answers = ask(llm, tales, None)
        hits = sum(tale.is_named_in(text) for tale, text in zip(tales, answers, strict=True))
        print(f"requests with several things: {hits} of {number} name all")
        same = ask_all(llm, ["Tell me a story."] * number)
        print(f"of a story, shared with the nearest other: {repeated_share(answers):.0%}")
        print(f"the same, of {number} answers to one request: {repeated_share(same):.0%}")
        tools, calls = count_calls(llm, number)
        print(f"tools: {tools} of {number} right, {calls} with the right argument")
        whole, values, total = count_objects(llm, number)
        print(f"objects: {whole} of {number} right, {values} of {total} values")


if __name__ == "__main__":
    main()
