"""Closed-loop load on a server: so many clients at once, each request upon the answer to the last.

Owns the figures of workload W6 (32 streaming clients, greedy, `ignore_eos`). The client is that of
`quire bench serve`, so Quire, vLLM and llama.cpp are measured alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.serving.dataset import ServeRequest
from quire.bench.serving.exchange import RequestTimeline, Target
from quire.bench.serving.load import LoadOptions, LoadRun, run_load
from quire.bench.serving.results import gaps_of
from quire.bench.spread import spread
from quire.bench.workload import BenchRequest
from quire.common.http_client import HttpClient

DEADLINE_S = 600.0
"""A server that sends nothing for so long has failed."""


def run_clients(
    url: str,
    model: str | None,
    requests: Sequence[BenchRequest],
    num_clients: int,
    body: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Send all requests and return the figures; times in seconds. RuntimeError if one fails.

    `body` has fields of every request, on top of the usual ones.
    """
    run = asyncio.run(_run(url, model, requests, num_clients, body or {}))
    for each in run.exchanges:
        check(each)
    num_tokens = sum(each.num_output for each in requests)
    return {
        "num_requests": len(requests),
        "num_clients": num_clients,
        "wall_s": run.wall_s,
        # fewer than tokens where a server sends several at once
        "num_events": sum(len(each.token_s) for each in run.exchanges),
        "output_tokens_per_s": num_tokens / run.wall_s,
        "ttft_s": spread([each.ttft_s for each in run.exchanges]),
        "itl_s": spread([gap for each in run.exchanges for gap in gaps_of(each)]),
    }


async def _run(
    url: str,
    model: str | None,
    requests: Sequence[BenchRequest],
    num_clients: int,
    body: Mapping[str, Any],
) -> LoadRun:
    async with HttpClient(url, timeout_s=DEADLINE_S) as client:
        target = Target(client, model, body=body)
        sent = [ServeRequest(each.token_ids, each.num_output) for each in requests]
        options = LoadOptions(max_concurrency=num_clients)
        return await run_load(target, sent, [0.0] * len(sent), options)


def check(seen: RequestTimeline) -> None:
    """Raise RuntimeError for a request that was not answered to its end: it is no measurement."""
    if not seen.is_ok:
        raise RuntimeError(f"a request failed ({seen.status}): {seen.error}")
