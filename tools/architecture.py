"""Draws docs/images/architecture-{light,dark}.svg: `python tools/architecture.py`; `--check`
compares the line counts alone.

Boxes are the packages of quire/ and csrc/, from programs at the top to leaves at the bottom;
imports only point down. The line counts in the picture are checked by a test with a tolerance, so
that ordinary changes do not need a new picture.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
IMAGES = ROOT / "docs" / "images"
TOLERANCE = 0.1
"""How far a count in the picture may be from the truth, as a share (or 100 lines,
for small packages)."""
THEMES = {
    "light": {
        "ink": "#24292f",
        "box": "#ffffff",
        "line": "#8c959f",
        "control": "#ddf4ff",
        "data": "#fff1e5",
        "area": "#f6f8fa",
    },
    "dark": {
        "ink": "#e6edf3",
        "box": "#161b22",
        "line": "#6e7681",
        "control": "#0c2d4a",
        "data": "#3d2008",
        "area": "#0d1117",
    },
}


class Box(NamedTuple):
    """A package: where it stands, and what a reader finds in it."""

    name: str
    text: str
    x: int
    y: int
    width: int
    kind: str = "box"


HEIGHT = 44
BOXES = (
    Box("server", "HTTP APIs, the page", 20, 34, 130),
    Box("router", "many servers", 158, 34, 130),
    Box("ray", "Ray Serve", 296, 34, 130),
    Box("cli", "commands", 434, 34, 130),
    Box("bench", "measuring", 572, 34, 130),
    Box("sim", "without a model", 710, 34, 130),
    Box("engine", "LLM, AsyncLLM; both planes meet here", 20, 112, 612),
    Box("text", "templates", 644, 112, 94),
    Box("media", "images", 746, 112, 94),
    Box("core", "requests, scheduler, KV blocks, StepPlan", 32, 216, 270, "control"),
    Box("executor", "runs plans", 422, 216, 98, "data"),
    Box("worker", "rows, batches", 526, 216, 98, "data"),
    Box("spec", "draft models", 630, 216, 98, "data"),
    Box("sampling", "to tokens", 734, 216, 94, "data"),
    Box("nn", "modules", 422, 272, 61, "data"),
    Box("parallel", "ranks", 491, 272, 61, "data"),
    Box("transfer", "KV moved", 560, 272, 61, "data"),
    Box("models", "declared", 629, 272, 61, "data"),
    Box("quant", "formats", 698, 272, 61, "data"),
    Box("weights", "checkpoints", 767, 272, 61, "data"),
    Box("grammar", "masks", 422, 328, 61, "data"),
    Box("lora", "adapters", 491, 328, 61, "data"),
    Box("tiers", "stored KV", 560, 328, 61, "data"),
    Box("program", "operations", 629, 328, 61, "data"),
    Box("kernels", "CPU, Triton", 698, 328, 61, "data"),
    Box("csrc", "C++", 767, 328, 61, "data"),
    Box("config", "options", 32, 328, 84),
    Box("routing", "to replicas", 124, 328, 84),
    Box("common", "helpers", 216, 328, 86),
)
_AREAS = (
    (20, 190, 294, 84, "control plane: no torch, no clock"),
    (410, 190, 430, 194, "data plane: no requests"),
)


def count_lines() -> dict[str, int]:
    """Return the lines of each package, blank ones and comments included."""
    counts = {box.name: 0 for box in BOXES}
    for path in sorted((ROOT / "quire").rglob("*.py")) + sorted((ROOT / "csrc").rglob("*.[ch]pp")):
        parts = path.relative_to(ROOT).parts
        name = parts[0] if parts[0] == "csrc" else {"llm.py": "engine"}.get(parts[1], parts[1])
        if name in counts:
            counts[name] += len(path.read_text(encoding="utf-8").splitlines())
    return counts


def stale_counts() -> list[str]:
    """Say which counts in the picture are too far from the truth."""
    picture = (IMAGES / "architecture-light.svg").read_text(encoding="utf-8")
    said = {
        name: float(number) * 1000
        for name, number in re.findall(r'data-name="(\w+)"[^>]*>([\d.]+)k<', picture)
    }
    return [
        f"{name}: the picture says {said.get(name, 0):.0f} lines, there are {count}"
        for name, count in count_lines().items()
        if abs(said.get(name, 0.0) - count) > max(100, TOLERANCE * count)
    ]


def draw(theme: str) -> str:
    """Return the picture in one theme."""
    colours, counts = THEMES[theme], count_lines()
    ink, line = colours["ink"], colours["line"]
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 400" width="860" height="400" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{ink}">',
        "<title>The packages of Quire and their lines of code: imports point down</title>",
        (
            '<text x="20" y="24" font-weight="600">programs</text><text x="20" y="102" '
            'font-weight="600">assembly</text>'
        ),
    ]
    for x, y, width, height, title in _AREAS:
        parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" '
            f'fill="{colours["area"]}" stroke="{line}"/>'
        )
        parts.append(f'<text x="{x + 12}" y="{y + 17}" font-weight="600">{title}</text>')
    for box in BOXES:
        fill, size = colours[box.kind], 13 if box.width > 110 else 12
        parts.append(
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{HEIGHT}" rx="6" '
            f'fill="{fill}" stroke="{line}"/>'
            f'<text x="{box.x + 8}" y="{box.y + 18}" font-size="{size}" '
            f'font-weight="600">{box.name}</text>'
            f'<text data-name="{box.name}" x="{box.x + box.width - 8}" y="{box.y + 18}" '
            'text-anchor="end" '
            f'font-size="{size - 2}">{counts[box.name] / 1000:.1f}k</text>'
            f'<text x="{box.x + 8}" y="{box.y + 35}" opacity="0.8">{box.text}</text>'
        )
    parts += [*_seam(line), "</svg>"]
    return "\n".join(parts) + "\n"


def _seam(line: str) -> list[str]:
    """Return the one seam between the planes."""
    arrows = []
    for y, tip, text in ((230, 404, "StepPlan"), (256, 320, "StepResult")):
        start, step = (320, -6) if tip > 320 else (404, 6)
        arrows.append(
            f'<path d="M{start} {y}H{tip}m{step} -4l{-step} 4l{step} 4" fill="none" '
            f'stroke="{line}" stroke-width="1.5"/>'
        )
        arrows.append(f'<text x="362" y="{y - 5}" text-anchor="middle">{text}</text>')
    return arrows


def main() -> int:
    """Draw, or check."""
    if "--check" in sys.argv[1:]:
        stale = stale_counts()
        print("\n".join(stale) or "the line counts are true")
        return 1 if stale else 0
    for theme in THEMES:
        path = IMAGES / f"architecture-{theme}.svg"
        path.write_text(draw(theme), encoding="utf-8")
        print(path.relative_to(ROOT))
    return 0


if __name__ == "__main__":
    sys.exit(main())
