"""Ten times more than a server can take: what it still delivers, how fast it refuses the rest, how
it is afterwards.

    python -m benchmarks.overload                  60 seconds at 10 times the capacity
    python -m benchmarks.overload --rounds 24 --seconds 14 --peak-seconds 8      in turns, where the
    machine's speed swings python -m benchmarks.overload --model ./folder --output-len 64
       of another model than the shipped one

First the peak: as many clients at once as the server has seats, each request upon the answer to the
last. Then arrivals at ten times that rate, whatever becomes of them, with a queue that is bounded:
once to warm up, so that buffers for the most that can be there at once are no growth of memory, and
once to be measured. Goodput counts the tokens of requests that were answered to their end, in the
time after the first seconds. Exit code 1 if a promise is broken.

The clients run on the server's own cores, and to be refused ten times costs them more than to be
answered once. What that takes is no fault of the server's, so the peak is also measured beside a
generator that burns as much: a client's processor time for one refusal, measured first, at as many
moments a second. The promise is held against that; the share of the plain peak is told.

The prefix cache is off: prompts come again at each peak and would be found there, so that peaks and
overloads did unlike work.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.servers import (
    Server,
    add_server_options,
    cpu_s,
    descendants,
    launch_of,
    metric,
    report,
    rss_bytes,
    running,
)
from quire.bench.serving.arrivals import Arrivals
from quire.bench.serving.dataset import PromptWriter, ServeRequest, Sizes, random_dataset
from quire.bench.serving.exchange import RequestTimeline, Target
from quire.bench.serving.load import LoadOptions, LoadRun, run_load
from quire.bench.serving.runner import ask_server
from quire.bench.spread import spread
from quire.common.http_client import HttpClient

GOODPUT_SHARE = 0.95
RECOVERED_SHARE = 0.85
"""Of the peak before, by the peak after: four successive peaks of an undisturbed server lay
within 10 % of each other."""
REFUSAL_S = 0.05
GROWTH_BYTES = 12 << 20
"""Memory that may be held after an overload beyond what was held after a short one: connections
that clients keep, and what the allocator does. What one leaves once is no growth: some 700 idle
connections are 7 MiB.
"""
_IDLE_S = 60.0
_VOCAB_SIZE = 4096
_COUNTED = (
    "engine_steps_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_hits_total",
)
_NUM_PROBES = 200
"""Refusals by which their cost to the client is measured."""


@dataclass(slots=True)
class Phase:
    """One load, and what it took of the machine."""

    goodput: float
    """Tokens a second of the requests that were answered,
    between the settling in and the last arrival."""
    run: LoadRun
    shares: dict[str, float]
    """Of a core: the clients' process, the one that answers HTTP, the engine's."""
    engine: dict[str, float]
    """What the engine counted, by metric: were it of another kind at the peak,
    the two could not be compared."""


async def measure(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Peak and overload in turns, a peak last; each peak alone,
    and beside a generator as busy as that of the overload."""
    async with HttpClient(server.url, timeout_s=300) as client:
        bench = _Bench(server, Target(client, (await ask_server(client, None)).model), args)
        cost_s = await bench.refusal_cost_s()
        peaks, overloads, idle_s = [await bench.closed()], [], 0.0
        peak_requests = peaks[0].goodput / float(args.output_len)
        rate, burn = args.factor * peak_requests, ((args.factor - 1) * peak_requests, cost_s)
        print(
            f"peak: {peaks[0].goodput:,.0f} tokens/s, {peak_requests:.1f} requests/s; now "
            f"{rate:.0f} a second",
            file=sys.stderr,
        )
        await bench.open(rate, args.warm_seconds)
        await _await_idle(server)
        memories = [memory(server)]
        besides = [await bench.closed(burn)]
        for _ in range(args.rounds):
            overloads.append(await bench.open(rate, args.seconds))
            idle_s = max(idle_s, await _await_idle(server))
            memories.append(memory(server))
            besides.append(await bench.closed(burn))
            peaks.append(await bench.closed())
    return {
        "peak_requests_per_s": peak_requests,
        "refusal_client_s": cost_s,
        "idle_after_s": idle_s,
        "rss_bytes": [http + engine for http, engine in memories],
        "http_rss_bytes": [http for http, _ in memories],
        **compare(peaks, besides, overloads),
        **_fates([each for phase in overloads for each in phase.run.exchanges]),
    }


def compare(
    peaks: Sequence[Phase], besides: Sequence[Phase], overloads: Sequence[Phase]
) -> dict[str, Any]:
    """Overloads against the peaks around them: a machine's speed swings,
    so what lies between two is held against the mean."""
    phases = {"peak": peaks, "beside": besides, "overload": overloads}
    shares = [
        2 * each.goodput / _sum(besides[turn : turn + 2]) for turn, each in enumerate(overloads)
    ]
    return {
        "peaks_tokens_per_s": [each.goodput for each in peaks],
        "peaks_beside_tokens_per_s": [each.goodput for each in besides],
        "goodputs_tokens_per_s": [each.goodput for each in overloads],
        "goodput_share": _sum(overloads) / _sum_between(besides),
        "goodput_share_of_plain_peak": _sum(overloads) / _sum_between(peaks),
        "goodput_shares": shares,
        "goodput_share_error": statistics.stdev(shares) / len(shares) ** 0.5
        if len(shares) > 1
        else None,
        "recovered_share": _sum(peaks[1:]) / _sum(peaks[:-1]),
        "cores": {name: _mean([each.shares for each in of]) for name, of in phases.items()},
        "engine": {name: _mean([each.engine for each in of]) for name, of in phases.items()},
    }


def _sum(phases: Sequence[Phase]) -> float:
    return sum(each.goodput for each in phases)


def _sum_between(phases: Sequence[Phase]) -> float:
    return (_sum(phases[:-1]) + _sum(phases[1:])) / 2


def _mean(figures: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: sum(each[name] for each in figures) / len(figures) for name in figures[0]}


def _fates(exchanges: Sequence[RequestTimeline]) -> dict[str, Any]:
    """Return what became of the overloads' requests."""
    return {
        "num_sent": len(exchanges),
        "statuses": _statuses(exchanges),
        "refusal_s": spread(
            [each.e2e_s for each in exchanges if each.status == "429"], (50, 90, 95, 99)
        ),
        "ttft_s": spread([each.ttft_s for each in exchanges if each.is_ok], (50, 90, 95, 99)),
        "e2e_s": spread([each.e2e_s for each in exchanges if each.is_ok], (50, 90, 95, 99)),
    }


class _Bench:
    """One server under its loads."""

    def __init__(self, server: Server, target: Target, args: argparse.Namespace) -> None:
        self._server = server
        self._target = target
        self._args = args

    async def refusal_cost_s(self) -> float:
        """Return processor time that a refusal costs the client:
        of requests for a model that is not there, which are refused, too."""
        target, requests = (
            replace(self._target, model="none"),
            _requests(self._args, _NUM_PROBES, 4),
        )
        began_s = time.process_time()
        for each in requests:
            await target.exchange(each, RequestTimeline(0.0))
        return (time.process_time() - began_s) / len(requests)

    async def closed(self, burn: tuple[float, float] | None = None) -> Phase:
        """Send as many requests at once as there are seats; beside them `burn`: so many times a
        second, so many seconds."""
        args = self._args
        requests = _requests(args, 100_000 if args.peak_seconds > 60 else 20_000, 3)
        load = LoadOptions(max_concurrency=args.seats, duration_s=args.peak_seconds)
        burning = None if burn is None else asyncio.create_task(_burn(*burn))
        try:
            return await self._watched(
                run_load(self._target, requests, [0.0] * len(requests), load)
            )
        finally:
            if burning is not None:
                burning.cancel()

    async def open(self, rate: float, seconds: float) -> Phase:
        """So many requests a second, whatever becomes of them."""
        arrivals = Arrivals(rate).times(int(rate * seconds), 1)
        return await self._watched(
            run_load(self._target, _requests(self._args, len(arrivals), 2), arrivals, LoadOptions())
        )

    async def _watched(self, load: Awaitable[LoadRun]) -> Phase:
        pids = descendants(self._server.pid)
        before, counted = {pid: cpu_s(pid) for pid in pids}, self._server.metrics()
        run = await load
        used = {pid: (cpu_s(pid) - before[pid]) / run.wall_s for pid in pids}
        http = used.pop(self._server.pid)
        shares = {
            "clients": run.client_cpu_s / run.wall_s,
            "http": http,
            "engine": sum(used.values()),
        }
        now = self._server.metrics()
        engine = {
            name: metric(now, f"quire:{name}") - metric(counted, f"quire:{name}")
            for name in _COUNTED
        }
        return Phase(goodput(run, self._args), run, shares, engine)


async def _burn(rate: float, cost_s: float) -> None:
    """Use `cost_s` of processor time at random moments, `rate` of them a second, until
    cancelled."""
    rng = random.Random(5)
    while True:
        await asyncio.sleep(rng.expovariate(rate))
        until_s = time.thread_time() + cost_s
        while time.thread_time() < until_s:
            pass


def _requests(args: argparse.Namespace, count: int, seed: int) -> list[ServeRequest]:
    """So many, of which a few hundred are different:
    making them must not take longer than answering them."""
    # Answers of one length would all end together, and a peak be a matter of how many such waves
    # its time holds.
    lengths = (max(1, args.output_len // 2), args.output_len + args.output_len // 2)
    sizes = Sizes(min(count, 400), (args.input_len, args.input_len), lengths)
    made = random_dataset(sizes, PromptWriter(_VOCAB_SIZE), seed).requests
    return [made[number % len(made)] for number in range(count)]


def goodput(run: LoadRun, args: argparse.Namespace) -> float:
    """Return tokens a second of the requests that were answered,
    between the settling in and the last arrival."""
    first_s, last_s = _window(run, args)
    count = 0.0
    for each in run.exchanges:
        if each.is_ok:
            weight = each.num_output / len(each.token_s)
            count += weight * sum(first_s <= moment < last_s for moment in each.token_s)
    return count / (last_s - first_s)


def _window(run: LoadRun, args: argparse.Namespace) -> tuple[float, float]:
    last_s = max(each.sent_s for each in run.exchanges)
    return min(args.settle_seconds, last_s / 3), last_s


def _statuses(exchanges: Sequence[RequestTimeline]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for each in exchanges:
        counts[each.status] = counts.get(each.status, 0) + 1
    return counts


async def _await_idle(server: Server) -> float:
    began_s = time.monotonic()
    while (
        metric(server.metrics(), "quire:num_requests_in_flight")
        and time.monotonic() - began_s < _IDLE_S
    ):
        await asyncio.sleep(0.1)
    return time.monotonic() - began_s


def memory(server: Server) -> tuple[int, int]:
    """Return bytes that the process that answers HTTP holds, and those below it."""
    http = rss_bytes(server.pid)
    return http, sum(rss_bytes(pid) for pid in descendants(server.pid)) - http


def broken_promises(figures: dict[str, Any], num_seats: int, max_queued: int) -> list[str]:
    """Return what did not come out as promised."""
    refusal, rss = figures["refusal_s"], figures["rss_bytes"]
    found = []
    if figures["goodput_share"] < GOODPUT_SHARE:
        found.append(
            f"goodput is {figures['goodput_share']:.1%} of the peak beside such clients, not "
            f"{GOODPUT_SHARE:.0%}"
        )
    if refusal is None or refusal["p99"] > REFUSAL_S:
        found.append(
            "nothing was refused"
            if refusal is None
            else f"refusals take {1e3 * refusal['p99']:.0f} ms in the p99"
        )
    if set(figures["statuses"]) - {"ok", "429"}:
        found.append(f"requests ended otherwise than answered or refused: {figures['statuses']}")
    if rss[-1] - rss[0] > GROWTH_BYTES:
        found.append(f"memory grew by {(rss[-1] - rss[0]) / 2**20:.0f} MiB")
    patience_s = 2 * (num_seats + max_queued) / figures["peak_requests_per_s"]
    if figures["e2e_s"] is not None and figures["e2e_s"]["p99"] > patience_s:
        found.append(
            f"accepted requests took {figures['e2e_s']['p99']:.1f} s in the p99, more than "
            f"{patience_s:.1f}"
        )
    if figures["recovered_share"] < RECOVERED_SHARE:
        found.append(f"afterwards, the peak is {figures['recovered_share']:.1%} of what it was")
    return found


def render(figures: dict[str, Any]) -> list[str]:
    """Return the figures as text."""
    refusal, rss, total = figures["refusal_s"], figures["rss_bytes"], figures["e2e_s"]
    error, turns = (
        figures["goodput_share_error"],
        ", ".join(f"{share:.0%}" for share in figures["goodput_shares"]),
    )
    http_rss = figures["http_rss_bytes"]
    lines = [
        f"peaks        {_listed(figures['peaks_tokens_per_s'])} output tokens/s; "
        f"{_listed(figures['peaks_beside_tokens_per_s'])} beside clients as busy as under overload "
        f"({1e6 * figures['refusal_client_s']:.0f} us a refusal)",
        f"overload     {figures['num_sent']:,} requests: {figures['statuses']}",
        f"goodput      {_listed(figures['goodputs_tokens_per_s'])} tokens/s, "
        f"{figures['goodput_share']:.1%} of the peaks "
        f"beside such clients, {figures['goodput_share_of_plain_peak']:.1%} of the plain; "
        "afterwards it is "
        f"{figures['recovered_share']:.1%} of what it was",
        f"turns        {turns}"
        + ("" if error is None else f"; the standard error of their mean is {error:.1%}"),
        f"memory       before and after each: {_mebibytes(rss)} MiB, of which the HTTP "
        f"process {_mebibytes(http_rss)}; "
        f"idle after {figures['idle_after_s']:.1f} s",
    ]
    for name, shares in figures["cores"].items():
        lines.append(
            f"cores        {name}: "
            + ", ".join(f"{who} {share:.0%}" for who, share in shares.items())
        )
    for name, counts in figures["engine"].items():
        lines.append(
            f"engine       {name}: "
            + ", ".join(f"{count:,.0f} {what}" for what, count in counts.items())
        )
    if refusal is not None:
        lines.append(
            f"refusals     {1e3 * refusal['p50']:.1f} ms median, {1e3 * refusal['p99']:.1f} p99"
        )
    if total is not None:
        lines.append(f"accepted     {total['p50']:.1f} s median, {total['p99']:.1f} p99 to the end")
    return lines


def _mebibytes(counts: Sequence[int]) -> str:
    return ", ".join(f"{count / 2**20:.0f}" for count in counts)


def _listed(rates: Sequence[float]) -> str:
    return ", ".join(f"{rate:,.0f}" for rate in rates)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.overload"
    )
    add_server_options(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload (default: 60)")
    parser.add_argument(
        "--rounds", type=int, default=1, help="overloads, with a peak between two (default: 1)"
    )
    parser.add_argument(
        "--peak-seconds", type=float, default=20.0, help="of each look at the peak (default: 20)"
    )
    parser.add_argument(
        "--warm-seconds",
        type=float,
        default=15.0,
        help="of overload before memory is read (default: 15)",
    )
    parser.add_argument(
        "--settle-seconds", type=float, default=5.0, help="that do not count (default: 5)"
    )
    parser.add_argument(
        "--factor", type=float, default=10.0, help="arrivals over capacity (default: 10)"
    )
    parser.add_argument(
        "--seats",
        type=int,
        default=64,
        help="sequences that the engine computes at once (default: 64)",
    )
    parser.add_argument(
        "--queue",
        type=int,
        default=128,
        help="requests that may wait; more than seats (default: 128)",
    )
    parser.add_argument("--input-len", type=int, default=64, help="(default: 64)")
    parser.add_argument(
        "--output-len",
        type=int,
        default=256,
        help="in the mean; from half to one and a half of it (default: 256)",
    )
    parser.add_argument("--json", type=Path, help="write the figures to a file")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, judge, print."""
    args = parse(argv)
    own = [
        "--max-num-seqs",
        str(args.seats),
        "--max-queued-requests",
        str(args.queue),
        "--kv-cache-memory",
        "128MiB",
    ]
    own.append("--no-enable-prefix-caching")
    with running(launch_of(args, *own)) as server:
        figures = asyncio.run(measure(server, args))
    report(figures, render(figures), args.json)
    broken = broken_promises(figures, args.seats, args.queue)
    for each in broken:
        print(f"BROKEN: {each}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
