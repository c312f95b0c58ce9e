"""Quire beside its peers on the same work: `python -m benchmarks.compare`.

Each engine has a process of its own, which loads the model, warms up and then waits; the engines take turns, workload by
workload, for several rounds, so that a disturbance of the machine meets all of them, and medians are compared. The limits
of the machine are measured in every round. Writes the record (docs/benchmarks/README.md) as it grows; prints tables.

    python -m benchmarks.compare                                     SmolLM2-135M's configuration, random weights, workload W1
    python -m benchmarks.compare --model ./folder --workloads W1,W3 --variants quire:bfloat16,transformers:float32:batch=32
    python -m benchmarks.compare --peer vllm=/venvs/vllm/bin/python --variants quire:bfloat16,vllm:bfloat16 --json result.json

Peers are installed as benchmarks/README.md says.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.models import CONFIGS, write_random_model
from benchmarks.tables import render, summarize
from benchmarks.variants import ENGINES, PeerProcess, Seat, Variant
from quire.bench.record import describe_machine, describe_versions, timestamp
from quire.bench.workload import WORKLOADS, BenchRequest, totals
from quire.engine.machine import Machine

VARIANTS = ("quire:bfloat16", "transformers:float32:batch=32", "transformers:float32:way=paged")
SCHEMA = "quire-compare/2"
_PEAKS = "import json, sys, torch; from quire.bench.roofline import measure_peaks as m; torch.set_num_threads(int(sys.argv[1]))"
_PEAKS += "; print(json.dumps(m()._asdict()))"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="quire-compare-") as scratch:
        record = compare(args, model_folder(args.model, Path(scratch)))
    print(render(record))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.compare")
    parser.add_argument("--model", default="smollm2-135m", help=f"folder, config.json, or one of {', '.join(CONFIGS)}")
    parser.add_argument("--workloads", default="W1", help=f"comma-separated, of {', '.join(WORKLOADS)} (default: W1)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"comma-separated (default: {','.join(VARIANTS)})")
    parser.add_argument("--peer", action="append", default=[], metavar="ENGINE=PROGRAM", help="its Python; llama.cpp's server")
    parser.add_argument("--preload", action="append", default=[], metavar="ENGINE=LIBRARIES", help="LD_PRELOAD of an engine")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each variant (default: 3)")
    parser.add_argument("--first-requests", type=int, help="take only so many of a workload's requests")
    parser.add_argument("--threads", type=int, default=Machine.inspect().num_cores, help="(default: physical cores)")
    parser.add_argument("--hold", metavar="COMMAND", help="prefix of a command that runs while engines are timed (a lock)")
    parser.add_argument("--json", type=Path, help="write the record to a file")
    args = parser.parse_args(argv)
    try:
        args.variants = [Variant.parse(text) for text in args.variants.split(",")]
        args.peer, args.preload = (dict(each.split("=", 1) for each in given) for given in (args.peer, args.preload))
    except ValueError as error:
        parser.error(str(error))
    for name in (*args.peer, *args.preload):
        if name not in ENGINES:
            parser.error(f"there is no engine {name!r}; choose from {', '.join(ENGINES)}")
    args.workloads = args.workloads.split(",")
    for name in args.workloads:
        if name not in WORKLOADS:
            parser.error(f"there is no workload {name!r}; choose from {', '.join(WORKLOADS)}")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    return args


def model_folder(model: str, scratch: Path) -> Path:
    """The model's folder; for a configuration alone, one with random weights is written to `scratch`."""
    if Path(model).is_dir():
        return Path(model)
    config = CONFIGS[model] if model in CONFIGS else json.loads(Path(model).read_text())
    write_random_model(config, scratch / "model")
    return scratch / "model"


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All variants in turns, for all rounds."""
    config = json.loads((folder / "config.json").read_text())
    seat = Seat(folder, config["vocab_size"], args.threads, args.peer, args.preload)
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "started_at": timestamp(),
        "model": Path(args.model).name,
        "config": config,
        "num_threads": args.threads,
        "first_requests": args.first_requests,
        "machine": describe_machine(Machine.inspect()),
        "versions": describe_versions(),
        "workloads": {name: totals(_requests(args, name, 0, config["vocab_size"])) for name in args.workloads},
        "variants": {},
        "peaks": [],
        "measurements": [],
    }
    processes: list[PeerProcess] = []
    try:
        for variant in args.variants:
            processes.append(PeerProcess(variant, seat))
            record["variants"][variant.name] = processes[-1].description
            print(f"{variant.name}: ready", file=sys.stderr, flush=True)
        for number in range(args.rounds):
            for name in args.workloads:
                _round(args, record, processes, (name, number))
                record["summary"] = summarize(record)
                if args.json is not None:
                    args.json.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        for process in processes:
            process.close()
    return record


def _round(args: argparse.Namespace, record: dict[str, Any], processes: list[PeerProcess], which: tuple[str, int]) -> None:
    """One workload once through all engines, and the machine's limits."""
    name, number = which
    requests = _requests(args, name, number, record["config"]["vocab_size"])
    turn = number % len(processes)  # nobody always comes first
    with _Hold(args.hold) as hold:
        record["peaks"].append(_peaks(args.threads))
        for process in processes[turn:] + processes[:turn]:
            hold.renew()
            result = process.run(requests)
            result |= {"load_1min": os.getloadavg()[0], "was_held": hold.is_held}
            record["measurements"].append({"variant": process.variant.name, "workload": name, "round": number, **result})
            text = f"round {number + 1}/{args.rounds} {name} {process.variant.name}: {result['wall_s']:.2f} s"
            print(text, file=sys.stderr, flush=True)


def _requests(args: argparse.Namespace, name: str, number: int, vocab_size: int) -> list[BenchRequest]:
    return WORKLOADS[name].requests(number, vocab_size)[: args.first_requests]


def _peaks(num_threads: int) -> dict[str, Any]:
    """The machine's limits, measured in a process of its own, so that this one stays small and quiet."""
    env = dict(os.environ, OMP_NUM_THREADS=str(num_threads))
    command = [sys.executable, "-c", _PEAKS, str(num_threads)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, timeout=600)
    peaks: dict[str, Any] = json.loads(done.stdout)
    return peaks


_HOLD_S = 120.0
"""After so long, a lock is given to others before the next run."""


class _Hold:
    """Keeps a command running, as long as it lasts: one that takes a lock, say, before it runs what its arguments name."""

    def __init__(self, prefix: str | None) -> None:
        self._prefix = shlex.split(prefix) if prefix else None
        self._process: subprocess.Popen[str] | None = None
        self._since = 0.0

    @property
    def is_held(self) -> bool | None:
        """Whether it still runs; None if there is no command."""
        return None if self._process is None else self._process.poll() is None

    def __enter__(self) -> _Hold:
        if self._prefix is not None:
            command = [*self._prefix, "sh", "-c", "echo held; read line"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._process.stdout is not None
            if self._process.stdout.readline() != "held\n":
                self._process.communicate()
                raise RuntimeError(f"--hold {shlex.join(self._prefix)} ended with exit code {self._process.returncode}")
            self._since = time.monotonic()
        return self

    def renew(self) -> None:
        """Let go and take hold again, if it has been a while or the command has ended: others want a lock, too."""
        if self._process is not None and (not self.is_held or time.monotonic() - self._since > _HOLD_S):
            self.__exit__(None, None, None)
            self.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._process is not None:
            self._process.communicate("\n")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the engines are ended, too
    sys.exit(main())
