"""A run in numbers: rates, latencies, goodput under objectives, errors by status, and series over
time.

Latencies are of requests that were answered to their end; everything else is counted by its status,
never left out silently.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from quire.bench.serving.exchange import RequestTimeline
from quire.bench.serving.load import LoadRun
from quire.bench.spread import spread
from quire.errors import ConfigError

PERCENTILES = (50, 90, 95, 99)
OBJECTIVES = ("ttft", "tpot", "itl", "e2e")
"""What an objective may be about; `e2el` is read as `e2e`."""
_MAX_SAMPLES = 400
"""Points of a series."""


def parse_objectives(texts: Sequence[str]) -> dict[str, float]:
    """`ttft:500 tpot:50` as milliseconds by name. Raises ConfigError."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        name = "e2e" if name == "e2el" else name
        try:
            limit_ms = float(value)
        except ValueError:
            limit_ms = 0.0
        if name not in OBJECTIVES or not limit_ms > 0:
            raise ConfigError(
                f"{text!r} is no objective such as ttft:500 (milliseconds); names are "
                f"{', '.join(OBJECTIVES)}"
            )
        found[name] = limit_ms
    return found


def results(run: LoadRun, objectives_ms: Mapping[str, float]) -> dict[str, Any]:
    """Return all numbers of a run; times in seconds."""
    good = [each for each in run.exchanges if each.is_ok]
    bad = [each for each in run.exchanges if not each.is_ok]
    num_output = sum(each.num_output for each in good)
    num_prompt = sum(each.num_prompt or 0 for each in good)
    num_met = sum(meets(each, objectives_ms) for each in good)
    tpot = [each.tpot_s for each in good if each.tpot_s is not None]
    return {
        "wall_s": run.wall_s,
        "num_requests": len(run.exchanges),
        "num_ok": len(good),
        "statuses": dict(sorted(Counter(each.status for each in run.exchanges).items())),
        "errors": {each.status: each.error for each in bad},
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "requests_per_s": len(good) / run.wall_s,
        "output_tokens_per_s": num_output / run.wall_s,
        "total_tokens_per_s": (num_output + num_prompt) / run.wall_s,
        "goodput_requests_per_s": num_met / run.wall_s if objectives_ms else None,
        "goodput_share": num_met / max(1, len(run.exchanges)) if objectives_ms else None,
        "ttft_s": spread([each.ttft_s for each in good], PERCENTILES),
        "tpot_s": spread(tpot, PERCENTILES),
        "itl_s": spread([gap for each in good for gap in gaps_of(each)], PERCENTILES),
        "e2e_s": spread([each.e2e_s for each in good], PERCENTILES),
        "refusal_s": spread([each.e2e_s for each in bad if each.status.isdigit()], PERCENTILES),
        "send_delay_s": spread([each.sent_s - each.due_s for each in run.exchanges], PERCENTILES),
        "peak_concurrency": max((count for _, count in concurrency(run.exchanges)), default=0),
        "client": {
            "cpu_s": run.client_cpu_s,
            "cpu_s_per_output_token": run.client_cpu_s / max(1, num_output),
            "cpu_share": run.client_cpu_s / run.wall_s,
            "lag_s": spread(run.client_lag_s, PERCENTILES),
        },
    }


def gaps_of(seen: RequestTimeline) -> list[float]:
    """Times between successive events with text."""
    return [later - earlier for earlier, later in itertools.pairwise(seen.token_s)]


def meets(seen: RequestTimeline, objectives_ms: Mapping[str, float]) -> bool:
    """Return whether an answered request met every objective; `itl` is about its longest gap."""
    values = {
        "ttft": seen.ttft_s,
        "tpot": seen.tpot_s or 0.0,
        "itl": max(gaps_of(seen), default=0.0),
        "e2e": seen.e2e_s,
    }
    return all(1e3 * values[name] <= limit_ms for name, limit_ms in objectives_ms.items())


def concurrency(exchanges: Sequence[RequestTimeline]) -> list[tuple[float, int]]:
    """(moment, requests in flight from then on), in order."""
    changes = sorted(
        [(each.sent_s, 1) for each in exchanges] + [(each.end_s, -1) for each in exchanges]
    )
    levels = itertools.accumulate(change for _, change in changes)
    return [(moment, level) for (moment, _), level in zip(changes, levels, strict=True)]


def series(run: LoadRun) -> dict[str, Any]:
    """Return what happened over time, in equal intervals of a second or more."""
    interval_s = float(max(1, -(-run.wall_s // _MAX_SAMPLES)))
    count = int(run.wall_s // interval_s) + 1
    tokens, sent, ended = [0.0] * count, [0] * count, [0] * count
    for each in run.exchanges:
        sent[int(each.sent_s // interval_s)] += 1
        ended[min(count - 1, int(each.end_s // interval_s))] += 1
        # events may stand for several tokens
        weight = each.num_output / len(each.token_s) if each.token_s else 0.0
        for moment in each.token_s:
            tokens[min(count - 1, int(moment // interval_s))] += weight
    begun, done = itertools.accumulate(sent), itertools.accumulate([0, *ended])
    return {
        "interval_s": interval_s,
        "output_tokens_per_s": [round(each / interval_s, 3) for each in tokens],
        "in_flight": [a - b for a, b in zip(begun, done, strict=False)],
    }


def requests_table(run: LoadRun) -> dict[str, list[Any]]:
    """Return every request, by columns; what it did not get as far as is null."""

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 6)

    exchanges = run.exchanges
    return {
        "due_s": [rounded(each.due_s) for each in exchanges],
        "sent_s": [rounded(each.sent_s) for each in exchanges],
        "ttft_s": [rounded(each.ttft_s) if each.token_s else None for each in exchanges],
        "tpot_s": [rounded(each.tpot_s) if each.is_ok else None for each in exchanges],
        "e2e_s": [rounded(each.e2e_s) for each in exchanges],
        "num_prompt": [each.num_prompt for each in exchanges],
        "num_output": [each.num_output for each in exchanges],
        "status": [each.status for each in exchanges],
    }
