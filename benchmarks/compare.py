"""Quire beside its peers on the same work: `python -m benchmarks.compare`.

Each engine has a process of its own, which loads the model, warms up and then waits for work. In
every round the engines come one after another, each with all workloads (with `--resident` all stay
loaded and take turns workload by workload, so that a disturbance of the machine meets all of them
alike); medians over the rounds are compared. The machine's limits are sampled around and during
every run, while its engine stands still (benchmarks/referee.py). Every run is written down at once:
a comparison that is ended, by its budget or otherwise, goes on where it was when the same command
is given again. Writes the record (docs/benchmarks/records.md); prints tables.

    python -m benchmarks.compare                             SmolLM2-135M's configuration, random
    weights, all that is installed python -m benchmarks.compare --model models/M1,models/M2 --json
    "cpu-{model}.json" --budget 300 python -m benchmarks.compare --model ./folder --workloads W1,W3
    --variants quire:bfloat16,transformers:float32:batch=32 python -m benchmarks.compare --peer
    vllm=/venvs/vllm/bin/python --variants quire:bfloat16,vllm:bfloat16 --json result.json

Exit code: 0 when all is measured, 1 if an engine failed, 3 if the budget ended before. Peers are
installed as benchmarks/README.md says.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.journal import SCHEMA, Cell, Journal, record_of
from benchmarks.models import CONFIGS, write_random_model
from benchmarks.referee import Referee, watched_run
from benchmarks.tables import render, summarize
from benchmarks.variants import ENGINES, Engines, PeerProcess, Seat, Variant, installed
from quire.bench.record import describe_machine, describe_versions, timestamp
from quire.bench.workload import WORKLOADS, BenchRequest, totals
from quire.engine.plan.machine import Machine
from quire.errors import QuireError
from quire.kernels import cpu

_UNFINISHED = 3


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison, model by model."""
    args = parse(argv)
    statuses = []
    for model in args.model:
        with tempfile.TemporaryDirectory(prefix="quire-compare-") as scratch:
            try:
                statuses.append(_compare(args, model, Path(scratch)))
            except QuireError as error:
                _say(str(error))
                return 1
    return 1 if 1 in statuses else max(statuses)


def _compare(args: argparse.Namespace, model: str, scratch: Path) -> int:
    comparison = Comparison(args, model, scratch)
    try:
        return comparison.run()
    finally:  # what there is is worth showing, however it ended
        comparison.close()
        print(render(comparison.record()), end="\n\n", flush=True)


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.compare"
    )
    add = parser.add_argument
    add(
        "--model",
        default="smollm2-135m",
        help=f"comma-separated: folder, config.json, or one of {', '.join(CONFIGS)}",
    )
    add(
        "--workloads",
        default="W1,W2,W3,W4,W5",
        help=f"of {', '.join(WORKLOADS)} (default: W1,W2,W3,W4,W5)",
    )
    add(
        "--variants",
        help="comma-separated ENGINE:FORM[:KEY=VALUE...] (default: the usual ones of all that is "
        "installed)",
    )
    add(
        "--peer",
        action="append",
        default=[],
        metavar="ENGINE=PROGRAM",
        help="its Python; llama.cpp's server",
    )
    add(
        "--preload",
        action="append",
        default=[],
        metavar="ENGINE=LIBRARIES",
        help="LD_PRELOAD of an engine",
    )
    _add_measuring(parser)
    return parser


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    """Add how the engines are measured, and where to."""
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="measurements of each variant (default: 3)")
    add(
        "--budget",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="begin nothing that would end after so long",
    )
    add(
        "--resident",
        action="store_true",
        help="keep all engines loaded and take turns within a workload; needs the memory",
    )
    add("--first-requests", type=int, help="take only so many of a workload's requests")
    add(
        "--threads", type=int, default=Machine.inspect().num_cores, help="(default: physical cores)"
    )
    add(
        "--hold",
        metavar="COMMAND",
        help="prefix of a command that runs while engines are timed (a lock)",
    )
    add(
        "--json",
        metavar="FILE",
        help="write the record; {model} stands for the model's name. FILE.jsonl has each run at "
        "once",
    )


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options, checked."""
    parser = _options()
    args = parser.parse_args(argv)
    args.model, args.workloads = args.model.split(","), args.workloads.split(",")
    try:
        args.variants = (
            [Variant.parse(text) for text in args.variants.split(",")] if args.variants else None
        )
        args.peer, args.preload = (
            dict(each.split("=", 1) for each in given) for given in (args.peer, args.preload)
        )
    except ValueError as error:
        parser.error(str(error))
    for names, known, kind in (
        ((*args.peer, *args.preload), ENGINES, "engine"),
        (args.workloads, WORKLOADS, "workload"),
    ):
        for name in names:
            if name not in known:
                parser.error(f"there is no {kind} {name!r}; choose from {', '.join(known)}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    if len(args.model) > 1 and args.json is not None and "{model}" not in args.json:
        parser.error('--json must have "{model}" in its name, as there are several models')
    if "llamacpp" not in args.peer and (server := shutil.which("llama-server")):
        args.peer["llamacpp"] = server
    args.ends_at = time.monotonic() + args.budget
    return args


def model_folder(model: str, scratch: Path) -> Path:
    """Return the model's folder; for a configuration alone,
    one with random weights is written to `scratch`."""
    if Path(model).is_dir():
        return Path(model)
    config = CONFIGS[model] if model in CONFIGS else json.loads(Path(model).read_text())
    write_random_model(config, scratch / "model")
    return scratch / "model"


class Comparison:
    """All variants on one model, as far as the budget goes."""

    def __init__(self, args: argparse.Namespace, model: str, scratch: Path) -> None:
        """Raises JournalError where --json names the file of another comparison."""
        self._args = args
        self._commit = describe_versions()["commit"]
        folder = model_folder(model, scratch)
        config = json.loads((folder / "config.json").read_text())
        self._vocab_size: int = config["vocab_size"]
        name = Path(model).name
        self._json = None if args.json is None else Path(args.json.replace("{model}", name))
        header = {
            "schema": SCHEMA,
            "started_at": timestamp(),
            "model": name,
            "config": config,
            "num_threads": args.threads,
            "first_requests": args.first_requests,
            "is_resident": args.resident,
            "instruction_set": cpu.isa() if cpu.IMPORT_ERROR is None else "reference",
            "machine": describe_machine(Machine.inspect()),
            "versions": describe_versions(),
            "workloads": {each: totals(self._requests(each, 0)) for each in WORKLOADS},
        }
        self.journal = Journal((self._json or scratch / "comparison").with_suffix(".jsonl"), header)
        seat = Seat(folder, self._vocab_size, args.threads, args.peer, args.preload)
        found, missing = (args.variants, []) if args.variants else installed(seat)
        for each in missing:
            _say(f"left out: {each}")
        self._variants: list[str] = [variant.name for variant in found]
        self._engines = Engines(seat, is_resident=args.resident)
        self._referee: Referee | None = None
        self._failed: set[str] = set()

    def run(self) -> int:
        """Measure what is missing; the exit code."""
        cells, left_s, num_done = list(self.pending()), [], 0
        with _Hold(self._args.hold) as hold:
            # all before the first is timed, so that a hold is not let go for one of them
            if self._args.resident:
                for variant in dict.fromkeys(cell.variant for cell in cells):
                    self._attempt(variant, partial(self._open, variant, hold))
            for cell in cells:
                if cell.variant in self._failed:
                    continue
                if (needed_s := self._needed_s(cell)) >= self._args.ends_at - time.monotonic():
                    left_s.append(needed_s)
                    continue
                num_done += self._attempt(cell.variant, partial(self._measure, cell, hold))
        if left_s:
            _say(f"the budget is spent; {len(left_s)} runs are left: give the same command again")
        if left_s and not num_done and min(left_s) >= self._args.budget:
            _say(
                f"no run that is left fits the budget: the shortest takes about {min(left_s):.0f} s"
            )
            return 1
        return 1 if self._failed else _UNFINISHED if left_s else 0

    def pending(self) -> Iterator[Cell]:
        """Yield what is not measured yet: round by round; another variant begins each time,
        so that no variant always does."""
        done = self.journal.done()
        for number in range(self._args.rounds):
            turn = number % len(self._variants)
            variants = self._variants[turn:] + self._variants[:turn]
            if self._args.resident:
                cells = [
                    Cell(number, name, variant)
                    for name in self._args.workloads
                    for variant in variants
                ]
            else:
                cells = [
                    Cell(number, name, variant)
                    for variant in variants
                    for name in self._args.workloads
                ]
            yield from (cell for cell in cells if cell not in done)

    def record(self) -> dict[str, Any]:
        """Return all that was measured so far."""
        record = record_of(self.journal.lines)
        return {**record, "summary": summarize(record)}

    def close(self) -> None:
        """End the engines and the referee; write the record."""
        self._engines.close()
        if self._referee is not None:
            self._referee.close()
        if self._json is not None:
            self._json.write_text(json.dumps(self.record(), indent=1) + "\n")

    def _needed_s(self, cell: Cell) -> float:
        """Return how long a run will take, with its engine's start, as far as that is known."""
        is_open = self._engines.find(cell.variant) is not None
        return self.journal.expected_s(cell) + (
            0.0 if is_open else self.journal.expected_ready_s(cell.variant)
        )

    def _attempt(self, variant: str, work: Callable[[], object]) -> bool:
        """Do something with an engine; whether it went well.
        One that fails is not used again in this call."""
        try:
            work()
        except RuntimeError as error:
            self._engines.drop(variant)
            self.journal.add("failed", variant=variant, error=str(error))
            self._failed.add(variant)
            _say(str(error))
        return variant not in self._failed

    def _measure(self, cell: Cell, hold: _Hold) -> None:
        process = self._engines.find(cell.variant) or self._open(cell.variant, hold)
        hold.renew()
        self._referee = self._referee or Referee(self._args.threads)
        result = watched_run(process, self._requests(cell.workload, cell.round), self._referee)
        result |= {
            "load_1min": os.getloadavg()[0],
            "was_held": hold.is_held,
            "at": timestamp(),
            "commit": self._commit,
        }
        self.journal.add("run", **cell._asdict(), **result)
        _say(
            f"round {cell.round + 1}/{self._args.rounds} {cell.workload} {cell.variant}: "
            f"{result['wall_s']:.2f} s"
        )

    def _open(self, variant: str, hold: _Hold) -> PeerProcess:
        hold.release()  # loading is not timed: other users of the machine may have it
        started = time.monotonic()
        process = self._engines.open(variant)
        self.journal.add(
            "ready", variant=variant, opening_s=time.monotonic() - started, **process.description
        )
        _say(f"{variant}: ready")
        return process

    def _requests(self, name: str, number: int) -> list[BenchRequest]:
        return WORKLOADS[name].requests(number, self._vocab_size)[: self._args.first_requests]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_HOLD_S = 60.0
"""After so long, a lock is given to others before the next run."""


class HoldError(QuireError):
    """The command of --hold did not start."""


class _Hold:
    """Keeps a command running, as long as it lasts: one that takes a lock, say,
    before it runs what its arguments name."""

    def __init__(self, prefix: str | None) -> None:
        self._prefix = shlex.split(prefix) if prefix else None
        self._process: subprocess.Popen[str] | None = None
        self._since = 0.0

    @property
    def is_held(self) -> bool | None:
        """Whether it still runs; None if there is no command."""
        return None if self._process is None else self._process.poll() is None

    def __enter__(self) -> _Hold:
        return self

    def renew(self) -> None:
        """Take hold; let go first if it has been a while or the command has ended:
        others want a lock, too."""
        if self._prefix is None or (self.is_held and time.monotonic() - self._since < _HOLD_S):
            return
        self.release()
        command = [*self._prefix, "sh", "-c", "echo held; read line"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        try:
            answer = process.stdout.readline()
        except (
            BaseException
        ):  # told to end while it waits for the lock: nothing else would end the command
            process.terminate()
            raise
        if answer != "held\n":
            process.communicate()
            raise HoldError(
                f"--hold {shlex.join(self._prefix)} ended with exit code {process.returncode}"
            )
        self._process, self._since = process, time.monotonic()

    def release(self) -> None:
        """Let go."""
        if self._process is not None:
            self._process.communicate("\n")
            self._process = None

    def __exit__(self, *_: object) -> None:
        self.release()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines are ended, too
    sys.exit(main())
