"""Hundreds of streams at once: what a token costs the process that answers HTTP, and how long its
event loop is held up.

    python -m benchmarks.streams --streams 200
    python -m benchmarks.streams --engine vllm --program venvs/vllm/bin/python --model ./folder
    --vocab-size 4096

All streams begin together on an idle server (the worst moment: every prompt at once), for several
rounds. The processor time is that of the HTTP process alone, whose engine has a process of its own
in both; Quire's lag is what its metric `quire:event_loop_lag_seconds` counted inside of it; the
delay of a small request, sent ten times a second, is seen for both.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.servers import (
    Server,
    add_server_options,
    histogram_percentile,
    launch_of,
    metric,
    report,
    running,
)
from quire.bench.serving.dataset import PromptWriter, Sizes, random_dataset
from quire.bench.serving.load import LoadOptions
from quire.bench.serving.runner import ServeOptions, measure_server
from quire.bench.spread import spread
from quire.common.http_client import HttpClient, HttpError, HttpRequest

LAG = "quire:event_loop_lag_seconds"
_PING_INTERVAL_S = 0.1


async def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """All rounds together: one record of `quire bench serve`, and the process's figures."""
    sizes = Sizes(
        args.streams * args.rounds,
        (args.input_len, args.input_len),
        (args.output_len, args.output_len),
    )
    dataset = random_dataset(sizes, PromptWriter(args.vocab_size), 0)
    load = LoadOptions(max_concurrency=args.streams)
    body = {"stream_options": None} if args.no_usage else {}
    options = ServeOptions(url=server.url, is_chat=args.chat, load=load, num_warmups=4, body=body)
    before = server.metrics()
    pings = asyncio.create_task(_ping(server, args.engine))
    cpu_before_s, began_s = server.api_cpu_s(), time.perf_counter()
    seen = await measure_server(options, dataset)
    cpu_s, wall_s = server.api_cpu_s() - cpu_before_s, time.perf_counter() - began_s
    pings.cancel()
    delays_s = await pings
    result = seen["result"]
    if result["num_ok"] != result["num_requests"]:
        raise RuntimeError(
            f"not every stream was answered: {result['statuses']} {result['errors']}"
        )
    figures: dict[str, Any] = {
        "api_cpu_us_per_token": 1e6 * cpu_s / result["num_output_tokens"],
        "api_cpu_share": cpu_s / wall_s,
        "ping_s": spread(delays_s, (50, 90, 95, 99)),
        "result": result,
    }
    if args.engine == "quire":
        text = server.metrics()
        figures["lag_p99_s"] = histogram_percentile(_difference(before, text), LAG, 0.99)
        figures["lag_p50_s"] = histogram_percentile(_difference(before, text), LAG, 0.5)
        figures["num_lags"] = metric(text, f"{LAG}_count") - metric(before, f"{LAG}_count")
    return figures


def _difference(before: str, after: str) -> str:
    """Return the buckets of the lag's histogram, less what was there before."""
    earlier = dict(
        line.rsplit(" ", 1) for line in before.splitlines() if line.startswith(f"{LAG}_bucket")
    )
    lines = [line.rsplit(" ", 1) for line in after.splitlines() if line.startswith(f"{LAG}_bucket")]
    return "\n".join(
        f"{name} {float(count) - float(earlier.get(name, 0))}" for name, count in lines
    )


async def _ping(server: Server, engine: str) -> list[float]:
    """Return seconds that each of the small requests took, until cancelled."""
    delays: list[float] = []
    with contextlib.suppress(asyncio.CancelledError):
        async with HttpClient(server.url, timeout_s=30) as client:
            while True:
                began_s = time.perf_counter()
                with contextlib.suppress(HttpError):
                    await client.request(
                        HttpRequest("GET", "/livez" if engine == "quire" else "/version")
                    )
                delays.append(time.perf_counter() - began_s)
                await asyncio.sleep(_PING_INTERVAL_S)
    return delays


def render(figures: dict[str, Any]) -> list[str]:
    """Return the figures as text."""
    result, ping = figures["result"], figures["ping_s"]
    first = result["ttft_s"]
    lines = [
        f"{result['num_output_tokens']:,} tokens, {result['output_tokens_per_s']:,.0f}/s, at "
        f"most {result['peak_concurrency']} "
        f"at once; first token {1e3 * first['p50']:.0f} ms median, {1e3 * first['p99']:.0f} p99",
        f"HTTP process {figures['api_cpu_us_per_token']:.0f} us of processor time a token, "
        f"{figures['api_cpu_share']:.0%} of a core",
        f"ping         {1e3 * ping['p50']:.1f} ms median, {1e3 * ping['p99']:.1f} p99",
        f"this client  {1e6 * result['client']['cpu_s_per_output_token']:.0f} us a token",
    ]
    if "lag_p99_s" in figures:
        lines.append(
            f"event loop   {1e3 * figures['lag_p50_s']:.2f} ms late in the median, "
            f"{1e3 * figures['lag_p99_s']:.1f} ms p99 "
            f"({figures['num_lags']:.0f} looks)"
        )
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.streams"
    )
    add_server_options(parser)
    parser.add_argument("--streams", type=int, default=200, help="at once (default: 200)")
    parser.add_argument(
        "--rounds", type=int, default=3, help="requests of each stream (default: 3)"
    )
    parser.add_argument("--input-len", type=int, default=64, help="(default: 64)")
    parser.add_argument("--output-len", type=int, default=64, help="(default: 64)")
    parser.add_argument("--vocab-size", type=int, help="send token ids below it instead of words")
    parser.add_argument("--chat", action="store_true", help="use the chat endpoint")
    parser.add_argument("--no-usage", action="store_true", help="do not ask for usage")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    args = parse(argv)
    seats = ["--max-num-seqs", str(args.streams)]
    own = (
        [*seats, "--kv-cache-memory", "1GiB"]
        if args.engine == "quire"
        else [*seats, "--kv-cache-memory-bytes", str(1 << 30)]
    )
    with running(launch_of(args, *own)) as server:
        figures = asyncio.run(measure(server, args))
        figures |= {
            "engine": args.engine,
            "model": Path(args.model).name,
            "ready_s": server.ready_s,
        }
    report(figures, render(figures), args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
