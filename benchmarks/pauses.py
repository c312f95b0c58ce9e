"""How long a running stream stops while a long prompt is computed, and what shorter steps cost:
steps bounded by time beside steps of fixed token budgets, one server each, in turns.

    python -m benchmarks.pauses --model ./folder --vocab-size 151936 --budgets 256,512,2048 --rounds
    3

Each round asks every server three things. **Alone**: a prompt of 3,500 tokens. **Beside**: one
client streams, and a prompt of 3,500 tokens comes; then the same with a prompt of 50 right behind
it. The figures are the stream's longest gap of both, the time to the long prompt's first token in
the first, and that to the short one's in the second.
**Burst**: workload W6, 32 streaming clients with two requests each. Weights are random, prompts are
token ids that no earlier request had. Figures are medians over the rounds; the gap is the longest
of all.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.servers import Launch, metric, report, running
from benchmarks.serving import DEADLINE_S, check, run_clients
from quire.bench.serving.dataset import ServeRequest
from quire.bench.serving.exchange import RequestTimeline, Target
from quire.bench.workload import WORKLOADS
from quire.common.http_client import HttpClient

_STREAM_OUTPUT = 160
"""Tokens of the running stream; it must outlast the long prompt,
which takes at most some 60 steps."""
_SEEN_BEFORE = 8
"""Tokens that have come when the long prompt is sent."""
_BEHIND_S = 0.05
_POLL_S = 0.002
_BODY = {"return_token_ids": True}
"""A model without a tokenizer has no texts to stream, but ids."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.pauses"
    )
    parser.add_argument(
        "--model", required=True, help="folder, or config.json; weights are made up"
    )
    parser.add_argument(
        "--vocab-size", type=int, required=True, help="token ids are drawn below it"
    )
    parser.add_argument("--target-step-ms", type=float, default=200.0, help="(default: 200)")
    parser.add_argument(
        "--budgets",
        default="256,512,2048",
        help="fixed budgets to compare with (default: 256,512,2048)",
    )
    parser.add_argument(
        "--long", type=int, default=3500, help="tokens of the long prompt (default: 3500)"
    )
    parser.add_argument(
        "--short", type=int, default=50, help="tokens of the short prompt (default: 50)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument("--no-burst", action="store_true", help="leave W6 out")
    parser.add_argument(
        "--option", action="append", default=[], metavar="TEXT", help="of each server (repeatable)"
    )
    parser.add_argument("--json", type=Path, help="write all rounds to a file")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(running(launch)) for name, launch in _launches(args).items()
        }
        rounds = [
            {"server": name, **_measure(server.url, number, args)}
            for number in range(-1, args.rounds)
            for name, server in servers.items()
        ]
        metrics = {name: _step_metrics(server.metrics()) for name, server in servers.items()}
    measured = [each for each in rounds if each["round"] >= 0]
    report(
        {"rounds": rounds, "metrics": metrics, "options": args.option},
        _table(measured, metrics),
        args.json,
    )
    return 0


def _launches(args: argparse.Namespace) -> dict[str, Launch]:
    common = ["--load-format", "dummy", "--kv-cache-memory", "1GiB", *args.option]
    options = {f"target {args.target_step_ms:g} ms": ["--target-step-ms", str(args.target_step_ms)]}
    for budget in map(int, args.budgets.split(",")):
        fixed = [
            "--target-step-ms",
            "0",
            "--max-num-partial-prefills",
            "1",
            "--max-num-seqs",
            str(min(256, budget)),
        ]
        options[f"budget {budget}"] = [*fixed, "--max-num-batched-tokens", str(budget)]
    return {
        name: Launch("quire", args.model, [*common, *own], num_threads=args.threads)
        for name, own in options.items()
    }


def _measure(url: str, number: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one round; round -1 is a short one that warms up and is not counted."""
    found = {"round": number, **asyncio.run(_latencies(url, number, args))}
    if number >= 0 and not args.no_burst:
        requests = WORKLOADS["W6"].requests(1000 + number, args.vocab_size)
        burst = run_clients(url, None, requests, 32, _BODY)
        found |= {
            "burst_tokens_per_s": burst["output_tokens_per_s"],
            "burst_first_s": burst["ttft_s"]["p50"],
        }
    return found


async def _latencies(url: str, number: int, args: argparse.Namespace) -> dict[str, float]:
    random = Random(f"{number} {url}")

    def request(num_prompt: int, num_output: int) -> ServeRequest:
        prompt = [random.randrange(args.vocab_size) for _ in range(num_prompt)]
        return ServeRequest(prompt, num_output)

    async with HttpClient(url, timeout_s=DEADLINE_S) as client:
        target = Target(client, None, body=_BODY)
        found = {"alone_s": await _first_token_s(target, request(args.long, 1))}
        if number < 0:
            return found
        stream, long = request(64, _STREAM_OUTPUT), request(args.long, 1)
        found |= await _beside(target, stream, long)
        short = request(args.short, 1)
        both = await _beside(target, stream, request(args.long, 1), short)
        return found | {"gap_s": max(found["gap_s"], both["gap_s"]), "short_s": both["short_s"]}


async def _first_token_s(target: Target, request: ServeRequest) -> float:
    seen = RequestTimeline(0.0)
    await target.exchange(request, seen)
    check(seen)
    return seen.ttft_s


async def _beside(
    target: Target, stream: ServeRequest, long: ServeRequest, short: ServeRequest | None = None
) -> dict[str, float]:
    """Run a stream, a long prompt that comes while it runs, and a short prompt behind that.

    The long prompt is timed without the short one, which fixed budgets compute behind it.
    """
    streamed, found = RequestTimeline(0.0), {}
    async with asyncio.timeout(DEADLINE_S), asyncio.TaskGroup() as group:
        group.create_task(target.exchange(stream, streamed))
        while len(streamed.token_s) < _SEEN_BEFORE:
            if streamed.status:
                raise RuntimeError(f"the stream ended after {len(streamed.token_s)} events")
            await asyncio.sleep(_POLL_S)
        sent_s = time.perf_counter()
        computing = group.create_task(_first_token_s(target, long))
        if short is not None:
            await asyncio.sleep(_BEHIND_S)
            found["short_s"] = await _first_token_s(target, short)
        found["long_s"] = await computing
        end_s = time.perf_counter()
    check(streamed)
    gaps = [
        after - before
        for before, after in itertools.pairwise(streamed.token_s)
        if after > sent_s and before < end_s
    ]
    return {"gap_s": max(gaps), **found}


def _step_metrics(text: str) -> dict[str, float]:
    """Predicted and measured durations of the steps that were bounded by time."""
    return {
        "measured_s": metric(text, "quire:step_time_seconds_sum"),
        "predicted_s": metric(text, "quire:step_predicted_seconds_total"),
        "misjudged_s": metric(text, "quire:step_misjudged_seconds_total"),
    }


def _table(rounds: Sequence[dict[str, Any]], metrics: dict[str, dict[str, float]]) -> list[str]:
    lines = [
        (
            "| server | longest gap s | long prompt s | short prompt s | long prompt alone s | "
            "W6 tokens/s | W6 first token s |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    for name in metrics:
        mine = [each for each in rounds if each["server"] == name]

        def middle(key: str, mine: list[dict[str, Any]] = mine) -> str:
            values = [each[key] for each in mine if key in each]
            return f"{statistics.median(values):.2f}" if values else "-"

        keys = ("long_s", "short_s", "alone_s", "burst_tokens_per_s", "burst_first_s")
        lines.append(
            f"| {name} | {max(each['gap_s'] for each in mine):.2f} | "
            f"{' | '.join(map(middle, keys))} |"
        )
    for name, seen in metrics.items():
        if seen["measured_s"]:
            lines.append(
                f"{name}: steps of {seen['measured_s']:.1f} s in all, predicted "
                f"{seen['predicted_s']:.1f} s, "
                f"off by {seen['misjudged_s'] / seen['measured_s']:.0%} on average"
            )
    return lines


if __name__ == "__main__":
    sys.exit(main())
