"""What a comparison's record says: medians, ratios, shares of the machine's limits, and tables of
them in Markdown.

`python -m benchmarks.tables RECORD...` prints the tables of records again: of files, of runs that
are not finished (FILE.jsonl), or of records in the archive by their names.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.journal import read_lines, record_of
from benchmarks.records import read_archive
from benchmarks.result import counterpart
from benchmarks.variants import Variant
from quire.bench.bound import (
    IdealStep,
    MachineRates,
    bandwidth_s,
    compute_s,
    ideal_steps,
    roofline_s,
)
from quire.bench.roofline import Peaks
from quire.bench.workload import WORKLOADS
from quire.models.registry import declare

_EIGHT_BIT_PRODUCTS = ("w8a8", "int8", "q8_0", "int4", "q4_0")
"""Forms that may multiply in 8-bit integers,
so that the machine's rate for those is their limit."""


def summarize(record: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Return by workload and variant: medians and ranges over the rounds, and shares of what the
    machine allows.

    `compute_share` is the time that the operations of an ideal schedule take at the limits of the
    same run, over the time taken, in the median of the rounds; `bandwidth_share` the same for its
    bytes; `roofline_share` for the longer of the two in each step. For a single sequence, the
    shares of `token_s` leave the prompt out. Records older than limits of runs have the median time
    held against the best limits of the record.
    """
    summary: dict[str, dict[str, dict[str, Any]]] = {}
    for name in record["workloads"]:  # none, if nothing was measured
        rows = {}
        for variant in record["variants"]:
            runs = [
                each
                for each in record["measurements"]
                if (each["variant"], each["workload"]) == (variant, name)
            ]
            if runs:
                rows[variant] = _row(record, (name, variant), runs)
        summary[name] = rows
    return summary


def limits_of(record: Mapping[str, Any]) -> list[Peaks]:
    """Return all limits of a record: of each run, in older ones of each round."""
    runs = [Peaks(**each["limits"]) for each in record["measurements"] if "limits" in each]
    return runs or [
        Peaks(each["read_bytes_per_s"], each["gemm_flops_per_s"], {}, 1) for each in record["peaks"]
    ]


def best_peaks(record: Mapping[str, Any]) -> Peaks:
    """Return the best of each limit over the runs."""
    limits = limits_of(record)
    gemms = [each.gemm_flops_per_s for each in limits]
    best = {
        dtype: max(each.get(dtype, 0.0) for each in gemms)
        for dtype in {name: None for each in gemms for name in each}
    }
    return Peaks(
        max(each.read_bytes_per_s for each in limits),
        best,
        {},
        sum(each.num_samples for each in limits),
    )


def rates_of(peaks: Peaks, variant: Variant) -> MachineRates:
    """Return the limits that a variant is held against: the best float product,
    or for 8-bit forms the best of any type."""
    linear = peaks.best_product if variant.form in _EIGHT_BIT_PRODUCTS else peaks.best_gemm
    return MachineRates(linear, peaks.best_gemm, peaks.read_bytes_per_s)


def _row(
    record: Mapping[str, Any], which: tuple[str, str], runs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    name, variant = which[0], Variant.parse(which[1])
    spec, counts = declare(record["config"]), record["workloads"][name]
    requests = WORKLOADS[name].requests(0, record["config"]["vocab_size"])[
        : record["first_requests"]
    ]
    steps = ideal_steps(spec, requests, variant.bytes_per_weight)
    walls = [each["wall_s"] for each in runs]
    rates_seen = [counts["num_output_tokens"] / each for each in walls]

    def share(
        least_s: Callable[[Sequence[IdealStep], MachineRates], float],
        seconds: Sequence[float] = walls,
    ) -> float:
        held = _held(record, variant, runs, seconds)
        return median(least_s(steps, rates) / taken_s for taken_s, rates in held)

    row: dict[str, Any] = {
        "num_rounds": len(runs),
        "wall_s": median(walls),
        "output_tokens_per_s": median(rates_seen),
        "lowest": min(rates_seen),
        "highest": max(rates_seen),
        "cpu_s": median(each["cpu_s"] for each in runs),
        "peak_rss_bytes": max(each["peak_rss_bytes"] for each in runs),
        "compute_share": share(compute_s),
        "bandwidth_share": share(bandwidth_s),
        "roofline_share": share(roofline_s),
    }
    if all(each["token_s"] for each in runs):
        streams = [each["token_s"] for each in runs]
        row["ttft_s"] = median(each[0] for each in streams)
        if len(streams[0]) > 1:
            token_s = [(each[-1] - each[0]) / (len(each) - 1) for each in streams]
            row["token_s"] = median(token_s)
            row["token_bandwidth_share"] = share(_token_bandwidth_s, token_s)
    return row


def _token_bandwidth_s(steps: Sequence[IdealStep], rates: MachineRates) -> float:
    """Return the time of a token after the first."""
    return bandwidth_s(steps[1:], rates) / len(steps[1:])


def _held(
    record: Mapping[str, Any],
    variant: Variant,
    runs: Sequence[Mapping[str, Any]],
    seconds: Sequence[float],
) -> list[tuple[float, MachineRates]]:
    """Times that the runs took, each with its own limits;
    of older records the median time with the best limits."""
    if "limits" in runs[0]:
        return [
            (each, rates_of(Peaks(**run["limits"]), variant))
            for each, run in zip(seconds, runs, strict=True)
        ]
    return [(median(seconds), rates_of(best_peaks(record), variant))]


# -- Markdown
# --------------------------------------------------------------------------------------------------


def render(record: Mapping[str, Any]) -> str:
    """Return the whole record as Markdown."""
    if not record["measurements"]:
        return "\n".join([f"{record['model']}: nothing was measured", *_notes(record)])
    machine, versions = record["machine"], record["versions"]
    lines = [
        f"{record['model']} on {machine['cpu']}, threads: {record['num_threads']}; quire "
        f"{versions['quire']} "
        f"({versions['commit']}), torch {versions['torch']}; {record['started_at']}. "
        f"{_limits(record)}",
        *_notes(record),
    ]
    lines += ["", *overview(record)]
    for name in record["summary"]:
        lines += ["", *render_workload(record, name)]
    return "\n".join(lines)


def _limits(record: Mapping[str, Any]) -> str:
    """Return what the machine allowed: the range over the runs,
    in older records the best of the rounds."""
    if "limits" not in record["measurements"][0]:
        peaks = best_peaks(record)
        products = ", ".join(
            f"{dtype} {rate / 1e9:,.0f}" for dtype, rate in peaks.gemm_flops_per_s.items()
        )
        return f"Limits measured: {products} GFLOP/s, {peaks.read_bytes_per_s / 1e9:.1f} GB/s."
    limits = limits_of(record)
    floats, products, reads = (
        f"{min(rates) / 1e9:,.{digits}f} to {max(rates) / 1e9:,.{digits}f}"
        for digits, rates in (
            (0, [each.best_gemm for each in limits]),
            (0, [each.best_product for each in limits]),
            (1, [each.read_bytes_per_s for each in limits]),
        )
    )
    return (
        f"Limits sampled during the runs: {floats} GFLOP/s in floating point, {products} "
        "Gop/s in the best of any type, "
        f"{reads} GB/s."
    )


def _notes(record: Mapping[str, Any]) -> list[str]:
    """Versions of the peers, commits if there were several, and what failed:
    absent from records older than those fields."""
    versions = {
        Variant.parse(name).engine: each.get("version") for name, each in record["variants"].items()
    }
    versions.pop("quire", None)
    commits = [str(commit) for commit in record.get("commits", [])]
    notes = (
        ["", "Peers: " + ", ".join(f"{engine} {version}" for engine, version in versions.items())]
        if versions
        else []
    )
    if len(commits) > 1:
        notes += ["", f"Quire changed while it was measured: {', '.join(commits)}"]
    for name, error in record.get("failures", {}).items():
        notes += ["", f"{name} failed: {error.strip().splitlines()[-1]}"]
    return notes


def overview(record: Mapping[str, Any]) -> list[str]:
    """Return one row per engine, one column per workload: what a reader asks first,
    with the share of the machine's limit."""
    summary = record["summary"]
    lines = [f"| variant | {' | '.join(summary)} |", "|---" * (len(summary) + 1) + "|"]
    for variant in record["variants"]:
        cells = [
            _overview_cell(rows[variant]) if variant in rows else "-" for rows in summary.values()
        ]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return lines


def _overview_cell(row: Mapping[str, Any]) -> str:
    if "token_s" in row:
        return (
            f"{1e3 * row['token_s']:.1f} ms/token, {row['token_bandwidth_share']:.0%} of bandwidth"
        )
    if "ttft_s" in row:
        return f"{row['ttft_s']:.2f} s, {row['compute_share']:.0%} of compute"
    return f"{row['output_tokens_per_s']:,.1f} tok/s, {row['compute_share']:.0%} of compute"


def render_workload(record: Mapping[str, Any], name: str) -> list[str]:
    """Return one workload's table. The factor says how many times as fast the
    first variant of Quire is."""
    counts, rows = record["workloads"][name], record["summary"][name]
    is_latency = any("token_s" in row for row in rows.values())
    measures = (
        ["ms/token", "first token s", "of bandwidth"]
        if is_latency
        else ["seconds", "of compute", "of roofline"]
    )
    lines = [
        f"{name}: {counts['num_sequences']} sequences, {counts['num_prompt_tokens']:,} prompt and "
        f"{counts['num_output_tokens']:,} output tokens; medians of "
        f"{max(row['num_rounds'] for row in rows.values())}",
        "",
        (
            f"| variant | output tok/s (range) | Quire is faster by | {' | '.join(measures)} | "
            "CPU s | memory GiB | ready s |"
        ),
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
    """Return how many times as fast as a peer Quire is with weights of the same width (or in its
    first row, where it has none): by time per token where there is one, else by throughput."""
    first = next((row for name, row in rows.items() if name.startswith("quire:")), None)
    mine = rows.get(counterpart(variant), first)
    if mine is None or variant.startswith("quire:"):
        return ""
    theirs = rows[variant]
    by_token = "token_s" in mine and "token_s" in theirs
    unit = "token_s" if by_token else "wall_s"
    return f"{theirs[unit] / mine[unit]:.2f}x"


def _measures(row: Mapping[str, Any], *, is_latency: bool) -> list[str]:
    if is_latency:
        return [
            f"{1e3 * row['token_s']:.1f}",
            f"{row['ttft_s']:.2f}",
            f"{row['token_bandwidth_share']:.0%}",
        ]
    return [f"{row['wall_s']:.2f}", f"{row['compute_share']:.0%}", f"{row['roofline_share']:.0%}"]


def read_record(path: Path) -> Mapping[str, Any]:
    """Read a record, what a journal amounts to so far, or, where there is no such file,
    the archive's record of that name."""
    if not path.exists() and (archived := read_archive().get(path.name)) is not None:
        return archived
    if path.suffix != ".jsonl":
        record: dict[str, Any] = json.loads(path.read_text())
        return record
    record = record_of(read_lines(path))
    return {**record, "summary": summarize(record)}


if __name__ == "__main__":
    print("\n\n".join(render(read_record(Path(each))) for each in sys.argv[1:]))
