"""The README's plot: each peer's speed as a share of Quire's in the same run, as SVG that needs
nothing else.

Written by hand and not by matplotlib, so that it is small, and the same bytes with any version of
any library.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.result import WORKLOADS, Result, factor, pairs

THEMES = {
    "light": {"ink": "#24292f", "faint": "#d0d7de"},
    "dark": {"ink": "#e6edf3", "faint": "#3d444d"},
}
COLOURS = {"quire": "#e8590c", "vllm": "#4c8dff", "openvino": "#2da44e"}
MODEL, FORMAT = "Qwen3-0.6B", "bfloat16"
_PANELS = ("Emerald Rapids, 2 cores, AVX-512 only", "Emerald Rapids, 2 cores, AMX")
_LABEL_WIDTH, _PANEL_WIDTH, _BAR, _GROUP, _TOP = 132, 330, 9, 46, 62


def draw_peers(results: Sequence[Result], theme: str) -> str:
    """Return the plot in one theme: a panel a machine, a group of bars a workload."""
    workloads = sorted(
        {each.workload for each in results if each.workload.startswith("W") and each.record}
    )
    width = _LABEL_WIDTH + len(_PANELS) * _PANEL_WIDTH
    height = _TOP + _GROUP * len(workloads) + 26
    ink, faint = THEMES[theme]["ink"], THEMES[theme]["faint"]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="{ink}">',
        f"<title>Speed beside Quire's, {MODEL}'s configuration in {FORMAT}</title>",
        *_legend(ink),
    ]
    for number, machine in enumerate(_PANELS):
        left = _LABEL_WIDTH + number * _PANEL_WIDTH
        parts += _panel(
            [each for each in results if each.machine == machine], workloads, (left, height), faint
        )
    return "\n".join([*parts, *_workload_names(workloads), "</svg>"]) + "\n"


def _legend(ink: str) -> list[str]:
    parts, left = [], _LABEL_WIDTH
    for engine, text in (("quire", "Quire"), ("vllm", "vLLM"), ("openvino", "OpenVINO GenAI")):
        parts.append(f'<rect x="{left}" y="6" width="10" height="10" fill="{COLOURS[engine]}"/>')
        parts.append(f'<text x="{left + 15}" y="15">{text}</text>')
        left += 35 + 8 * len(text)
    parts.append(
        f'<text x="{left}" y="15" fill="{ink}" opacity="0.7">speed in the same run, Quire = '
        "100 %</text>"
    )
    return parts


def _workload_names(workloads: Sequence[str]) -> list[str]:
    return [
        (
            f'<text x="{_LABEL_WIDTH - 10}" y="{_TOP + _GROUP * row + 19}" '
            f'text-anchor="end">{WORKLOADS[name]}</text>'
        )
        for row, name in enumerate(workloads)
    ]


def _panel(
    results: Sequence[Result], workloads: Sequence[str], corner: tuple[int, int], faint: str
) -> list[str]:
    left, height = corner
    full = _PANEL_WIDTH - 90
    title = results[0].machine if results else ""
    parts = [f'<text x="{left}" y="44" font-weight="600">{title}</text>']
    for percent in (0, 50, 100):
        x = left + full * percent // 100
        parts.append(
            f'<line x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{height - 22}" stroke="{faint}"/>'
        )
        parts.append(
            f'<text x="{x}" y="{height - 6}" text-anchor="middle" font-size="10">{percent} %</text>'
        )
    by_workload: dict[str, dict[str, tuple[Result, Result]]] = {}
    for mine, theirs in pairs(results):
        if (mine.model, mine.format, theirs.format) == (MODEL, FORMAT, FORMAT):
            by_workload.setdefault(mine.workload, {})[theirs.engine] = mine, theirs
    for row, name in enumerate(workloads):
        found = by_workload.get(name, {})
        bars = [(COLOURS["quire"], 1.0, _number(next(iter(found.values()))[0]))] if found else []
        for engine in ("vllm", "openvino"):
            if engine in found:
                mine, theirs = found[engine]
                bars.append(
                    (
                        COLOURS[engine],
                        1 / factor(mine, theirs),
                        f"{100 / factor(mine, theirs):.0f} %",
                    )
                )
        for number, (colour, share, text) in enumerate(bars):
            y = _TOP + _GROUP * row + number * (_BAR + 3)
            parts.append(
                f'<rect x="{left}" y="{y}" width="{full * share:.1f}" height="{_BAR}" '
                f'fill="{colour}"/>'
            )
            parts.append(
                f'<text x="{left + full * share + 4:.1f}" y="{y + _BAR}" '
                f'font-size="10">{text}</text>'
            )
    return parts


def _number(result: Result) -> str:
    return f"{float(result.value):.3g} {result.unit}"
