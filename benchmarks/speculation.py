"""What speculation saves, and what it costs where it saves nothing: an engine with it and one
without, in this process, in turns.

    python -m benchmarks.speculation
    python -m benchmarks.speculation --draft-model build/storyteller-draft --requests 1,4
    python -m benchmarks.speculation --draft-model build/storyteller-eagle --draft-method eagle
    python -m benchmarks.speculation --forced
    python -m benchmarks.speculation --model ./M2/config.json --chances 0.5,0.7,0.9 --output-len 64

Of the shipped model, or of any with a tokenizer, the methods are measured on prompts of four kinds.
**copy**: a text, and its beginning once more, as in edits and quotations. **again**: the same
requests a second time, as agents and evaluations send them. **prose**: beginnings of stories.
**noise**: any tokens, sampled from the vocabulary. Of a `config.json` weights are random, and the
acceptance is set: `--chances` are the chances that a draft token is right, by a drafter that knows
the answers. With `--forced` answers are JSON with long keys, and what the schema leaves no choice
of is drafted, or nothing is. Answers are compared token by token.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from quire.config.engine import EngineConfig
from quire.config.speculation import SpeculationConfig
from quire.core.params import SamplingParams
from quire.core.request import Sequence as Tokens
from quire.core.speculation.drafters import Draft
from quire.core.speculation.forced import forced_speculator
from quire.core.speculation.methods import speculator_of
from quire.core.speculation.speculator import Speculator
from quire.core.step_cost import StepCostModel
from quire.core.structure import StructuredOutputsParams
from quire.engine.assembly.builder import build_engine
from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine

_BEGINNINGS = (
    "Once upon a time there was a little dog who", "One day, Lily found a red ball in",
    "The sun was warm and Tom wanted to", "In a small house by the sea lived",
    "Mia had a secret. Every night she", "There was a big tree in the garden, and",
    "Ben and his sister went to the park to", "A tiny bird could not fly because",
)  # fmt: skip
_SHORT_TEXT = {"type": "string", "pattern": "^[a-z]{3,8}$"}
_FORM = {
    "type": "object",
    "properties": {
        "name_of_the_animal_in_the_story": _SHORT_TEXT,
        "number_of_friends_it_meets_on_the_way": {"type": "integer", "minimum": 1, "maximum": 9},
        "is_suitable_for_very_young_children": {"type": "boolean"},
        "place_where_the_story_comes_to_its_end": _SHORT_TEXT,
    },
    "required": [
        "name_of_the_animal_in_the_story", "number_of_friends_it_meets_on_the_way",
        "is_suitable_for_very_young_children", "place_where_the_story_comes_to_its_end",
    ],
    "additionalProperties": False,
}  # fmt: skip
_COPY_LEN, _AGAIN_LEN = 150, 24
_MAX_DRAFT = 8
_METHODS = "suffix,ngram,auto"


class SetAcceptance:
    """Implements `Drafter`: knows the answers, and errs so often that a draft is right with a set
    chance."""

    def __init__(self, answers: Mapping[str, list[int]], chance: float, vocab_size: int) -> None:
        self._answers, self._chance, self._vocab_size = answers, chance, vocab_size
        self._random = Random(1)

    def draft(self, sequence: Tokens, most: int) -> Draft:
        """Draft what the answer says, or any token."""
        known = self._answers[sequence.name][sequence.num_output_tokens :][:most]
        return Draft([self._perhaps(token_id) for token_id in known], 1)

    def end(self, sequence: Tokens) -> None:
        """Nothing is kept."""

    def _perhaps(self, token_id: int) -> int:
        is_right = self._random.random() < self._chance
        return token_id if is_right else (token_id + 1) % self._vocab_size


@dataclass(frozen=True)
class Work:
    """Requests that are answered at once."""

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    is_again: bool = False
    """Whether they were answered before, unmeasured."""


@dataclass
class Measured:
    """What came of one engine's turn."""

    seconds: float
    answers: dict[str, list[int]]


_turns = itertools.count()
_clock = time.perf_counter


def measure(engine: Engine, work: Work) -> Measured:
    """Answer all of it. What is remembered of other turns is another tenant's, but where the work
    is to be answered again."""
    engine.reset_prefix_cache()
    salt = "again" if work.is_again else f"turn {next(_turns)}"
    for number, (prompt, params) in enumerate(zip(work.prompts, work.params, strict=True)):
        engine.add_request(f"r{number}", {"prompt_token_ids": prompt, "cache_salt": salt}, params)
    answers: dict[str, list[int]] = {}
    began_s = _clock()
    while engine.has_work:
        for output in engine.step():
            assert isinstance(output, RequestOutput) and output.error is None
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    return Measured(_clock() - began_s, answers)


def _texts(engine: Engine) -> list[list[int]]:
    """Return prompts that are a text and its beginning again: texts of the model, greedy."""
    prompts = _beginnings(engine)
    greedy = SamplingParams(temperature=0.0, max_tokens=_COPY_LEN, ignore_eos=True)
    told = measure(engine, Work("", prompts, [greedy] * len(prompts))).answers
    texts = [prompt + told[f"r{number}"] for number, prompt in enumerate(prompts)]
    return [text + text[:_AGAIN_LEN] for text in texts]


def _beginnings(engine: Engine) -> list[list[int]]:
    assert engine.tokenizer is not None
    return [list(engine.tokenizer.encode(text)) for text in _BEGINNINGS]


def _works(engine: Engine, num_requests: int, output_len: int) -> list[Work]:
    rng, vocab_size = Random(num_requests), engine.plan.spec.vocab_size

    def work(name: str, prompts: list[list[int]], temperature: float) -> Work:
        chosen = [prompts[number % len(prompts)] for number in range(num_requests)]
        params = [
            SamplingParams(
                temperature=temperature, seed=number, max_tokens=output_len, ignore_eos=True
            )
            for number in range(num_requests)
        ]
        return Work(f"{name}, T={temperature:g}", chosen, params)

    noise = [[rng.randrange(vocab_size) for _ in range(60)] for _ in range(num_requests)]
    if engine.tokenizer is None:
        return [work("noise", noise, temperature) for temperature in (0.0, 1.0)]
    copies, prose = _texts(engine), _beginnings(engine)
    return [
        work("copy", copies, 0.0), work("copy", copies, 0.7), work("prose", prose, 0.0),
        work("prose", prose, 1.0), work("noise", noise, 1.0),
        replace(work("again", prose, 0.0), is_again=True),
    ]  # fmt: skip


def _forms(engine: Engine, num_requests: int) -> list[Work]:
    """Return requests for JSON of long keys and short values."""
    prompts = _beginnings(engine)
    chosen = [prompts[number % len(prompts)] for number in range(num_requests)]
    form = StructuredOutputsParams(json=_FORM)
    return [
        Work(
            f"form, T={temperature:g}",
            chosen,
            [
                SamplingParams(
                    temperature=temperature, seed=number, max_tokens=512, structured_outputs=form
                )
                for number in range(num_requests)
            ],
        )
        for temperature in (0.0, 1.0)
    ]


def compare(
    plain: Engine, other: Engine, work: Work, rounds: int, begin: Callable[[Measured], None]
) -> dict[str, Any]:
    """Measure both in turns; `begin` is told the answers, and gives the other one a new speculator.
    Raises AssertionError where they differ."""
    reference = measure(plain, work)
    begin(reference)
    assert measure(other, work).answers == reference.answers, f"{work.name}: other tokens"
    ratios, rates = [], []
    num_tokens = sum(map(len, reference.answers.values()))
    stats = other.scheduler.stats
    before = stats.num_run_tokens, sum(stats.num_right_by_place)
    for place in range(rounds):
        turns = [plain, other] if place % 2 else [other, plain]
        seconds = {engine is other: measure(engine, work).seconds for engine in turns}
        ratios.append(seconds[False] / seconds[True])
        rates.append(num_tokens / seconds[False])
    return {
        "work": work.name,
        "requests": len(work.prompts),
        "tokens_per_s": statistics.median(rates),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "drafted": (stats.num_run_tokens - before[0]) / rounds / num_tokens,
        "right": (sum(stats.num_right_by_place) - before[1]) / rounds / num_tokens,
    }


def _build(args: argparse.Namespace, speculative: dict[str, Any] | None) -> Engine:
    options: dict[str, Any] = {"kv_cache_memory": args.kv_cache_memory, "dtype": args.dtype}
    if args.tokenizer:
        options["tokenizer"] = args.tokenizer
    if args.cpu_time:
        options["num_threads"] = 1
    if args.model.endswith("config.json"):
        options |= {"load_format": "dummy", "skip_tokenizer_init": args.tokenizer is None}
    return build_engine(EngineConfig(model=args.model, speculative_config=speculative, **options))


def _drafting(args: argparse.Namespace) -> tuple[Engine, StepCostModel]:
    """An engine that measures what its steps cost, to draft with any speculator."""
    is_modelled = args.draft_model and not args.chances
    modelled = {"method": args.draft_method, "model": args.draft_model}
    engine = _build(args, modelled if is_modelled else {"method": "suffix"})
    assert engine.scheduler.pace is not None
    return engine, engine.scheduler.pace.model


def _settings(args: argparse.Namespace, method: str) -> dict[str, Any]:
    """What `speculative_config` says of a method; `auto` has the draft model as well."""
    if not args.draft_model:
        return {"method": method}
    found = {"method": method, "model": args.draft_model}
    is_head = method == "auto" and args.draft_method != "draft_model"
    return found | ({"model_method": args.draft_method} if is_head else {})


def _measure_methods(args: argparse.Namespace, plain: Engine) -> list[dict[str, Any]]:
    rows = []
    other, costs = _drafting(args)
    methods = args.methods or (f"{args.draft_method},auto" if args.draft_model else _METHODS)
    for method in methods.split(","):
        config = SpeculationConfig.from_mapping(_settings(args, method))

        def begin(measured: Measured, config: SpeculationConfig = config) -> None:
            other.scheduler.look_ahead = speculator_of(config, costs)

        for num_requests in map(int, args.requests.split(",")):
            for work in _works(plain, num_requests, args.output_len):
                found = compare(plain, other, work, args.rounds, begin)
                rows.append({"method": method, **found})
                _print(rows[-1])
    return rows


def _measure_chances(args: argparse.Namespace, plain: Engine) -> list[dict[str, Any]]:
    rows = []
    other, costs = _drafting(args)
    vocab_size = plain.plan.spec.vocab_size
    for chance in map(float, args.chances.split(",")):
        for num_requests in map(int, args.requests.split(",")):
            for work in _works(plain, num_requests, args.output_len):

                def begin(measured: Measured, chance: float = chance) -> None:
                    drafter = SetAcceptance(measured.answers, chance, vocab_size)
                    other.scheduler.look_ahead = Speculator(drafter, _MAX_DRAFT, costs=costs)

                found = compare(plain, other, work, args.rounds, begin)
                rows.append({"method": f"chance {chance:g}", **found})
                _print(rows[-1])
    return rows


def _measure_forced(args: argparse.Namespace, plain: Engine) -> list[dict[str, Any]]:
    rows = []
    other, costs = _drafting(args)
    plain.scheduler.look_ahead = None

    def begin(measured: Measured) -> None:
        other.scheduler.look_ahead = forced_speculator(costs)

    for num_requests in map(int, args.requests.split(",")):
        for work in _forms(plain, num_requests):
            found = compare(plain, other, work, args.rounds, begin)
            rows.append({"method": "forced", **found})
            _print(rows[-1])
    return rows


def _print(row: dict[str, Any]) -> None:
    print(
        f"{row['method']:12} {row['work']:14} {row['requests']:3} requests: "
        f"{row['tokens_per_s']:7.0f} tokens/s without, {row['ratio']:5.2f}x with; of 100 tokens "
        f"{100 * row['drafted']:.0f} were drafted, {100 * row['right']:.0f} rightly",
        flush=True,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a line for each kind of work."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.speculation"
    )
    parser.add_argument("--model", default="quire-storyteller")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--kv-cache-memory", default="256MiB")
    parser.add_argument(
        "--methods",
        help=f"(default: {_METHODS}, or with a draft model that and auto)",
    )
    parser.add_argument("--draft-model", metavar="PATH", help="measure this one's drafts instead")
    parser.add_argument(
        "--draft-method",
        choices=("draft_model", "eagle", "eagle3"),
        default="draft_model",
        help="what that is (default: draft_model)",
    )
    parser.add_argument("--chances", help="measure a drafter that is right so often instead")
    parser.add_argument(
        "--forced", action="store_true", help="measure what grammars leave no choice of instead"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="(default: the model's own)")
    parser.add_argument("--requests", default="1,4,16", help="(default: 1,4,16)")
    parser.add_argument("--output-len", type=int, default=128, help="(default: 128)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    parser.add_argument(
        "--cpu-time",
        action="store_true",
        help="measure the processor's seconds of one thread: for a machine that others use",
    )
    args = parser.parse_args(argv)
    if args.cpu_time:
        global _clock
        _clock = time.process_time
    plain = _build(args, None)
    measure_all = _measure_methods
    if args.chances or args.forced:
        measure_all = _measure_chances if args.chances else _measure_forced
    rows = measure_all(args, plain)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
