"""Completion as an editor asks for it: `python -m examples.apps.complete "Once upon a time there"`.

Gives a few ways to go on to the end of the line, the likeliest first. While a text grows, its start
is found in the prefix cache, so each keystroke computes the new tokens only.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from quire import LLM, SamplingParams

CONTEXT_CHARS = 1200
"""Of the text before the cursor: what is further away rarely matters, and costs time."""


class Completion(NamedTuple):
    """A way to go on."""

    text: str
    logprob: float
    """Mean per token, in nats: 0 is certain."""


def complete(llm: LLM, before: str, count: int = 3, max_tokens: int = 12) -> list[Completion]:
    """Different ways to go on from the cursor, the likeliest first."""
    params = SamplingParams(
        n=count, temperature=0.7, top_p=0.9, max_tokens=max_tokens, stop=["\n"], logprobs=0, seed=1
    )
    prompt = before[-CONTEXT_CHARS:]
    [output] = llm.generate(prompt, params, use_tqdm=False)
    best: dict[str, float] = {}
    for each in output.outputs:
        mean = (each.cumulative_logprob or 0.0) / max(len(each.token_ids), 1)
        if each.text.strip():
            best[each.text] = max(mean, best.get(each.text, mean))
    found = [Completion(text, logprob) for text, logprob in best.items()]
    return sorted(found, key=lambda each: -each.logprob)


def main(arguments: Sequence[str] | None = None) -> None:
    """Complete each of the texts, as if they were typed one after the other."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", nargs="+", help="what stands before the cursor")
    parser.add_argument("--model", default="quire-storyteller")
    parser.add_argument("--count", type=int, default=3)
    args = parser.parse_args(arguments)
    with LLM(args.model, enable_prefix_caching=True) as llm:
        for text in args.text:
            print(text)
            for each in complete(llm, text, args.count):
                print(f"  {each.logprob:6.2f} {each.text}")


if __name__ == "__main__":
    main()
