"""What a start takes: CPU seconds from nothing to four tokens of the shipped model, and modules.

    python tools/measure_start.py before=../before/.venv/bin/python after=.venv/bin/python

Each is an interpreter that has Quire installed; by default this one alone. They take turns, and
who begins changes with the round, so that a machine's moods meet all of them. CPU seconds are those
of the whole process, user and system; those of `import torch` alone are measured beside them, for
most of a start is that.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
from collections.abc import Sequence

START = """
import sys
import torch
from quire import LLM, SamplingParams
llm = LLM("quire-storyteller")
llm.generate("Once upon a time", SamplingParams(max_tokens=4), use_tqdm=False)
print(sum(name.partition(".")[0] == "quire" for name in sys.modules), len(sys.modules))
"""
TORCH = "import torch"


def cpu_seconds(python: str, code: str) -> tuple[float, str]:
    """Run code in a process of its own; return what that took, and what it said."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [python, "-P", "-c", code]  # the Quire that is installed, not the one of this folder
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, done.stdout.strip()


def main(argv: Sequence[str] | None = None) -> int:
    """Measure in turns, and print a line for each interpreter."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("pythons", nargs="*", metavar="NAME=PYTHON")
    parser.add_argument("--rounds", type=int, default=9, help="(default: 9)")
    args = parser.parse_args(argv)
    given = args.pythons or [f"this={sys.executable}"]
    pythons = {name: path for name, _, path in (each.partition("=") for each in given)}
    starts: dict[str, list[float]] = {name: [] for name in pythons}
    imports: dict[str, list[float]] = {name: [] for name in pythons}
    modules = {name: cpu_seconds(path, START)[1] for name, path in pythons.items()}  # and warm up
    for number in range(args.rounds):
        names = list(pythons)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            imports[name].append(cpu_seconds(pythons[name], TORCH)[0])
            starts[name].append(cpu_seconds(pythons[name], START)[0])
    print("                start CPU s   without torch's import   modules of Quire   all")
    for name, found in starts.items():
        start, torch = statistics.median(found), statistics.median(imports[name])
        quire, everything = modules[name].split()
        print(f"{name:<16}{start:11.3f}{start - torch:25.3f}{quire:>19}{everything:>6}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
