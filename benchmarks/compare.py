"""Quire beside Transformers on the same work: `python -m benchmarks.compare`.

Each measurement is a process of its own, which loads the model, warms up and runs the workload once; engines take turns for
several rounds, so that a disturbance of the machine meets all of them, and medians are compared. Prints a table, writes JSON.

    python -m benchmarks.compare                                     SmolLM2-135M's configuration, random weights, workload W1
    python -m benchmarks.compare --model ./folder --workloads W1,W2
    python -m benchmarks.compare --variants quire:bfloat16,generate:float32:16 --rounds 5 --json result.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.models import CONFIGS, write_random_model
from benchmarks.peers import Peer, Variant, open_peer
from quire.bench.record import describe_machine, describe_versions, timestamp
from quire.bench.workload import BenchRequest, Workload, parallel_workload, prefix_workload, random_workload, totals
from quire.engine.machine import Machine

WORKLOADS: dict[str, Workload] = {
    "W1": random_workload(64, (16, 256), (16, 128), seed=0, name="W1"),
    "W2": prefix_workload(64, 512, 32, 32, name="W2"),
    "W3": random_workload(1, (128, 128), (128, 128), name="W3"),
    "W4": parallel_workload(8, 256, 8, 64, name="W4"),
    "W5": random_workload(1, (4096, 4096), (1, 1), name="W5"),
}
"""W1: many requests of mixed lengths. W2: a shared prefix. W3: one request. W4: parallel sampling. W5: one long prompt."""

VARIANTS = ("quire:bfloat16", "quire:float32", "generate:float32:16", "generate:float32:32", "paged:float32")
SCHEMA = "quire-compare/1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the comparison, or one measurement of it (`--worker`)."""
    args = parse(argv)
    if args.worker:
        print(json.dumps(measure_here(args)))
        return 0
    with tempfile.TemporaryDirectory(prefix="quire-compare-") as scratch:
        folder = model_folder(args.model, Path(scratch))
        record = compare(args, folder)
    if args.json is not None:
        args.json.write_text(json.dumps(record, indent=1) + "\n")
    print(render(record))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.compare")
    parser.add_argument("--model", default="smollm2-135m", help=f"folder, config.json, or one of {', '.join(CONFIGS)}")
    parser.add_argument("--workloads", default="W1", help="comma-separated, W1 to W5 (default: W1)")
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"comma-separated (default: {','.join(VARIANTS)})")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each variant (default: 3)")
    parser.add_argument("--first-requests", type=int, help="take only so many of a workload's requests")
    parser.add_argument("--threads", type=int, default=Machine.inspect().num_cores, help="(default: physical cores)")
    parser.add_argument("--json", type=Path, help="write the record to a file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--round", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        args.variants = [Variant.parse(text) for text in args.variants.split(",")]
    except ValueError as error:
        parser.error(str(error))
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


# -- one measurement, in its own process ---------------------------------------------------------------------------------


def measure_here(args: argparse.Namespace) -> dict[str, Any]:
    """Load, warm up, run each workload once."""
    started = time.perf_counter()
    folder, (variant,) = Path(args.model), args.variants
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    peer = open_peer(folder, variant, args.threads)
    try:
        warm_up = random_workload(8, (24, 48), (8, 8), name="warm-up").requests(args.round, vocab_size)
        peer.run(warm_up[:1])
        ready_s = time.perf_counter() - started
        peer.run(warm_up)
        runs = {name: _run_once(peer, _requests(args, name, vocab_size)) for name in args.workloads}
    finally:
        peer.close()
    peak_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"variant": variant.name, "ready_s": ready_s, "peak_rss_bytes": peak_rss, "runs": runs}


def _run_once(peer: Peer, requests: Sequence[BenchRequest]) -> dict[str, float]:
    """Wall time, and the CPU time of all threads."""
    started, cpu_started = time.perf_counter(), time.process_time()
    counts = peer.run(requests)
    wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu_started
    wanted = sorted(each.num_output for each in requests for _ in range(each.num_sequences))
    if sorted(counts) != wanted:
        raise RuntimeError(f"{sum(counts)} tokens in {len(counts)} sequences came, not {sum(wanted)} in {len(wanted)}")
    return {"wall_s": wall_s, "cpu_s": cpu_s}


def _requests(args: argparse.Namespace, name: str, vocab_size: int) -> list[BenchRequest]:
    return WORKLOADS[name].requests(args.round, vocab_size)[: args.first_requests]


# -- all of them ---------------------------------------------------------------------------------------------------------


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All variants in turns, for all rounds."""
    config = json.loads((folder / "config.json").read_text())
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "started_at": timestamp(),
        "model": args.model,
        "config": config,
        "num_threads": args.threads,
        "first_requests": args.first_requests,
        "machine": describe_machine(Machine.inspect()),
        "versions": {**describe_versions(), "transformers": metadata.version("transformers")},
        "workloads": {name: totals(_requests(args, name, config["vocab_size"])) for name in args.workloads},
        "measurements": [],
    }
    for number in range(args.rounds):
        turn = number % len(args.variants)  # nobody always comes first
        for variant in args.variants[turn:] + args.variants[:turn]:
            measurement = {**_measure_apart(args, folder, (variant, number)), "round": number, "load_1min": os.getloadavg()[0]}
            record["measurements"].append(measurement)
            walls = ", ".join(f"{name} {run['wall_s']:.1f} s" for name, run in measurement["runs"].items())
            print(f"round {number + 1}/{args.rounds} {variant.name}: {walls}", file=sys.stderr, flush=True)
    record["summary"] = summarize(record)
    return record


def _measure_apart(args: argparse.Namespace, folder: Path, which: tuple[Variant, int]) -> dict[str, Any]:
    variant, number = which
    command = [sys.executable, "-m", "benchmarks.compare", "--worker", "--model", str(folder), "--round", str(number)]
    command += ["--variants", variant.name, "--workloads", ",".join(args.workloads), "--threads", str(args.threads)]
    if args.first_requests is not None:
        command += ["--first-requests", str(args.first_requests)]
    env = dict(os.environ, OMP_NUM_THREADS=str(args.threads), HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{variant.name} failed with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def summarize(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Medians per variant: output tokens per second on each workload, their range over the rounds, start-up and memory."""
    rows = []
    for name in dict.fromkeys(each["variant"] for each in record["measurements"]):
        mine = [each for each in record["measurements"] if each["variant"] == name]
        row = {
            "variant": name,
            "num_rounds": len(mine),
            "ready_s": median(each["ready_s"] for each in mine),
            "peak_rss_bytes": max(each["peak_rss_bytes"] for each in mine),
            "workloads": {},
        }
        for workload, counts in record["workloads"].items():
            num_output, runs = counts["num_output_tokens"], [each["runs"][workload] for each in mine]
            rates = [num_output / run["wall_s"] for run in runs]
            row["workloads"][workload] = {
                "output_tokens_per_s": median(rates),
                "lowest": min(rates),
                "highest": max(rates),
                "output_tokens_per_cpu_s": median(num_output / run["cpu_s"] for run in runs),
            }
        rows.append(row)
    return rows


def render(record: dict[str, Any]) -> str:
    """The summary as tables in Markdown. Factors are to the best Transformers variant by the same measure.

    Per second of CPU time is what is left of a comparison on a machine that others use; with one thread it is what a quiet
    machine would show (threads that wait for each other burn CPU time).
    """
    machine, versions = record["machine"], record["versions"]
    lines = [
        f"{record['model']} on {machine['cpu']}, threads: {record['num_threads']}; quire {versions['quire']} "
        f"({versions['commit']}), transformers {versions['transformers']}, torch {versions['torch']}; {record['started_at']}",
    ]
    for name, counts in record["workloads"].items():
        lines += [
            "",
            f"{name}: {counts['num_sequences']} sequences, {counts['num_prompt_tokens']:,} prompt and "
            f"{counts['num_output_tokens']:,} output tokens; medians of {record['summary'][0]['num_rounds']}",
            "",
            "| engine:dtype[:batch] | output tok/s (range) | factor | tok/CPU-s | factor | ready s | memory GiB |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in record["summary"]:
            result = row["workloads"][name]
            rate, per_cpu = result["output_tokens_per_s"], result["output_tokens_per_cpu_s"]
            lines.append(
                f"| {row['variant']} | {rate:,.1f} ({result['lowest']:,.1f}-{result['highest']:,.1f}) | "
                f"{_factor(record, name, 'output_tokens_per_s', rate)} | {per_cpu:,.1f} | "
                f"{_factor(record, name, 'output_tokens_per_cpu_s', per_cpu)} | {row['ready_s']:.1f} | "
                f"{row['peak_rss_bytes'] / 2**30:.2f} |"
            )
    return "\n".join(lines)


def _factor(record: dict[str, Any], workload: str, measure: str, value: float) -> str:
    """How many times the best Transformers variant."""
    peers = [row["workloads"][workload] for row in record["summary"] if not row["variant"].startswith("quire:")]
    return f"{value / max(each[measure] for each in peers):.2f}x" if peers else "-"


if __name__ == "__main__":
    sys.exit(main())
