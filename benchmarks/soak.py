"""Hours of mixed requests in minutes: whether anything grows that should not, and whether
everything is given back at the end.

    make soak MINUTES=60
    python -m benchmarks.soak --minutes 3

Clients of all kinds at once, from one seed: streams and whole answers, chats and completions,
several sequences, stop strings, log-probabilities, shared prefixes, prompts that are too long,
bodies that are wrong, and clients that leave while they wait, before the first token or in the
middle of an answer. Processes are looked at all along. After a warm-up, the memory's slope must be
flat; once the clients have gone, files, threads and tasks must be back where they were, and every
KV block free.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.servers import (
    Server,
    add_server_options,
    descendants,
    launch_of,
    metric,
    num_fds,
    num_threads,
    report,
    rss_bytes,
    running,
)
from quire.bench.serving.dataset import PromptWriter
from quire.common.event_reader import EventReader
from quire.common.http_client import HttpClient, HttpError, HttpRequest

WARM_UP_SHARE = 0.4
"""Of the run: pools, caches and allocators fill up to their sizes."""
GROWTH_BYTES_PER_HOUR = 48 << 20
GROWTH_SHARE_PER_HOUR = 0.05
"""Of what the process holds; the larger of the two is the steepest slope that passes."""
LEAST_GROWTH_BYTES = 4 << 20
"""That counts: a run of minutes must not be judged by the allocator's last pages (2
MiB were seen in 3 minutes)."""
_SAMPLE_S = 1.0
_REST_S = 60.0
_EXPECTED = {"200", "400", "413", "429", "left"}


@dataclass(frozen=True, slots=True)
class Sample:
    """The server's processes at one moment: the one that answers HTTP, and the engine's."""

    at_s: float
    api_bytes: int
    engine_bytes: int
    num_fds: int
    num_threads: int


class Clients:
    """Everything that clients do, by chance."""

    def __init__(self, server: Server, seed: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.num_events = 0
        self._server = server
        self._rng = random.Random(seed)
        self._writer = PromptWriter(None)
        self._prefix = self._writer.draw(self._rng, 120)

    async def live(self, until_s: float) -> None:
        """Run one client after another on one connection, until then."""
        async with HttpClient(self._server.url, timeout_s=120) as client:
            while time.monotonic() < until_s:
                outcome = await self._once(client)
                self.outcomes[outcome] += 1

    async def _once(self, client: HttpClient) -> str:
        request, patience_s = self._request(), self._patience_s()
        errors: list[bytes] = []

        def take(data: bytes) -> None:
            self.num_events += 1
            if data.startswith(b'{"error"'):
                errors.append(data)

        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(patience_s):
                    status = (await client.request(request, EventReader(take))).status
                    return "stream_error" if errors else str(status)
            except HttpError as error:
                return error.kind
        return "left"

    def _patience_s(self) -> float:
        """Most wait; some leave at once, or in the middle."""
        return self._rng.choice(
            (120.0, 120.0, 120.0, self._rng.uniform(0.0, 0.05), self._rng.uniform(0.05, 2.0))
        )

    def _request(self) -> HttpRequest:
        rng = self._rng
        path, body = rng.choice((self._completion, self._chat))()
        body |= {
            "max_tokens": rng.randint(1, 80),
            "stream": rng.random() < 0.7,
            "seed": rng.randint(0, 99),
        }
        body |= rng.choice(
            (
                {"temperature": 0},
                {"temperature": 1.0, "top_p": 0.9},
                {"n": 2},
                {"stop": ["the", "and so"]},
            )
        )
        if rng.random() < 0.05:
            body |= rng.choice(
                ({"max_tokens": -1}, {"temperature": "hot"}, {"model": 7}, {"max_tokens": 100_000})
            )
        data = json.dumps(body).encode()
        if rng.random() < 0.02:
            data = data[: len(data) // 2]
        return HttpRequest("POST", path, data, {"content-type": "application/json"})

    def _completion(self) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        length = rng.choice((4, 30, 100, 2000))
        tokens = [*(self._prefix if rng.random() < 0.5 else ()), *self._writer.draw(rng, length)]
        return "/v1/completions", {
            "prompt": self._writer.prompt(tokens),
            "logprobs": rng.choice((None, None, 3)),
        }

    def _chat(self) -> tuple[str, dict[str, Any]]:
        rng = self._rng
        turns = rng.choice((1, 1, 3))
        texts = [
            self._writer.prompt(self._writer.draw(rng, rng.randint(3, 30))) for _ in range(turns)
        ]
        messages = [
            {"role": "user" if place % 2 == 0 else "assistant", "content": text}
            for place, text in enumerate(texts)
        ]
        return "/v1/chat/completions", {"messages": messages, "logprobs": rng.random() < 0.2}


def sample(server: Server, began_s: float) -> Sample:
    """Look at the processes."""
    pids = descendants(server.pid)
    engine = [rss_bytes(pid) for pid in pids if pid != server.pid]
    counts = num_fds(server.pid), num_threads(server.pid)
    return Sample(time.monotonic() - began_s, rss_bytes(server.pid), sum(engine), *counts)


def slope(samples: Sequence[Sample], name: str) -> float:
    """Return bytes an hour, by the line through the medians of ten parts:
    single pages and peaks do not count."""
    size = max(1, len(samples) // 10)
    parts = [samples[start : start + size] for start in range(0, len(samples), size)]
    times = [statistics.median(each.at_s for each in part) for part in parts]
    sizes = [statistics.median(getattr(each, name) for each in part) for part in parts]
    if len(parts) < 2:
        return 0.0
    return 3600 * statistics.linear_regression(times, sizes).slope


async def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Soak."""
    clients = Clients(server, args.seed)
    began_s = time.monotonic()
    until_s = began_s + 60 * args.minutes
    before = sample(server, began_s)
    tasks_before = metric(server.metrics(), "quire:event_loop_tasks")
    living = [asyncio.create_task(clients.live(until_s)) for _ in range(args.clients)]
    samples = []
    while time.monotonic() < until_s:
        await asyncio.sleep(_SAMPLE_S)
        samples.append(await asyncio.to_thread(sample, server, began_s))
        if len(samples) % 60 == 0:
            _tell(samples[-1], clients)
    await asyncio.gather(*living)
    end = await _rest(server, before)
    later = [each for each in samples if each.at_s >= WARM_UP_SHARE * samples[-1].at_s]
    return {
        "minutes": args.minutes,
        "num_requests": sum(clients.outcomes.values()),
        "num_events": clients.num_events,
        "outcomes": dict(sorted(clients.outcomes.items())),
        "api_bytes_per_hour": slope(later, "api_bytes"),
        "engine_bytes_per_hour": slope(later, "engine_bytes"),
        "before": asdict(before),
        "last": asdict(samples[-1]),
        "after": asdict(sample(server, began_s)),
        "tasks": {"before": tasks_before, "after": metric(end, "quire:event_loop_tasks")},
        "kv_usage": metric(end, "quire:kv_cache_usage_perc"),
        "num_in_flight": metric(end, "quire:num_requests_in_flight"),
        "num_engine_restarts": metric(end, "quire:engine_restarts_total"),
        "num_preemptions": metric(end, "quire:num_preemptions_total"),
        "samples": [asdict(each) for each in samples[:: max(1, len(samples) // 500)]],
    }


async def _rest(server: Server, before: Sample) -> str:
    """Wait until nothing is in flight and what the clients held is given back; the metrics then."""
    until_s = time.monotonic() + _REST_S
    while True:
        text = server.metrics()
        is_idle = not metric(text, "quire:num_requests_in_flight") and not metric(
            text, "quire:kv_cache_usage_perc"
        )
        if (is_idle and num_fds(server.pid) <= before.num_fds) or time.monotonic() > until_s:
            return text
        await asyncio.sleep(0.5)


def _tell(last: Sample, clients: Clients) -> None:
    sizes = f"{last.api_bytes / 2**20:.0f} + {last.engine_bytes / 2**20:.0f} MiB"
    print(
        f"{last.at_s / 60:.0f} min: {sum(clients.outcomes.values())} requests, {sizes}",
        file=sys.stderr,
        flush=True,
    )


def broken_promises(figures: dict[str, Any]) -> list[str]:
    """Return what was not flat, not given back, or not expected."""
    found = []
    judged_hours = (1 - WARM_UP_SHARE) * figures["minutes"] / 60
    for name in ("api", "engine"):
        size, rate = figures["last"][f"{name}_bytes"], figures[f"{name}_bytes_per_hour"]
        is_steep = rate > max(GROWTH_BYTES_PER_HOUR, GROWTH_SHARE_PER_HOUR * size)
        if is_steep and rate * judged_hours > LEAST_GROWTH_BYTES:
            found.append(f"the {name} process grows by {rate / 2**20:.0f} MiB an hour")
    before, after = figures["before"], figures["after"]
    for name in ("num_fds", "num_threads"):
        # pools of threads start when first used
        if after[name] > before[name] + (4 if name == "num_threads" else 0):
            found.append(f"{name} is {after[name]}, and was {before[name]}")
    if figures["tasks"]["after"] > figures["tasks"]["before"]:
        found.append(
            f"{figures['tasks']['after']:.0f} tasks are left; there were "
            f"{figures['tasks']['before']:.0f}"
        )
    if figures["kv_usage"] or figures["num_in_flight"]:
        found.append(
            f"{figures['kv_usage']:.1%} of the blocks and {figures['num_in_flight']:.0f} "
            "requests were never given back"
        )
    unexpected = {
        kind: count for kind, count in figures["outcomes"].items() if kind not in _EXPECTED
    }
    if unexpected or figures["num_engine_restarts"]:
        found.append(
            f"requests ended otherwise than they may: {unexpected}; "
            f"{figures['num_engine_restarts']:.0f} restarts"
        )
    return found


def render(figures: dict[str, Any]) -> list[str]:
    """Return the figures as text."""
    before, last, after = figures["before"], figures["last"], figures["after"]
    return [
        f"{figures['num_requests']:,} requests in {figures['minutes']:g} min: "
        f"{figures['outcomes']}; "
        f"{figures['num_preemptions']:.0f} preemptions",
        *(
            f"{name:<12} {before[f'{key}_bytes'] / 2**20:.0f} MiB at first, "
            f"{last[f'{key}_bytes'] / 2**20:.0f} at last, "
            f"{figures[f'{key}_bytes_per_hour'] / 2**20:+.1f} an hour after the warm-up"
            for name, key in (("HTTP process", "api"), ("engine", "engine"))
        ),
        f"given back   files {before['num_fds']} / {last['num_fds']} / {after['num_fds']} "
        "before, at last, after; threads "
        f"{before['num_threads']} / {last['num_threads']} / {after['num_threads']}; tasks "
        f"{figures['tasks']['before']:.0f} / "
        f"{figures['tasks']['after']:.0f}; blocks in use {figures['kv_usage']:.1%}",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Soak, judge, print."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.soak"
    )
    add_server_options(parser)
    parser.add_argument("--minutes", type=float, default=60.0, help="(default: 60)")
    parser.add_argument("--clients", type=int, default=48, help="at once (default: 48)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    args = parser.parse_args(argv)
    # Few seats, little cache and a short queue, so that waiting, eviction, preemption and refusal
    # all happen.
    own = ["--max-num-seqs", "32", "--kv-cache-memory", "12MiB", "--max-queued-requests", "24"]
    with running(launch_of(args, *own)) as server:
        figures = asyncio.run(measure(server, args))
    report(figures, render(figures), args.json)
    broken = broken_promises(figures)
    for each in broken:
        print(f"BROKEN: {each}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
