"""`quire bench throughput`: many requests at once, of random lengths, with a shared prefix,
or with a trace's lengths."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.bench.common import add_run_options, length_range, run_workload
from quire.cli.parser import UsageError

if TYPE_CHECKING:
    from quire.bench.workload import Workload
    from quire.engine.plan.engine_plan import EnginePlan

EXAMPLES = """\
examples:
  quire bench throughput quire-storyteller
  quire bench throughput ./my-model --num-requests 64 --input-len 16:256 --output-len 16:128 \\
    --json record.json
  quire bench throughput ./config.json --load-format dummy --dataset prefix \\
    --prefix-len 512 --input-len 32 --output-len 32
  quire bench throughput ./my-model --trace azure2023_conv.csv.gz --num-requests 100 \\
    --max-model-len 4096
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    group = parser.add_argument_group(
        "workload", "random tokens, fresh in each repetition; all requests come at once"
    )
    group.add_argument(
        "--dataset",
        choices=("random", "prefix"),
        default="random",
        help="kind of prompts (default: random)",
    )
    group.add_argument(
        "--trace",
        metavar="FILE",
        help="lengths from a .csv or .jsonl file (or .gz), as far as they fit",
    )
    group.add_argument("--num-requests", type=int, default=64, metavar="N", help="(default: 64)")
    group.add_argument(
        "--input-len", type=length_range, default=(16, 256), metavar="A:B", help="(default: 16:256)"
    )
    group.add_argument(
        "--output-len",
        type=length_range,
        default=(16, 128),
        metavar="A:B",
        help="(default: 16:128)",
    )
    group.add_argument(
        "--prefix-len",
        type=int,
        default=512,
        metavar="N",
        help="shared tokens of --dataset prefix (512)",
    )
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.num_requests < 1 or args.prefix_len < 1:
        raise UsageError("--num-requests and --prefix-len must be at least 1")
    return run_workload(args, "throughput", lambda plan: _workload(args, plan))


def _workload(args: argparse.Namespace, plan: EnginePlan) -> Workload:
    from quire.bench.workload import prefix_workload, random_workload, trace_workload

    if args.trace is not None:
        path, longest = Path(args.trace), plan.limits.max_model_len
        return trace_workload(path, num_requests=args.num_requests, max_model_len=longest)
    if args.dataset == "prefix":
        for option, (first, last) in {
            "--input-len": args.input_len,
            "--output-len": args.output_len,
        }.items():
            if first != last:
                raise UsageError(
                    f"with --dataset prefix, {option} is one number (own tokens of each "
                    "prompt, output tokens)"
                )
        return prefix_workload(
            args.num_requests, args.prefix_len, args.input_len[0], args.output_len[0]
        )
    return random_workload(args.num_requests, args.input_len, args.output_len, seed=args.seed)
