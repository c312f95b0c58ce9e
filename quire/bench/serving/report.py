"""A record of `quire bench serve` as one HTML file: no scripts, no fonts, no pictures from
elsewhere, so that it can be mailed.

Draws from the record alone, so that a report can be made again from a kept record. Everything that
a server said is escaped.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_WIDTH, _HEIGHT = 640, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 14, 14, 40
_COLORS = ("#2563eb", "#d97706", "#059669", "#dc2626")
_MAX_TIMELINE_ROWS = 400
"""Requests in the timeline; of more, every so-many-th is drawn."""
_MAX_POINTS = 500
"""Points of a distribution's curve: more than its pixels show nothing."""
_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1360px; margin: 2rem auto; padding: 0 1rem;
       color: #1f2937; background: #fff; }
h1 { font-size: 1.4rem; margin-bottom: .2rem } h2 { font-size: 1.05rem; margin: 1.6rem 0 .4rem }
p.note { color: #6b7280; margin: .1rem 0 1rem }
.tiles { display: flex; flex-wrap: wrap; gap: .8rem }
.tile { border: 1px solid #d1d5db; border-radius: 8px; padding: .5rem .9rem; min-width: 9rem }
.tile b { display: block; font-size: 1.3rem } .tile span { color: #6b7280 }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(560px, 1fr)); gap: 1rem }
figure { margin: 0 } figcaption { font-weight: 600 } svg { width: 100%; height: auto }
table { border-collapse: collapse }
td, th { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #e5e7eb }
td:first-child, th:first-child { text-align: left }
pre { overflow-x: auto; background: #f3f4f6; padding: .6rem }
text { font: 11px system-ui, sans-serif; fill: #6b7280 }
.axis { stroke: #9ca3af } .grid { stroke: #e5e7eb }
@media (prefers-color-scheme: dark) {
  body { color: #e5e7eb; background: #111827 } pre { background: #1f2937 }
  .grid, td, th { stroke: #374151; border-color: #374151 } }
""".strip()

Point = tuple[float, float]


class Frame(NamedTuple):
    """The ranges and names of two axes, which begin at 0."""

    x_max: float
    y_max: float
    x_name: str
    y_name: str

    def x(self, value: float) -> float:
        """In pixels."""
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * value / self.x_max

    def y(self, value: float) -> float:
        """In pixels."""
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.y_max


def render_html(record: Mapping[str, Any]) -> str:
    """Return the whole page."""
    server = record["server"]
    title = f"{server['model']} at {server['url']}"
    about = (
        f"{server['endpoint']}, workload {record['workload']['name']}, {record['started_at']}, "
        f"{record['machine']['cpu']}"
    )
    figures = [
        *(_cdf(record, key, name) for key, name in _DISTRIBUTIONS.items()),
        _throughput(record["series"]),
        _in_flight(record["series"]),
        _timeline(record["requests"], record["result"]["wall_s"]),
    ]
    details = {
        key: record[key]
        for key in ("command", "server", "workload", "configuration", "machine", "versions")
    }
    parts = [
        f"<h1>{_text(title)}</h1><p class=note>{_text(about)}</p>",
        f"<div class=tiles>{''.join(_tiles(record))}</div>",
        f"<h2>Latency</h2>{_table(record['result'])}",
        f"<h2>Over time</h2><div class=plots>{''.join(figures)}</div>",
        _statuses(record["result"]),
        f"<h2>How it was measured</h2><pre>{_text(json.dumps(details, indent=1))}</pre>",
    ]
    head = f'<meta charset="utf-8"><title>{_text(title)}</title><style>{_STYLE}</style>'
    return (
        f"<!doctype html>\n<html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>\n"
    )


_DISTRIBUTIONS = {
    "ttft_s": "Time to first token",
    "tpot_s": "Time per output token",
    "e2e_s": "Whole answer",
}
_LATENCIES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "itl_s": "gap between tokens",
    "e2e_s": "whole answer",
    "refusal_s": "refusal",
    "send_delay_s": "sent late by the client",
}


def _text(value: object) -> str:
    return html.escape(str(value))


def _tiles(record: Mapping[str, Any]) -> list[str]:
    result = record["result"]
    tiles = {
        "output tokens/s": f"{result['output_tokens_per_s']:,.1f}",
        "requests/s": f"{result['requests_per_s']:.2f}",
        "answered": f"{result['num_ok']} of {result['num_requests']}",
        "at once, at most": str(result["peak_concurrency"]),
    }
    if result["goodput_share"] is not None:
        tiles["met the objectives"] = f"{result['goodput_share']:.1%}"
    tiles["client's share of a core"] = f"{result['client']['cpu_share']:.0%}"
    return [
        f"<div class=tile><b>{_text(value)}</b><span>{_text(name)}</span></div>"
        for name, value in tiles.items()
    ]


def _table(result: Mapping[str, Any]) -> str:
    columns = ("mean", "p50", "p90", "p95", "p99")
    rows = []
    for key, name in _LATENCIES.items():
        if result[key] is not None:
            cells = "".join(f"<td>{1e3 * result[key][column]:,.1f}</td>" for column in columns)
            rows.append(f"<tr><td>{_text(name)}</td>{cells}</tr>")
    heads = "".join(f"<th>{column}</th>" for column in columns)
    return f"<table><tr><th>milliseconds</th>{heads}</tr>{''.join(rows)}</table>"


def _statuses(result: Mapping[str, Any]) -> str:
    if set(result["statuses"]) <= {"ok"}:
        return ""
    rows = [
        f"<tr><td>{_text(status)}</td><td>{count}</td>"
        f"<td>{_text(result['errors'].get(status, ''))}</td></tr>"
        for status, count in result["statuses"].items()
    ]
    return (
        "<h2>Statuses</h2><table><tr><th>status</th><th>requests</th><th>an "
        f"example</th></tr>{''.join(rows)}</table>"
    )


def _cdf(record: Mapping[str, Any], key: str, name: str) -> str:
    values = sorted(1e3 * value for value in record["requests"][key] if value is not None)
    if not values:
        return ""
    step = max(1, len(values) // _MAX_POINTS)
    points = [
        (value, (rank + 1) / len(values)) for rank, value in enumerate(values) if rank % step == 0
    ]
    points = [(points[0][0], 0.0), *points, (values[-1], 1.0)]
    frame = Frame(_rounded_up(values[-1]), 1.0, "ms", "share of requests")
    limit = record["configuration"]["objectives_ms"].get(key.removesuffix("_s"))
    marks = "" if limit is None or limit > frame.x_max else _vertical(frame, limit, "objective")
    return _figure(name, frame, _curve(frame, points, 0) + marks)


def _throughput(series: Mapping[str, Any]) -> str:
    values = series["output_tokens_per_s"]
    return _over_time("Output tokens per second", "tokens/s", series["interval_s"], values)


def _in_flight(series: Mapping[str, Any]) -> str:
    return _over_time("Requests in flight", "requests", series["interval_s"], series["in_flight"])


def _over_time(name: str, unit: str, interval_s: float, values: Sequence[float]) -> str:
    frame = Frame(max(1, len(values)) * interval_s, _rounded_up(max(values, default=0)), "s", unit)
    points = [
        (moment, value)
        for number, value in enumerate(values)
        for moment in (number * interval_s, (number + 1) * interval_s)
    ]
    return _figure(name, frame, _curve(frame, points, 1))


def _timeline(requests: Mapping[str, Sequence[Any]], wall_s: float) -> str:
    """Return one row per request: waiting at the client, waiting for the first token, being
    answered; or refused."""
    count = len(requests["sent_s"])
    step = -(-count // _MAX_TIMELINE_ROWS)
    rows = range(0, count, step)
    frame = Frame(
        _rounded_up(wall_s),
        max(1, len(rows)),
        "s",
        "requests" if step == 1 else f"every {step}th request",
    )
    height = max(0.6, (frame.y(0) - frame.y(1)) * 0.8)
    bars: list[str] = []
    for place, number in enumerate(rows):
        due, sent, ttft, e2e = (
            requests[key][number] for key in ("due_s", "sent_s", "ttft_s", "e2e_s")
        )
        first, end = sent + (e2e if ttft is None else ttft), sent + e2e
        is_ok = requests["status"][number] == "ok"
        y = frame.y(place + 1) + 0.1 * height
        for start, stop, color in (
            (due, sent, "#d1d5db"),
            (sent, first, _COLORS[1]),
            (first, end, _COLORS[0]),
        ):
            if stop > start:
                shown = color if is_ok or color == "#d1d5db" else _COLORS[3]
                width = max(0.3, frame.x(stop) - frame.x(start))
                bars.append(
                    f'<rect x="{frame.x(start):.1f}" y="{y:.1f}" width="{width:.1f}" '
                    f'height="{height:.1f}" fill="{shown}"/>'
                )
    caption = (
        "Requests: held back (grey), to the first token (amber), answered (blue), failed (red)"
    )
    return _figure(caption, frame, "".join(bars))


def _figure(name: str, frame: Frame, content: str) -> str:
    label = f'role="img" aria-label="{html.escape(name, quote=True)}"'
    svg = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" {label}>{_axes(frame)}{content}</svg>'
    return f"<figure><figcaption>{_text(name)}</figcaption>{svg}</figure>"


def _axes(frame: Frame) -> str:
    bottom, right = _HEIGHT - _BOTTOM, _WIDTH - _RIGHT
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x, y = frame.x(share * frame.x_max), frame.y(share * frame.y_max)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(
            f'<text x="{x:.1f}" y="{bottom + 16}" '
            f'text-anchor="middle">{_short(share * frame.x_max)}</text>'
        )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" '
            f'text-anchor="end">{_short(share * frame.y_max)}</text>'
        )
    parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    parts.append(
        f'<text x="{right}" y="{_HEIGHT - 6}" text-anchor="end">{_text(frame.x_name)}</text>'
    )
    parts.append(f'<text x="4" y="{_TOP - 3}">{_text(frame.y_name)}</text>')
    return "".join(parts)


def _curve(frame: Frame, points: Sequence[Point], color: int) -> str:
    path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in points)
    return f'<polyline fill="none" stroke="{_COLORS[color]}" stroke-width="1.8" points="{path}"/>'


def _vertical(frame: Frame, value: float, name: str) -> str:
    x = frame.x(value)
    line = (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}" '
        f'stroke="{_COLORS[3]}" stroke-dasharray="4 3"/>'
    )
    return f'{line}<text x="{x + 4:.1f}" y="{_TOP + 10}">{_text(name)}</text>'


def _rounded_up(value: float) -> float:
    """Return the next of 1, 2, 2.5, 4, 5 and 8 times a power of ten, whose quarters are easy to
    read."""
    if value <= 0:
        return 1.0
    power = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 1e-6
    while power * 10 <= value:
        power *= 10
    return next(power * factor for factor in (1, 2, 2.5, 4, 5, 8, 10) if power * factor >= value)


def _short(value: float) -> str:
    return (
        f"{value:,.0f}"
        if value >= 100
        else f"{value:g}"
        if value == round(value, 2)
        else f"{value:.3g}"
    )
