"""Does the model tell what it was asked for? The share of answers that name everything in an unseen
request.

Owns the requests and the count. The answers come from Quire's own engine, so this also shows how to
ask for many at once:
`python -m examples.train_storyteller.answers --requests 200 --temperature 0.35`
"""

import argparse
import random
from collections import Counter
from pathlib import Path

from quire import LLM, SamplingParams

from .grammar import GrammarTale, StoryGrammar
from .kinds import STRANGE_HEROES

MAX_TOKENS = 420


def strange_tales() -> list[GrammarTale]:
    return [GrammarTale(f"a {hero}", (hero,), "", "", ()) for hero in STRANGE_HEROES]


def ask(llm: LLM, tales: list[GrammarTale], temperature: float | None) -> list[str]:
    """The answer to the request of each tale; without a temperature
    with the model's own settings."""
    return ask_all(llm, [f"Tell me a story about {tale.topic}." for tale in tales], temperature)


def ask_all(llm: LLM, requests: list[str], temperature: float | None = None) -> list[str]:
    """The answer to each request. Each has a seed of its own: its number."""
    params = llm.get_default_sampling_params()
    heat = params.temperature if temperature is None else temperature
    asked = [
        SamplingParams(
            temperature=heat, top_k=params.top_k, top_p=params.top_p, max_tokens=MAX_TOKENS, seed=n
        )
        for n in range(len(requests))
    ]
    chats = [[{"role": "user", "content": request}] for request in requests]
    return [output.outputs[0].text for output in llm.chat(chats, asked, use_tqdm=False)]


def kind_of_request(tale: GrammarTale) -> str:
    if not tale.plot:
        return "a hero that was never seen"
    if " who " in tale.topic or " that " in tale.topic:
        return "a hero who does something"
    return "two topics" if " and " in tale.topic else "one topic"


def count(tales: list[GrammarTale], answers: list[str]) -> dict[str, tuple[int, int]]:
    """By kind of request: (answers that name all that was asked for, requests)."""
    hits, totals = Counter[str](), Counter[str]()
    for tale, answer in zip(tales, answers, strict=True):
        for label in (kind_of_request(tale), "all" if tale.plot else ""):
            totals[label] += 1
            hits[label] += tale.is_named_in(answer)
    return {label: (hits[label], totals[label]) for label in sorted(totals) if label}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("quire/assets/quire-storyteller"))
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument(
        "--seed", type=int, default=1, help="other requests, to choose between weights by"
    )
    parser.add_argument("--temperature", type=float, help="instead of the model's own")
    parser.add_argument(
        "--show-missed", action="store_true", help="print the answers that miss something"
    )
    arguments = parser.parse_args()
    grammar, rng = StoryGrammar(is_held_out=True), random.Random(arguments.seed)
    tales = [grammar.draw(rng) for _ in range(arguments.requests)] + strange_tales()
    with LLM(
        str(arguments.model), max_model_len=512, kv_cache_memory="256MiB", num_threads=1
    ) as llm:
        answers = ask(llm, tales, arguments.temperature)
    for label, (num_hits, total) in count(tales, answers).items():
        print(f"{label}: {num_hits} of {total}, {num_hits / total:.0%}")
    if arguments.show_missed:
        for tale, answer in zip(tales, answers, strict=True):
            if not tale.is_named_in(answer):
                print(f"--- {tale.topic} {tale.named}\n{answer[:300]}\n")


if __name__ == "__main__":
    main()
