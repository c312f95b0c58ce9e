"""What clients see when the engine is killed under load: 32 streams, `kill -9` at random moments,
every answer compared.

    python -m benchmarks.survival --kills 20 --write docs/lab/survival.md

Prints one row per kill: how long the engine was away, and the longest pause that any stream saw.
Fails if a single token of any stream differs from the stream's undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from quire.bench.record import timestamp
from quire.config.engine import EngineConfig
from quire.core.params import RequestOutputKind, SamplingParams
from quire.engine.assembly.preparation import prepare_model
from quire.engine.front.client import Client
from quire.engine.front.prompts import ParsedPrompt
from quire.engine.plan.machine import Machine
from quire.engine.process.link import supervised
from quire.errors import ConfigError

NUM_STREAMS = 32
MAX_TOKENS = 400
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


class Seen(NamedTuple):
    """One stream as its client saw it."""

    token_ids: list[int]
    text: str
    arrivals_s: list[float]


class Kill(NamedTuple):
    """One kill: when, and when the next engine was ready."""

    at_s: float
    ready_s: float


async def stream(client: Client, name: str, place: int) -> Seen:
    """Run one request to its end."""
    assert client.tokenizer is not None
    prompt = client.tokenizer.encode(f"Once upon a time there was a number called {place}.")
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 1.0, "top_p": 0.9, "presence_penalty": 0.5},
    ]
    common: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "output_kind": RequestOutputKind.DELTA,
    }
    params = SamplingParams(seed=place, **common, **kinds[place % 3])
    seen = Seen([], "", [])
    text = ""
    asked = client.prepare(f"{name}-{place}", ParsedPrompt(None, prompt), client.digest(params))
    async for output in await client.generate(asked):
        if output.error is not None:
            raise RuntimeError(output.error)
        seen.token_ids.extend(output.outputs[0].token_ids)
        seen.arrivals_s.append(time.monotonic())
        text += output.outputs[0].text
    return seen._replace(text=text)


async def all_streams(client: Client, name: str) -> list[Seen]:
    """All requests together."""
    return list(
        await asyncio.gather(*(stream(client, name, place) for place in range(NUM_STREAMS)))
    )


async def kill_some(client: Client, rng: random.Random, num_kills: int, kills: list[Kill]) -> None:
    """Kill the engine at random moments of its life until it has been killed often enough."""
    while len(kills) < num_kills:
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        status = client.status()
        if not status.is_ready or status.engine_pid is None:
            continue
        at_s = time.monotonic()
        os.kill(status.engine_pid, signal.SIGKILL)
        while client.status().engine_pid == status.engine_pid or not client.status().is_ready:
            await asyncio.sleep(0.002)
        kills.append(Kill(at_s, time.monotonic()))


async def measure(args: argparse.Namespace) -> None:
    """Run, compare, print."""
    options = {"num_threads": args.threads, "kv_cache_memory": "256MiB"}
    prepared = prepare_model(EngineConfig.from_options(args.model, options), is_for_here=False)
    client = Client(prepared, supervised(prepared))
    client.link.start()
    undisturbed = await all_streams(client, "calm")
    kills: list[Kill] = []
    streams: list[Seen] = []
    killer = asyncio.create_task(kill_some(client, random.Random(args.seed), args.kills, kills))
    num_rounds = 0
    while not killer.done():
        disturbed = await all_streams(client, f"round{num_rounds}")
        num_rounds += 1
        for place, (calm, other) in enumerate(zip(undisturbed, disturbed, strict=True)):
            if (calm.token_ids, calm.text) != (other.token_ids, other.text):
                raise RuntimeError(
                    f"stream {place} of round {num_rounds} differs from its undisturbed run: "
                    f"{_first(calm, other)}"
                )
        streams += disturbed
    await killer
    await client.close()
    lines = table(kills, streams, num_rounds)
    print("\n".join(lines))
    if args.write is not None:
        write_table(args.write, lines)


def table(kills: list[Kill], streams: list[Seen], num_rounds: int) -> list[str]:
    """Return one row per kill, and what they amount to."""
    rows = []
    for number, kill in enumerate(kills, start=1):
        pauses = [pause for each in streams if (pause := _pause_over(each, kill)) is not None]
        worst, median = (
            (f"{max(pauses):.2f}", f"{statistics.median(pauses):.2f}") if pauses else ("-", "-")
        )
        rows.append(
            f"| {number} | {kill.ready_s - kill.at_s:.2f} | {len(pauses)} | {worst} | {median} |"
        )
    away = sorted(kill.ready_s - kill.at_s for kill in kills)
    machine = Machine.inspect()
    return [
        f"{num_rounds} rounds of {NUM_STREAMS} streams, {len(kills)} kills: every stream "
        "equal to its undisturbed run. "
        f"The engine was away for {statistics.median(away):.2f} s in the median, "
        f"{away[-1]:.2f} s at most ({machine.cpu_name}, "
        f"{machine.num_cores} cores, {timestamp()}).",
        "",
        (
            "| kill | engine away, s | streams under way | longest pause of a stream, s | median "
            "pause, s |"
        ),
        "|---|---|---|---|---|",
        *rows,
    ]


def write_table(path: Path, lines: list[str]) -> None:
    """Put the table in the place of the one that the page has."""
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{path} has no place for the table, between {BEGIN!r} and {END!r}")
    path.write_text("\n".join([before + begin, *lines, end + after]), encoding="utf-8")


def _first(calm: Seen, other: Seen) -> str:
    """Return where two streams part."""
    pairs = enumerate(zip(calm.token_ids, other.token_ids, strict=False))
    where = next((number for number, (first, second) in pairs if first != second), None)
    lengths = f"{len(calm.token_ids)} and {len(other.token_ids)} tokens"
    return f"{lengths}, " + (
        "the same as far as both go"
        if where is None
        else f"the first that differs is number {where}"
    )


def _pause_over(seen: Seen, kill: Kill) -> float | None:
    """Return the pause between the outputs before and after a kill, for a stream that was under
    way."""
    for before, after in zip(seen.arrivals_s, seen.arrivals_s[1:], strict=False):
        if before <= kill.at_s < after:
            return after - before
    return None


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="quire-storyteller")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", type=Path, help="put the table into this page")
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
