"""Ten times more than a server can take: what it still delivers, how fast it refuses the rest, how it is afterwards.

    python -m benchmarks.overload                  60 seconds at 10 times the capacity
    python -m benchmarks.overload --seconds 10 --peak-seconds 6

First the peak: as many clients at once as the server has seats, each request upon the answer to the last. Then arrivals at ten
times that rate, whatever becomes of them, with a queue that is bounded. Goodput counts the tokens of requests that were
answered to their end, in the time after the first seconds. Exit code 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.servers import Server, add_server_options, descendants, launch_of, metric, report, rss_bytes, running
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.dataset import ServeRequest, Sizes, Writer, random_dataset
from quire.bench.serving.exchange import Target
from quire.bench.serving.load import LoadOptions, LoadRun, run_load
from quire.bench.serving.runner import ask_server
from quire.bench.spread import spread
from quire.common.http_client import HttpClient

GOODPUT_SHARE = 0.95
RECOVERED_SHARE = 0.85
"""Of the peak before, by the peak after: four successive peaks of an undisturbed server lay within 10 % of each other."""
REFUSAL_S = 0.05
GROWTH_BYTES = 32 << 20
"""Memory that may be held after an overload beyond what was held before: buffers that the allocator keeps."""
_IDLE_S = 60.0
_VOCAB_SIZE = 4096


async def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Peak, overload, rest, peak again."""
    async with HttpClient(server.url, timeout_s=300) as client:
        target = Target(client, (await ask_server(client, None)).model)
        peak = await _closed(target, args, args.peak_seconds)
        before = memory(server)  # when every block of the cache has been written to
        peak_rate, peak_requests = goodput(peak, args), requests_per_s(peak, args)
        rate = args.factor * peak_requests
        arrivals = Arrivals(rate).times(int(rate * args.seconds), 1)
        print(f"peak: {peak_rate:,.0f} tokens/s, {peak_requests:.1f} requests/s; now {rate:.0f} a second", file=sys.stderr)
        overload = await run_load(target, _requests(args, len(arrivals), 2), arrivals, LoadOptions())
        idle_s = await _await_idle(server)
        after = memory(server)
        again = await _closed(target, args, args.peak_seconds)
    # A machine's speed swings: the peak of before and after, between which the overload lies, is what it is held against.
    mean_rate = (peak_rate + goodput(again, args)) / 2
    return {
        "peak_tokens_per_s": peak_rate,
        "peak_requests_per_s": peak_requests,
        "goodput_tokens_per_s": goodput(overload, args),
        "goodput_share": goodput(overload, args) / mean_rate,
        "recovered_share": goodput(again, args) / peak_rate,
        "num_sent": len(overload.exchanges),
        "statuses": _statuses(overload),
        "refusal_s": spread([each.e2e_s for each in overload.exchanges if each.status == "429"], (50, 90, 95, 99)),
        "ttft_s": spread([each.ttft_s for each in overload.exchanges if each.is_ok], (50, 90, 95, 99)),
        "e2e_s": spread([each.e2e_s for each in overload.exchanges if each.is_ok], (50, 90, 95, 99)),
        "idle_after_s": idle_s,
        "rss_bytes": {"before": before, "after": after},
        "client_cpu_share": overload.client_cpu_s / overload.wall_s,
    }


async def _closed(target: Target, args: argparse.Namespace, seconds: float) -> LoadRun:
    """As many requests at once as there are seats, for so long."""
    requests = _requests(args, 100_000 if seconds > 60 else 20_000, 3)
    load = LoadOptions(max_concurrency=args.seats, duration_s=seconds)
    return await run_load(target, requests, [0.0] * len(requests), load)


def _requests(args: argparse.Namespace, count: int, seed: int) -> list[ServeRequest]:
    """So many, of which a few hundred are different: making them must not take longer than answering them."""
    sizes = Sizes(min(count, 400), (args.input_len, args.input_len), (args.output_len, args.output_len))
    made = random_dataset(sizes, Writer(_VOCAB_SIZE), seed).requests
    return [made[number % len(made)] for number in range(count)]


def goodput(run: LoadRun, args: argparse.Namespace) -> float:
    """Tokens a second of the requests that were answered, between the settling in and the last arrival."""
    first_s, last_s = _window(run, args)
    count = 0.0
    for each in run.exchanges:
        if each.is_ok:
            weight = each.num_output / len(each.token_s)
            count += weight * sum(first_s <= moment < last_s for moment in each.token_s)
    return count / (last_s - first_s)


def requests_per_s(run: LoadRun, args: argparse.Namespace) -> float:
    """Answers a second at that goodput."""
    return goodput(run, args) / float(args.output_len)


def _window(run: LoadRun, args: argparse.Namespace) -> tuple[float, float]:
    last_s = max(each.sent_s for each in run.exchanges)
    return min(args.settle_seconds, last_s / 3), last_s


def _statuses(run: LoadRun) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in run.exchanges:
        counts[each.status] = counts.get(each.status, 0) + 1
    return counts


async def _await_idle(server: Server) -> float:
    began_s = time.monotonic()
    while metric(server.metrics(), "quire:num_requests_in_flight") and time.monotonic() - began_s < _IDLE_S:
        await asyncio.sleep(0.1)
    return time.monotonic() - began_s


def memory(server: Server) -> int:
    """Bytes that the server's processes hold."""
    return sum(rss_bytes(pid) for pid in descendants(server.pid))


def broken_promises(figures: dict[str, Any], num_seats: int, max_queued: int) -> list[str]:
    """What did not come out as promised."""
    refusal, rss = figures["refusal_s"], figures["rss_bytes"]
    found = []
    if figures["goodput_share"] < GOODPUT_SHARE:
        found.append(f"goodput is {figures['goodput_share']:.1%} of the peak, not {GOODPUT_SHARE:.0%}")
    if refusal is None or refusal["p99"] > REFUSAL_S:
        found.append("nothing was refused" if refusal is None else f"refusals take {1e3 * refusal['p99']:.0f} ms in the p99")
    if set(figures["statuses"]) - {"ok", "429"}:
        found.append(f"requests ended otherwise than answered or refused: {figures['statuses']}")
    if rss["after"] - rss["before"] > GROWTH_BYTES:
        found.append(f"memory grew by {(rss['after'] - rss['before']) / 2**20:.0f} MiB")
    patience_s = 2 * (num_seats + max_queued) / figures["peak_requests_per_s"]
    if figures["e2e_s"] is not None and figures["e2e_s"]["p99"] > patience_s:
        found.append(f"accepted requests took {figures['e2e_s']['p99']:.1f} s in the p99, more than {patience_s:.1f}")
    if figures["recovered_share"] < RECOVERED_SHARE:
        found.append(f"afterwards, the peak is {figures['recovered_share']:.1%} of what it was")
    return found


def render(figures: dict[str, Any]) -> list[str]:
    """For people."""
    refusal, rss, total = figures["refusal_s"], figures["rss_bytes"], figures["e2e_s"]
    lines = [
        f"peak         {figures['peak_tokens_per_s']:,.0f} output tokens/s, {figures['peak_requests_per_s']:.1f} requests/s",
        f"overload     {figures['num_sent']:,} requests: {figures['statuses']}; this client {figures['client_cpu_share']:.0%} "
        "of a core",
        f"goodput      {figures['goodput_tokens_per_s']:,.0f} tokens/s, {figures['goodput_share']:.1%} of the peaks before and "
        f"after; the one after is {figures['recovered_share']:.1%} of the one before",
        f"memory       {rss['before'] / 2**20:.0f} MiB before, {rss['after'] / 2**20:.0f} after; idle after "
        f"{figures['idle_after_s']:.1f} s",
    ]
    if refusal is not None:
        lines.append(f"refusals     {1e3 * refusal['p50']:.1f} ms median, {1e3 * refusal['p99']:.1f} p99")
    if total is not None:
        lines.append(f"accepted     {total['p50']:.1f} s median, {total['p99']:.1f} p99 to the end")
    return lines


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.overload")
    add_server_options(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload (default: 60)")
    parser.add_argument("--peak-seconds", type=float, default=20.0, help="of each look at the peak (default: 20)")
    parser.add_argument("--settle-seconds", type=float, default=5.0, help="that do not count (default: 5)")
    parser.add_argument("--factor", type=float, default=10.0, help="arrivals over capacity (default: 10)")
    parser.add_argument("--seats", type=int, default=64, help="sequences that the engine computes at once (default: 64)")
    parser.add_argument("--queue", type=int, default=128, help="requests that may wait; more than seats (default: 128)")
    parser.add_argument("--input-len", type=int, default=64, help="(default: 64)")
    parser.add_argument("--output-len", type=int, default=256, help="(default: 256)")
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, judge, print."""
    args = parse(argv)
    own = ["--max-num-seqs", str(args.seats), "--max-queued-requests", str(args.queue), "--kv-cache-memory", "128MiB"]
    with running(launch_of(args, *own)) as server:
        figures = asyncio.run(measure(server, args))
    report(figures, render(figures), args.json)
    broken = broken_promises(figures, args.seats, args.queue)
    for each in broken:
        print(f"BROKEN: {each}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
