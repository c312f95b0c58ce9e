"""A whole measurement of a server: find the model, warm up, load it as asked, and make the record.

The record is that of all benchmarks (docs/benchmarks/records.md), of the kind "serve".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.bench import record as records
from quire.bench.serving.arrivals import Arrivals, replayed
from quire.bench.serving.dataset import Dataset, ServeRequest, check_endpoint
from quire.bench.serving.exchange import RequestTimeline, Target
from quire.bench.serving.load import LoadOptions, run_load
from quire.bench.serving.results import requests_table, results, series
from quire.common.http_client import HttpClient, HttpError, HttpRequest
from quire.engine.plan.machine import Machine
from quire.errors import ConfigError, EngineError

BUSY_CLIENT_SHARE = 0.5
"""Above this share of a core, the client's own queue becomes part of what it measures."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to do, besides the requests themselves."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    """None: the first that the server names."""
    is_chat: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    arrivals: Arrivals | None = None
    """None: the trace's own."""
    speed_up: float = 1.0
    """Of the trace's own arrivals."""
    seed: int = 0
    load: LoadOptions = field(default_factory=LoadOptions)
    num_warmups: int = 1
    timeout_s: float = 600.0
    objectives_ms: Mapping[str, float] = field(default_factory=dict)
    command: str = ""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    model: str
    max_model_len: int | None
    version: str | None


async def measure_server(
    options: ServeOptions, dataset: Dataset, tell: Tell = lambda text: None
) -> dict[str, Any]:
    """Measure; a record that `record.problems` has nothing against. Raises ConfigError,
    HttpError or EngineError."""
    check_endpoint(dataset.requests, is_chat=options.is_chat)
    due = _due(options, dataset)
    started_at, machine = records.timestamp(), records.describe_machine(Machine.inspect())
    async with HttpClient(
        options.url, headers=options.headers, timeout_s=options.timeout_s
    ) as client:
        info = await ask_server(client, options.model)
        target = Target(client, info.model, options.is_chat, options.body)
        tell(f"warming up {info.model} at {client.address.netloc}")
        await _warm_up(target, dataset.requests[0], options.num_warmups)
        tell(f"sending {len(dataset.requests)} requests")
        run = await run_load(target, dataset.requests, due, options.load)
    if not run.exchanges:
        raise EngineError("no request was sent")
    return {
        "schema": records.SCHEMA,
        "kind": "serve",
        "started_at": started_at,
        "command": options.command,
        "machine": machine,
        "versions": records.describe_versions(),
        "server": {
            "url": options.url,
            "model": info.model,
            "endpoint": "chat" if options.is_chat else "completions",
            "max_model_len": info.max_model_len,
            "version": info.version,
        },
        "workload": {
            "name": dataset.name,
            "parameters": dataset.parameters,
            "totals": _totals(dataset.requests),
        },
        "configuration": _configuration(options),
        "result": results(run, options.objectives_ms),
        "series": series(run),
        "requests": requests_table(run),
    }


async def ask_server(client: HttpClient, model: str | None) -> ServerInfo:
    """Return what is served there; a server without /v1/models must be told the model's name.
    Raises HttpError, ConfigError."""
    answer = await client.request(HttpRequest("GET", "/v1/models"))
    if answer.status in (401, 403):
        raise ConfigError(
            f"{client.address.netloc} answers {answer.status}: give a valid key with --api-key"
        )
    entry: dict[str, Any] = {}
    if answer.status == 200:
        try:
            entries = [
                each for each in msgspec.json.decode(answer.body)["data"] if isinstance(each, dict)
            ]
            entry = next((each for each in entries if model in (None, each.get("id"))), {})
        except (msgspec.DecodeError, KeyError, TypeError) as error:
            raise HttpError(
                f"/v1/models is not answered as OpenAI's API does: {type(error).__name__}",
                kind="protocol",
            ) from None
    name = model if model is not None else entry.get("id")
    if not isinstance(name, str):
        raise ConfigError(
            f"{client.address.netloc} names no model (/v1/models: status {answer.status}); "
            "give it with --model"
        )
    longest = entry.get("max_model_len")
    return ServerInfo(name, longest if isinstance(longest, int) else None, await _version(client))


async def _version(client: HttpClient) -> str | None:
    """Return the server's version, as Quire and vLLM give it."""
    answer = await client.request(HttpRequest("GET", "/version"))
    if answer.status != 200:
        return None
    try:
        version = msgspec.json.decode(answer.body, type=dict[str, Any]).get("version")
    except msgspec.DecodeError:
        return None
    return version if isinstance(version, str) else None


async def _warm_up(target: Target, request: ServeRequest, count: int) -> None:
    """Send a few requests that are not counted; the first that fails ends the measurement."""
    for _ in range(count):
        seen = RequestTimeline(0.0)
        await target.exchange(request, seen)
        if not seen.is_ok:
            raise EngineError(
                f"the first request failed ({seen.status}): {' '.join(seen.error.split())}"
            )


def _due(options: ServeOptions, dataset: Dataset) -> list[float]:
    if options.arrivals is not None:
        return options.arrivals.times(len(dataset.requests), options.seed)
    if dataset.arrival_s is None:
        return [0.0] * len(dataset.requests)
    return replayed(dataset.arrival_s, options.speed_up)


def _configuration(options: ServeOptions) -> dict[str, Any]:
    arrivals = options.arrivals
    return {
        "request_rate": None if arrivals is None else _finite(arrivals.rate),
        "end_rate": None if arrivals is None else arrivals.end_rate,
        "burstiness": None if arrivals is None else _finite(arrivals.burstiness),
        "speed_up": options.speed_up if arrivals is None else None,
        "max_concurrency": options.load.max_concurrency,
        "duration_s": options.load.duration_s,
        "num_warmups": options.num_warmups,
        "objectives_ms": dict(options.objectives_ms),
        "body": dict(options.body),
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return None if value == math.inf else value


def _totals(requests: Sequence[ServeRequest]) -> dict[str, int]:
    ids = sum(len(each.prompt) for each in requests if isinstance(each.prompt, list))
    return {
        "num_requests": len(requests),
        "num_prompt_ids": ids,
        "num_output_tokens": sum(each.num_output for each in requests),
    }


def render(record: Mapping[str, Any]) -> list[str]:
    """Return a record for people."""
    result, server, client = record["result"], record["server"], record["result"]["client"]
    lines = [
        f"{server['model']} at {server['url']} ({server['endpoint']}), workload "
        f"{record['workload']['name']}: "
        f"{result['num_ok']} of {result['num_requests']} requests answered in "
        f"{result['wall_s']:.1f} s, "
        f"at most {result['peak_concurrency']} at once",
        f"throughput   {result['output_tokens_per_s']:,.1f} output, "
        f"{result['total_tokens_per_s']:,.1f} total tokens/s; "
        f"{result['requests_per_s']:.2f} requests/s",
    ]
    names = {
        "first token": "ttft_s",
        "per token": "tpot_s",
        "token gap": "itl_s",
        "end to end": "e2e_s",
        "refusal": "refusal_s",
    }
    for name, key in names.items():
        if result[key] is not None:
            parts = ", ".join(
                f"{1e3 * result[key][p]:,.1f} {p}" for p in ("p50", "p90", "p95", "p99")
            )
            lines.append(f"{name:<12} {parts} ms")
    if result["goodput_share"] is not None:
        objectives = " ".join(
            f"{name}:{limit:g}" for name, limit in record["configuration"]["objectives_ms"].items()
        )
        rate, share = result["goodput_requests_per_s"], result["goodput_share"]
        lines.append(f"goodput      {rate:.2f} requests/s, {share:.1%} of all ({objectives})")
    if result["num_ok"] < result["num_requests"]:
        lines.append(
            "statuses     "
            + ", ".join(f"{status}: {count}" for status, count in result["statuses"].items())
        )
        lines += [
            f"  {status}: {' '.join(text.split())}" for status, text in result["errors"].items()
        ]
    lines.append(
        f"this client  {1e6 * client['cpu_s_per_output_token']:.0f} us of processor time a token, "
        f"{client['cpu_share']:.0%} of a core"
        + (
            "; it may be what limits the figures above"
            if client["cpu_share"] > BUSY_CLIENT_SHARE
            else ""
        )
    )
    return lines
