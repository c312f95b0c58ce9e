"""What becomes of preempted sequences: swapped, recomputed, or whichever costs less, in turns.

    python -m benchmarks.swap --model ./folder --runs runs.jsonl --rounds 3

As many requests come at once as `--requests` says, into a pool that holds a third of what they come
to, so that they are preempted as they grow. **recompute** is an engine without tiers. **swap** and
**policy** are one with host memory behind the pool: the first restores whatever it can, the second
compares the costs. Each round runs them on the same lengths, and who begins changes with each.
Throughput is output tokens over the time from the first request to the last token, and over the
processor time meanwhile and until all copies are made, which other programs disturb less.

Every run is a line of `--runs`, so that the command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from quire.common.numbers import ceil_div
from quire.config.engine import EngineConfig
from quire.core.params import SamplingParams
from quire.core.scheduler.tiers import RestoreCosts, stored_prefixes, stored_stats
from quire.engine.assembly.builder import build_engine
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine
from quire.errors import EngineError

RECOMPUTE, SWAP, POLICY = POLICIES = ("recompute", "swap", "policy")
MIXES = {
    "short": ((24, 72),),
    "long answers": ((48, 192),),
    "long prompts": ((320, 160),),
    "mixed": ((24, 72), (48, 192), (320, 160)),
}
"""Tokens of prompts and answers, by turns."""


class AlwaysRestore(RestoreCosts):
    """Costs by which restoring always pays; what is measured meanwhile is learnt by the others."""

    def __init__(self, real: RestoreCosts) -> None:
        self._real, self.max_blocks = real, real.max_blocks

    def compute_s(self, start: int, num_tokens: int) -> float:
        return self._real.compute_s(start, num_tokens)

    def restore_s(self, num_blocks: int) -> float:
        return 0.0

    def observe(self, num_blocks: int, seconds: float) -> None:
        self._real.observe(num_blocks, seconds)


@dataclass(frozen=True)
class Run:
    """One policy on one mix."""

    mix: str
    round: int
    policy: str
    seconds: float
    processor_s: float
    """Of this process."""
    num_tokens: int
    num_preemptions: int
    num_restored_blocks: int


def _lengths(mix: str, num_requests: int) -> list[tuple[int, int]]:
    kinds = MIXES[mix]
    return [kinds[number % len(kinds)] for number in range(num_requests)]


def _start(args: argparse.Namespace, mix: str, *, has_tier: bool) -> Engine:
    """Start an engine whose pool holds a third of a mix."""
    config = EngineConfig(
        model=args.model,
        load_format="auto" if list(Path(args.model).glob("*.safetensors")) else "dummy",
        dtype=args.dtype,
        quantization=args.quantization,
        skip_tokenizer_init=True,
        num_threads=args.threads,
        kv_offloading_size=1.0 if has_tier else None,
    )
    plan = prepare_model(config).planned.plan
    size, block_bytes = plan.limits.block_size, plan.kv_bytes // plan.limits.num_blocks
    lengths = _lengths(mix, args.requests)
    num_blocks = sum(ceil_div(prompt + output, size) for prompt, output in lengths) // args.memory
    longest = max(ceil_div(prompt + output, size) for prompt, output in lengths) + 1
    return build_engine(replace(config, kv_cache_memory=max(num_blocks, longest) * block_bytes))


def _run(engine: Engine, args: argparse.Namespace, mix: str, number: int, policy: str) -> Run:
    """Serve a mix."""
    tiers = stored_prefixes(engine.scheduler.admission.prerequisites)
    real = None if tiers is None else tiers.costs
    if tiers is not None and real is not None and policy == SWAP:
        tiers.costs = AlwaysRestore(real)
    random = Random(f"{mix} {number} {policy}")
    before = stored_stats(engine.scheduler.admission.prerequisites).num_restored_blocks
    num_preemptions = engine.scheduler.stats.num_preemptions
    started, started_busy = time.perf_counter(), time.process_time()
    for place, (prompt_len, max_tokens) in enumerate(_lengths(mix, args.requests)):
        prompt = [random.randrange(10, args.vocab_size) for _ in range(prompt_len)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(f"{mix}-{number}-{place}", {"prompt_token_ids": prompt}, params)
    num_tokens = 0
    while engine.has_work:
        for output in engine.step():
            if isinstance(output, RequestOutput) and output.finished:
                if output.error is not None:
                    raise EngineError(f"request {output.request_id} failed: {output.error}")
                num_tokens += len(output.outputs[0].token_ids)
    seconds = time.perf_counter() - started
    while engine.idle():
        pass
    processor_s = time.process_time() - started_busy
    if tiers is not None and real is not None:
        tiers.costs = real
    restored = stored_stats(engine.scheduler.admission.prerequisites).num_restored_blocks
    num_preemptions = engine.scheduler.stats.num_preemptions - num_preemptions
    return Run(
        mix,
        number,
        policy,
        seconds,
        processor_s,
        num_tokens,
        num_preemptions,
        restored - before,
    )


def measure(args: argparse.Namespace, known: Sequence[Run]) -> Iterator[Run]:
    """Yield the runs that are not known, the rounds of a mix one behind the other."""
    done = {(run.mix, run.round, run.policy) for run in known}
    for mix in args.mixes.split(","):
        missing = [
            (number, policy)
            for number in range(args.rounds)
            for policy in (POLICIES if number % 2 else reversed(POLICIES))
            if (mix, number, policy) not in done
        ]
        if not missing:
            continue
        with ExitStack() as stack:
            engines = {has_tier: _start(args, mix, has_tier=has_tier) for has_tier in (False, True)}
            for engine in engines.values():
                stack.callback(engine.close)
                _run(engine, args, mix, -1, POLICY)  # teaches it what steps cost
            for number, policy in missing:
                yield _run(engines[policy != RECOMPUTE], args, mix, number, policy)


def table(runs: Sequence[Run]) -> list[str]:
    """Return medians of each mix."""
    lines = [
        f"{'mix':14} {'rounds':>6} {'recompute':>10} {'swap':>10} {'policy':>10} "
        f"{'policy/recompute':>17} {'policy/better':>14} {'preemptions':>14} {'restored':>9}"
    ]
    for mix in dict.fromkeys(run.mix for run in runs):
        mine = [run for run in runs if run.mix == mix]
        of_policy = {policy: [run for run in mine if run.policy == policy] for policy in POLICIES}
        if not all(of_policy.values()):
            continue
        preempted = "/".join(
            f"{statistics.median(run.num_preemptions for run in each):.0f}"
            for each in of_policy.values()
        )
        restored = statistics.median(run.num_restored_blocks for run in of_policy[POLICY])
        by_clock = {
            policy: statistics.median(run.num_tokens / run.seconds for run in each)
            for policy, each in of_policy.items()
        }
        by_processor = {
            policy: statistics.median(run.num_tokens / run.processor_s for run in each)
            for policy, each in of_policy.items()
        }
        start = f"{mix:14} {len(of_policy[POLICY]):6}"
        lines.append(f"{start} {_ratios(by_clock)} {preempted:>14} {restored:9.0f}")
        lines.append(f"{'':21} {_ratios(by_processor)} (by processor time)")
    return lines


def _ratios(rates: Mapping[str, float]) -> str:
    best = max(rates[RECOMPUTE], rates[SWAP])
    return (
        f"{rates[RECOMPUTE]:10.2f} {rates[SWAP]:10.2f} {rates[POLICY]:10.2f} "
        f"{rates[POLICY] / rates[RECOMPUTE]:16.3f}x {rates[POLICY] / best:13.3f}x"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print a table of all."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.swap"
    )
    parser.add_argument("--model", required=True, help="a folder; without weights, random ones")
    parser.add_argument("--vocab-size", type=int, default=151936, help="(default: 151936)")
    parser.add_argument("--dtype", default="bfloat16", help="(default: bfloat16)")
    parser.add_argument("--quantization", help="of the weights (default: none)")
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument("--requests", type=int, default=9, help="at once (default: 9)")
    parser.add_argument(
        "--memory", type=int, default=3, help="one part of so many is the pool (default: 3)"
    )
    parser.add_argument("--mixes", default=",".join(MIXES), help="(default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--runs", type=Path, required=True, help="where runs are kept")
    args = parser.parse_args(argv)
    if unknown := set(args.mixes.split(",")) - MIXES.keys():
        parser.error(f"--mixes: there is no {', '.join(sorted(unknown))}; there are {list(MIXES)}")
    lines = args.runs.read_text().splitlines() if args.runs.exists() else []
    runs = [Run(**json.loads(line)) for line in lines]
    for run in measure(args, runs):
        runs.append(run)
        with args.runs.open("a") as file:
            file.write(json.dumps(_record(run)) + "\n")
        print(run, file=sys.stderr, flush=True)
    print("\n".join(table(runs)))
    return 0


def _record(run: Run) -> dict[str, Any]:
    return {name: getattr(run, name) for name in Run.__dataclass_fields__}


if __name__ == "__main__":
    sys.exit(main())
