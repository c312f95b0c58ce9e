"""Workload W6 on several servers in turns: `python -m benchmarks.serving_compare --model models/M2
--vllm PYTHON`.

32 clients at once, two requests each back to back, 128 tokens in and 64 out. Each server is started
and warmed up, and then stays, idle, while the others have their turn; who begins changes with the
round, and medians are compared. Both sides are asked the same token ids by the same clients, and
watched in the same way: the processor time of everything they started.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.servers import Launch, Server, cpu_s, descendants, running
from benchmarks.serving import run_clients
from quire.bench import record as records
from quire.bench.workload import WORKLOADS, random_workload
from quire.engine.plan.machine import Machine

SCHEMA = "quire-serving-compare/1"
_WARM_UP = random_workload(4, (40, 48), (8, 8), name="warm-up")


def main(argv: Sequence[str] | None = None) -> int:
    """Start, measure in turns, print, write."""
    args = parse(argv)
    vocab_size = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "started_at": records.timestamp(),
        "model": Path(args.model).name,
        "machine": records.describe_machine(Machine.inspect()),
        "versions": records.describe_versions(),
        "num_clients": args.clients,
        "servers": {},
        "measurements": [],
    }
    with contextlib.ExitStack() as stack:
        servers: dict[str, Server] = {}
        for name, launch in launches(args).items():
            servers[name] = stack.enter_context(running(launch))
            record["servers"][name] = {
                "ready_s": servers[name].ready_s,
                "options": list(launch.options),
            }
            run_clients(servers[name].url, _model_name(name), _WARM_UP.requests(0, vocab_size), 4)
            print(f"{name}: ready after {servers[name].ready_s:.1f} s", file=sys.stderr, flush=True)
        for number in range(args.rounds):
            names = list(servers)
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                seen = measure(servers[name], name, (number, vocab_size, args))
                record["measurements"].append({"server": name, "round": number, **seen})
                print(
                    f"round {number + 1} {name}: {seen['output_tokens_per_s']:.1f} tokens/s",
                    file=sys.stderr,
                    flush=True,
                )
                if args.json is not None:
                    args.json.write_text(json.dumps(record, indent=1) + "\n")
    print("\n".join(render(record)))
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], prog="python -m benchmarks.serving_compare"
    )
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument(
        "--vllm", metavar="PROGRAM", help="the Python that has vLLM; without it, Quire alone"
    )
    parser.add_argument("--preload", default="", help="LD_PRELOAD of vLLM")
    parser.add_argument(
        "--forms",
        default="bfloat16",
        help="Quire's, comma-separated: bfloat16, int8, int4 (default: bfloat16)",
    )
    parser.add_argument(
        "--vllm-option",
        action="append",
        default=[],
        metavar="TEXT",
        help="of vLLM's command line (repeatable)",
    )
    parser.add_argument("--kv-cache-memory", default="2GiB", help="of Quire (default: 2GiB)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: 3)")
    parser.add_argument("--clients", type=int, default=32, help="(default: 32)")
    parser.add_argument("--first-requests", type=int, help="take only so many of the 64 requests")
    parser.add_argument("--threads", type=int, default=2, help="(default: 2)")
    parser.add_argument("--json", type=Path, help="write the record to a file")
    return parser.parse_args(argv)


def launches(args: argparse.Namespace) -> dict[str, Launch]:
    """Return what to start, by name."""
    found: dict[str, Launch] = {}
    limits = ["--max-model-len", "4352", "--max-num-seqs", "64"]
    for form in args.forms.split(","):
        chosen = ["--dtype", form] if form in ("bfloat16", "float32") else ["--quantization", form]
        own = (*limits, "--kv-cache-memory", args.kv_cache_memory, *chosen)
        found[f"quire:{form}"] = Launch("quire", args.model, own, num_threads=args.threads)
    if args.vllm is not None:
        own = (
            *limits,
            "--kv-cache-memory-bytes",
            str(2 << 30),
            "--dtype",
            "bfloat16",
            *args.vllm_option,
        )
        found["vllm:bfloat16"] = Launch(
            "vllm", args.model, own, args.vllm, args.preload, args.threads
        )
    return found


def _model_name(name: str) -> str | None:
    """Return the model's name in requests: vLLM is told one, Quire answers without."""
    return "m" if name.startswith("vllm") else None


def measure(
    server: Server, name: str, which: tuple[int, int, argparse.Namespace]
) -> dict[str, Any]:
    """Measure one run of the workload."""
    number, vocab_size, args = which
    requests = WORKLOADS["W6"].requests(number, vocab_size)[: args.first_requests]
    cpu_before_s, api_before_s = _tree_cpu_s(server), server.api_cpu_s()
    seen = run_clients(server.url, _model_name(name), requests, args.clients)
    return {
        **seen,
        "cpu_s": _tree_cpu_s(server) - cpu_before_s,
        "api_cpu_s": server.api_cpu_s() - api_before_s,
        "load_1min": os.getloadavg()[0],
    }


def _tree_cpu_s(server: Server) -> float:
    return sum(cpu_s(pid) for pid in descendants(server.pid))


def render(record: dict[str, Any]) -> list[str]:
    """Return a table of medians."""
    lines = [
        (
            "| server | output tokens/s (median, range) | first token s p50 / p99 | between "
            "tokens ms p50 / p99 | ready s |"
        ),
        "|---|---|---|---|---|",
    ]
    for name, server in record["servers"].items():
        mine = [each for each in record["measurements"] if each["server"] == name]
        rates = [each["output_tokens_per_s"] for each in mine]

        def middle(key: str, rank: str, mine: list[dict[str, Any]] = mine) -> float:
            return float(statistics.median(each[key][rank] for each in mine))

        lines.append(
            f"| {name} | {statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f}) "
            f"| {middle('ttft_s', 'p50'):.2f} / {middle('ttft_s', 'p99'):.2f} "
            f"| {1e3 * middle('itl_s', 'p50'):.0f} / {1e3 * middle('itl_s', 'p99'):.0f} | "
            f"{server['ready_s']:.1f} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
