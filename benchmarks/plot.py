"""Figures from the records of `benchmarks.compare`: `python -m benchmarks.plot RECORD... --out
FOLDER`.

`batch`: output tokens per second against the number of equal requests at once (workloads B1 to
B64), 16-bit weights and smaller ones side by side. `roofline`: what each engine attains on each
workload against what the machine allows. Each is written twice as SVG that needs nothing else, for
light and for dark pages. Owns no numbers: all come from the records.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.tables import best_peaks, read_record
from benchmarks.variants import Variant
from quire.bench.bound import ideal_steps
from quire.bench.roofline import Peaks
from quire.bench.workload import WORKLOADS
from quire.models.registry import declare

Record = Mapping[str, Any]
Panel = Callable[[Any], None]
"""Draws on a matplotlib axis."""

THEMES = {
    "light": {"ink": "#24292f", "faint": "#d0d7de"},
    "dark": {"ink": "#e6edf3", "faint": "#3d444d"},
}
COLOURS = {
    "quire": "#e8590c",
    "vllm": "#4c8dff",
    "openvino": "#2da44e",
    "llamacpp": "#a475f9",
    "transformers": "#8b949e",
}
"""Chosen to be told apart on white and on near-black."""
NAMES = {
    "quire": "Quire",
    "vllm": "vLLM",
    "openvino": "OpenVINO",
    "llamacpp": "llama.cpp",
    "transformers": "Transformers",
}
MARKERS = {"W1": "o", "W2": "s", "W3": "^", "W4": "D", "W5": "P"}


def main(argv: Sequence[str] | None = None) -> int:
    """Draw what the records hold."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.plot"
    )
    parser.add_argument(
        "records",
        nargs="+",
        type=Path,
        help="JSON files of benchmarks.compare, finished or not, or names in the archive",
    )
    parser.add_argument("--figure", choices=sorted(FIGURES), required=True)
    parser.add_argument(
        "--out", type=Path, default=Path("docs/images"), help="folder (default: docs/images)"
    )
    parser.add_argument(
        "--name", help="of the files, before -light.svg and -dark.svg (default: the figure's)"
    )
    args = parser.parse_args(argv)
    records = [read_record(path) for path in args.records]
    for theme in THEMES:
        path = args.out / f"{args.name or args.figure}-{theme}.svg"
        draw(FIGURES[args.figure](records), theme, path)
        print(path)
    return 0


def draw(panels: Sequence[Panel], theme: str, path: Path) -> None:
    """Draw one figure in one theme."""
    matplotlib = import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot = import_module("matplotlib.pyplot")
    ink, faint = THEMES[theme]["ink"], THEMES[theme]["faint"]
    style = {
        name: ink
        for name in (
            "text.color",
            "axes.labelcolor",
            "axes.edgecolor",
            "xtick.color",
            "ytick.color",
        )
    }
    # same bytes again
    fixed = {
        "svg.hashsalt": "quire",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context({**style, **fixed, "grid.color": faint}):
        size = (4.6 * len(panels), 3.6)
        figure, axes = pyplot.subplots(
            1, len(panels), figsize=size, squeeze=False, layout="constrained"
        )
        for axis, panel in zip(axes[0], panels, strict=True):
            panel(axis)
            axis.grid(visible=True, which="major", linewidth=0.5)
            axis.legend(frameon=False, fontsize=7)
        figure.savefig(path, transparent=True, metadata={"Date": None})
        pyplot.close(figure)


def batch_panels(records: Sequence[Record]) -> list[Panel]:
    """Return two a record: variants with 16-bit weights, and those with fewer bits, if there are
    both."""
    return [
        partial(draw_batch, record=record, names=names)
        for record in records
        for is_small in (False, True)
        if (
            names := [
                name
                for name in record["variants"]
                if (Variant.parse(name).bytes_per_weight < 2) == is_small
            ]
        )
    ]


def draw_batch(axis: Any, record: Record, names: Sequence[str]) -> None:
    """Throughput against batch size; the band is the range over the rounds."""
    for name in names:
        points = [
            (record["workloads"][workload]["num_sequences"], rows[name])
            for workload, rows in record["summary"].items()
            if workload.startswith("B") and name in rows
        ]
        points.sort(key=lambda each: each[0])
        sizes, colour = [size for size, _ in points], COLOURS[Variant.parse(name).engine]
        line = ":" if Variant.parse(name).bytes_per_weight < 1 else "-"
        axis.plot(
            sizes,
            [row["output_tokens_per_s"] for _, row in points],
            line,
            marker=".",
            color=colour,
            label=label_of(name),
        )
        lows, highs = ([row[key] for _, row in points] for key in ("lowest", "highest"))
        axis.fill_between(sizes, lows, highs, color=colour, alpha=0.15, linewidth=0)
    widths = (
        "8 and 4-bit weights" if Variant.parse(names[0]).bytes_per_weight < 2 else "16-bit weights"
    )
    title = f"{record['model']}, {widths}"
    axis.set(
        xscale="log", yscale="log", xlabel="requests at once", ylabel="output tokens/s", title=title
    )
    sizes = sorted(
        {
            counts["num_sequences"]
            for name, counts in record["workloads"].items()
            if name.startswith("B")
        }
    )
    axis.set_xticks(sizes, [str(size) for size in sizes])
    low, high = axis.get_ylim()
    ticks = [
        step * 10**power
        for power in range(6)
        for step in (1, 2, 5)
        if low <= step * 10**power <= high
    ]
    axis.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axis.minorticks_off()


def roofline_panels(records: Sequence[Record]) -> list[Panel]:
    """Return a panel for each record."""
    return [partial(draw_roofline, record=record) for record in records]


def draw_roofline(axis: Any, record: Record) -> None:
    """Operations per second against operations per byte of the ideal schedule,
    below the machine's roofs."""
    _draw_roofs(axis, best_peaks(record))
    spec = declare(record["config"])
    labelled: set[str] = set()
    for workload, rows in record["summary"].items():
        if workload not in MARKERS:
            continue
        requests = WORKLOADS[workload].requests(0, record["config"]["vocab_size"])[
            : record["first_requests"]
        ]
        for name, row in rows.items():
            variant = Variant.parse(name)
            steps = ideal_steps(spec, requests, variant.bytes_per_weight)
            flops = sum(step.linear_flops + step.attention_flops for step in steps)
            intensity = flops / sum(step.num_bytes for step in steps)
            filled = COLOURS[variant.engine] if variant.bytes_per_weight >= 2 else "none"
            axis.plot(
                intensity,
                flops / row["wall_s"] / 1e9,
                linestyle="none",
                markersize=5,
                marker=MARKERS[workload],
                markerfacecolor=filled,
                color=COLOURS[variant.engine],
                label=None if variant.engine in labelled else NAMES[variant.engine],
            )
            labelled.add(variant.engine)
    marks = ", ".join(
        f"{mark} {name}"
        for name, mark in (("W1", "●"), ("W2", "■"), ("W3", "▲"), ("W4", "◆"), ("W5", "✚"))
    )
    title = f"{record['model']}; filled: 16-bit weights, open: 8 and 4 bits"
    axis.set(
        xscale="log",
        yscale="log",
        xlabel=f"operations per byte   ({marks})",
        ylabel="GFLOP/s",
        title=title,
    )


def _draw_roofs(axis: Any, peaks: Peaks) -> None:
    """Draw what reading memory and computing allow."""
    ink = axis.xaxis.label.get_color()
    bandwidth = peaks.read_bytes_per_s
    for dtype, style in ((peaks.best_dtype, "-"), ("int8", ":")):
        roof = peaks.gemm_flops_per_s[dtype]
        knee = roof / bandwidth
        axis.plot(
            [0.5, knee, 3e4],
            [0.5 * bandwidth / 1e9, roof / 1e9, roof / 1e9],
            style,
            color=ink,
            linewidth=1,
        )
        axis.annotate(
            f"{dtype} {roof / 1e9:,.0f} GFLOP/s",
            (3e4, roof / 1e9),
            ha="right",
            va="bottom",
            fontsize=7,
        )
    text, corner = f"{bandwidth / 1e9:.0f} GB/s", (0.6, 0.6 * bandwidth / 1e9)
    axis.annotate(text, corner, xytext=(6, -3), textcoords="offset points", fontsize=7)


def label_of(variant: str) -> str:
    """Return engine and form as text."""
    parsed = Variant.parse(variant)
    way = " (paged)" if "way=paged" in parsed.extra else ""
    return f"{NAMES[parsed.engine]} {parsed.form}{way}"


FIGURES: dict[str, Callable[[Sequence[Record]], list[Panel]]] = {
    "batch": batch_panels,
    "roofline": roofline_panels,
}


if __name__ == "__main__":
    sys.exit(main())
