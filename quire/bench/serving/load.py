"""Sends requests when they are due, no matter how the server keeps up, within a limit of
concurrency if there is one.

Owns the run's clock and the measurement of the client itself: a client that cannot keep up measures
itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quire.bench.serving.dataset import ServeRequest
from quire.bench.serving.exchange import RequestTimeline, Target
from quire.common.loop_lag import LoopLagProbe


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How requests are sent."""

    max_concurrency: int | None = None
    """Requests in flight at most; what is due beyond waits at the client."""
    duration_s: float | None = None
    """Send nothing that is due later, or would be sent later; what is in flight is finished."""


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What was seen. Times in seconds from the start."""

    exchanges: list[RequestTimeline]
    wall_s: float
    """To the end of the last answer."""
    client_cpu_s: float
    """Processor time of this process meanwhile."""
    client_lag_s: list[float]
    """How late this process's event loop was."""


async def run_load(
    target: Target, requests: Sequence[ServeRequest], due: Sequence[float], options: LoadOptions
) -> LoadRun:
    """Send each request at its moment, in order of these; wait for all answers."""
    order = sorted(range(len(requests)), key=due.__getitem__)
    if options.duration_s is not None:
        order = [number for number in order if due[number] <= options.duration_s]
    lag_s: list[float] = []
    probe = LoopLagProbe(lag_s.append)
    probe.start()
    cpu_before_s, started_s = time.process_time(), time.perf_counter()
    sender = _Sender(target, options, started_s)
    try:
        exchanges = await sender.send_all([(requests[number], due[number]) for number in order])
    finally:
        probe.stop()
    wall_s, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_before_s
    return LoadRun([_relative(each, started_s) for each in exchanges], wall_s, cpu_s, lag_s)


class _Sender:
    """One run."""

    def __init__(self, target: Target, options: LoadOptions, started_s: float) -> None:
        self._target = target
        self._options = options
        self._started_s = started_s
        self._free = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else None

    async def send_all(
        self, requests: Sequence[tuple[ServeRequest, float]]
    ) -> list[RequestTimeline]:
        exchanges: list[RequestTimeline] = []
        async with asyncio.TaskGroup() as group:
            for request, due_s in requests:
                await self._wait_until(due_s)
                if self._free is not None:
                    await self._free.acquire()
                    if self._is_over():
                        break
                exchanges.append(RequestTimeline(due_s))
                group.create_task(self._send(request, exchanges[-1]))
        return exchanges

    async def _send(self, request: ServeRequest, seen: RequestTimeline) -> None:
        try:
            await self._target.exchange(request, seen)
        finally:
            if self._free is not None:
                self._free.release()

    async def _wait_until(self, due_s: float) -> None:
        left_s = self._started_s + due_s - time.perf_counter()
        if left_s > 0:
            await asyncio.sleep(left_s)

    def _is_over(self) -> bool:
        limit_s = self._options.duration_s
        return limit_s is not None and time.perf_counter() - self._started_s > limit_s


def _relative(seen: RequestTimeline, started_s: float) -> RequestTimeline:
    seen.sent_s -= started_s
    seen.end_s -= started_s
    seen.token_s = [each - started_s for each in seen.token_s]
    return seen
