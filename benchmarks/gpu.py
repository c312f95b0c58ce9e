"""Quire on one GPU beside what it is meant to reach there: `python -m benchmarks.gpu PART...`.

    python -m benchmarks.gpu kernels                          attention against copies and torch's
    best product python -m benchmarks.gpu steps --model llama-8b           decode steps against the
    bandwidth; what the host leaves idle python -m benchmarks.gpu start --model llama-8b
    from the start of a process to its first token python -m benchmarks.gpu peers --model llama-1b
    --trace sharegpt_8k_lengths.csv.gz     1,000 requests, and Transformers' python -m
    benchmarks.gpu kernels steps --json figures.jsonl                  a line a figure, the moment
    it is known

Weights are made up where they are needed; nothing is downloaded. A part that fails is reported, the
others go on. Exit code: 0 when every figure reaches its goal, 1 where one does not, 3 where a part
failed. Owns the sheet; what is measured, with its goals, is in `gpu_parts`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.gpu_parts import PARTS, Figure, Subject
from benchmarks.models import CONFIGS
from quire.bench.record import describe_versions, timestamp
from quire.engine.plan.gpu import inspect_gpu
from quire.errors import QuireError

_FAILED = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the requested parts."""
    args = parse(argv)
    try:
        sheet = Sheet(args.json, args.device)
    except QuireError as error:
        print(error, file=sys.stderr)
        return _FAILED
    config = (
        CONFIGS[args.model] if args.model in CONFIGS else json.loads(Path(args.model).read_text())
    )
    with tempfile.TemporaryDirectory(prefix="quire-gpu-") as folder:
        Path(folder, "config.json").write_text(json.dumps(config, indent=1))
        subject = Subject(
            Path(folder),
            Path(args.model).stem,
            args.device,
            args.trace,
            args.requests,
            args.peer_requests,
        )
        for part in args.parts:
            sheet.add(part, PARTS[part](subject))
    return _FAILED if sheet.has_failed else int(sheet.has_missed)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.gpu"
    )
    add = parser.add_argument
    add("parts", nargs="+", choices=tuple(PARTS), metavar="PART", help=", ".join(PARTS))
    add(
        "--model",
        default="llama-8b",
        help=f"a config.json, or one of {', '.join(CONFIGS)} (default: llama-8b)",
    )
    add(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="(default: cuda; cpu is for trying the tool)",
    )
    add(
        "--trace",
        type=Path,
        metavar="FILE",
        help="lengths of requests, for peers (default: random ones)",
    )
    add("--requests", type=int, default=1000, metavar="N", help="for peers (default: 1000)")
    add(
        "--peer-requests",
        type=int,
        metavar="N",
        help="the peers take only so many of them: rates are compared",
    )
    add("--json", type=Path, metavar="FILE", help="append each figure to FILE, a line each")
    args = parser.parse_args(argv)
    if args.requests < 1 or (args.peer_requests is not None and args.peer_requests < 1):
        parser.error("--requests and --peer-requests must be at least 1")
    if args.model not in CONFIGS and not Path(args.model).is_file():
        parser.error(f"--model: there is no file {args.model}")
    return args


class Sheet:
    """Figures as they come: a table on the standard output, and lines of JSON in a file."""

    def __init__(self, file: Path | None, device: str) -> None:
        self.has_missed = self.has_failed = False
        self._file = file
        gpu = inspect_gpu() if device == "cuda" else None
        versions = describe_versions()
        self._circumstances = {
            "device": "cpu" if gpu is None else f"{gpu.name}, driver for CUDA {gpu.driver}",
            "torch": versions["torch"],
            "commit": versions["commit"],
        }
        print(", ".join(f"{name} {value}" for name, value in self._circumstances.items()))
        print("\n| figure | measured | goal | |\n|---|---:|---:|---|", flush=True)

    def add(self, part: str, figures: Iterator[Figure]) -> None:
        """Record all of a part's figures, each before the next is measured."""
        try:
            for figure in figures:
                self._note(figure)
        except (
            Exception
        ) as error:  # a compiler's, a driver's or another engine's: the other parts go on
            self.has_failed = True
            print(f"{part} failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    def _note(self, figure: Figure) -> None:
        self.has_missed |= figure.is_reached is False
        verdict = {True: "reached", False: "missed", None: ""}[figure.is_reached]
        goal = (
            ""
            if figure.goal is None
            else f"{'at least' if figure.is_more_better else 'at most'} {figure.goal:g}"
        )
        print(
            f"| {figure.name} | {figure.value:.3g} {figure.unit} | {goal} | {verdict} |", flush=True
        )
        if self._file is not None:
            with self._file.open("a") as lines:
                found = {
                    **figure._asdict(),
                    "is_reached": figure.is_reached,
                    "at": timestamp(),
                    **self._circumstances,
                }
                lines.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    sys.exit(main())
