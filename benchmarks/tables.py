"""What a comparison's record says: medians, ratios, shares of the machine's limits, and tables of them in Markdown.

`python -m benchmarks.tables RECORD...` prints the tables of records again; also of runs that are not finished (FILE.jsonl).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.journal import read_lines, record_of
from benchmarks.variants import Variant
from quire.bench.bound import MachineRates, bandwidth_s, compute_s, ideal_steps, roofline_s
from quire.bench.workload import WORKLOADS
from quire.models.registry import declare

_EIGHT_BIT_PRODUCTS = ("w8a8", "int8", "q8_0", "int4", "q4_0")
"""Forms that may multiply in 8-bit integers, so that the machine's rate for those is their limit."""


def summarize(record: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """By workload and variant: medians and ranges over the rounds, and shares of what the machine allows.

    `compute_share` is the time that the operations of an ideal schedule take at the best rate measured, over the median
    time; `bandwidth_share` the same for its bytes; `roofline_share` for the longer of the two in each step. For a single
    sequence, the shares of `token_s` leave the prompt out.
    """
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for name in record["workloads"]:  # none, if nothing was measured
        rows = {}
        for variant in record["variants"]:
            runs = [each for each in record["measurements"] if (each["variant"], each["workload"]) == (variant, name)]
            if runs:
                rows[variant] = _row(record, (name, variant), runs)
        summary[name] = rows
    return summary


def best_peaks(record: Mapping[str, Any]) -> dict[str, float]:
    """The best of each limit over the rounds."""
    bandwidth = max(each["read_bytes_per_s"] for each in record["peaks"])
    gemms = [each["gemm_flops_per_s"] for each in record["peaks"]]
    return {"bandwidth": bandwidth, **{dtype: max(each[dtype] for each in gemms) for dtype in gemms[0]}}


def rates_of(record: Mapping[str, Any], variant: Variant) -> MachineRates:
    """The limits that a variant is held against: the best float product, or for 8-bit forms the best of any type."""
    peaks = best_peaks(record)
    floats = max(peaks["float32"], peaks["bfloat16"])
    linear = max(floats, peaks.get("int8", 0.0)) if variant.form in _EIGHT_BIT_PRODUCTS else floats
    return MachineRates(linear, floats, peaks["bandwidth"])


def _row(record: Mapping[str, Any], which: tuple[str, str], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    name, variant = which[0], Variant.parse(which[1])
    spec, counts = declare(record["config"]), record["workloads"][name]
    requests = WORKLOADS[name].requests(0, record["config"]["vocab_size"])[: record["first_requests"]]
    steps, rates = ideal_steps(spec, requests, variant.bytes_per_weight), rates_of(record, variant)
    wall_s = median(each["wall_s"] for each in runs)
    rates_seen = [counts["num_output_tokens"] / each["wall_s"] for each in runs]
    row: dict[str, Any] = {
        "num_rounds": len(runs),
        "wall_s": wall_s,
        "output_tokens_per_s": median(rates_seen),
        "lowest": min(rates_seen),
        "highest": max(rates_seen),
        "cpu_s": median(each["cpu_s"] for each in runs),
        "peak_rss_bytes": max(each["peak_rss_bytes"] for each in runs),
        "compute_share": compute_s(steps, rates) / wall_s,
        "bandwidth_share": bandwidth_s(steps, rates) / wall_s,
        "roofline_share": roofline_s(steps, rates) / wall_s,
    }
    streams = [each["token_s"] for each in runs if each["token_s"]]
    if streams:
        row["ttft_s"] = median(each[0] for each in streams)
        if len(streams[0]) > 1:
            row["token_s"] = median((each[-1] - each[0]) / (len(each) - 1) for each in streams)
            row["token_bandwidth_share"] = bandwidth_s(steps[1:], rates) / len(steps[1:]) / row["token_s"]
    return row


# -- Markdown ------------------------------------------------------------------------------------------------------------


def render(record: Mapping[str, Any]) -> str:
    """The whole record as Markdown."""
    if not record["measurements"]:
        return "\n".join([f"{record['model']}: nothing was measured", *_notes(record)])
    machine, versions, peaks = record["machine"], record["versions"], best_peaks(record)
    products = ", ".join(f"{dtype} {peaks[dtype] / 1e9:,.0f}" for dtype in record["peaks"][0]["gemm_flops_per_s"])
    lines = [
        f"{record['model']} on {machine['cpu']}, threads: {record['num_threads']}; quire {versions['quire']} "
        f"({versions['commit']}), torch {versions['torch']}; {record['started_at']}. Limits measured: {products} GFLOP/s, "
        f"{peaks['bandwidth'] / 1e9:.1f} GB/s.",
        *_notes(record),
    ]
    lines += ["", *overview(record)]
    for name in record["summary"]:
        lines += ["", *render_workload(record, name)]
    return "\n".join(lines)


def _notes(record: Mapping[str, Any]) -> list[str]:
    """Versions of the peers, commits if there were several, and what failed: absent from records older than those fields."""
    versions = {Variant.parse(name).engine: each.get("version") for name, each in record["variants"].items()}
    versions.pop("quire", None)
    commits = [str(commit) for commit in record.get("commits", [])]
    notes = ["", "Peers: " + ", ".join(f"{engine} {version}" for engine, version in versions.items())] if versions else []
    if len(commits) > 1:
        notes += ["", f"Quire changed while it was measured: {', '.join(commits)}"]
    for name, error in record.get("failures", {}).items():
        notes += ["", f"{name} failed: {error.strip().splitlines()[-1]}"]
    return notes


def overview(record: Mapping[str, Any]) -> list[str]:
    """One row an engine, one column a workload: what a reader asks first, with the share of the machine's limit."""
    summary = record["summary"]
    lines = [f"| variant | {' | '.join(summary)} |", "|---" * (len(summary) + 1) + "|"]
    for variant in record["variants"]:
        cells = [_overview_cell(rows[variant]) if variant in rows else "-" for rows in summary.values()]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines


def _overview_cell(row: Mapping[str, Any]) -> str:
    if "token_s" in row:
        return f"{1e3 * row['token_s']:.1f} ms/token, {row['token_bandwidth_share']:.0%} of bandwidth"
    if "ttft_s" in row:
        return f"{row['ttft_s']:.2f} s, {row['compute_share']:.0%} of compute"
    return f"{row['output_tokens_per_s']:,.1f} tok/s, {row['compute_share']:.0%} of compute"


def render_workload(record: Mapping[str, Any], name: str) -> list[str]:
    """One workload's table. The factor says how many times as fast the first variant of Quire is."""
    counts, rows = record["workloads"][name], record["summary"][name]
    is_latency = any("token_s" in row for row in rows.values())
    measures = ["ms/token", "first token s", "of bandwidth"] if is_latency else ["seconds", "of compute", "of roofline"]
    lines = [
        f"{name}: {counts['num_sequences']} sequences, {counts['num_prompt_tokens']:,} prompt and "
        f"{counts['num_output_tokens']:,} output tokens; medians of {max(row['num_rounds'] for row in rows.values())}",
        "",
        f"| variant | output tok/s (range) | Quire is faster by | {' | '.join(measures)} | CPU s | memory GiB | ready s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant, row in rows.items():
        cells = [
            f"{row['output_tokens_per_s']:,.1f} ({row['lowest']:,.1f}-{row['highest']:,.1f})",
            factor(rows, variant),
            *_measures(row, is_latency=is_latency),
            f"{row['cpu_s']:.1f}",
            f"{row['peak_rss_bytes'] / 2**30:.1f}",
            f"{record['variants'][variant]['ready_s']:.0f}",
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines


def factor(rows: Mapping[str, Mapping[str, Any]], variant: str) -> str:
    """How many times as fast as a peer Quire is: by time per token where there is one, else by throughput."""
    mine = next((row for name, row in rows.items() if name.startswith("quire:")), None)
    if mine is None or variant.startswith("quire:"):
        return ""
    theirs = rows[variant]
    by_token = "token_s" in mine and "token_s" in theirs
    return f"{theirs['token_s'] / mine['token_s'] if by_token else theirs['wall_s'] / mine['wall_s']:.2f}x"


def _measures(row: Mapping[str, Any], *, is_latency: bool) -> list[str]:
    if is_latency:
        return [f"{1e3 * row['token_s']:.1f}", f"{row['ttft_s']:.2f}", f"{row['token_bandwidth_share']:.0%}"]
    return [f"{row['wall_s']:.2f}", f"{row['compute_share']:.0%}", f"{row['roofline_share']:.0%}"]


def read_record(path: Path) -> dict[str, Any]:
    """A record, or what a journal amounts to so far."""
    if path.suffix != ".jsonl":
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    record = record_of(read_lines(path))
    return {**record, "summary": summarize(record)}


if __name__ == "__main__":
    print("\n\n".join(render(read_record(Path(each))) for each in sys.argv[1:]))
