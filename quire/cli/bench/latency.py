"""`quire bench latency`: one request, or a few of the same size: time to the first token,
and for each one after it."""

from __future__ import annotations

import argparse

from quire.cli.bench.common import add_run_options, run_workload
from quire.cli.parser import UsageError

EXAMPLES = """\
examples:
  quire bench latency quire-storyteller
  quire bench latency ./my-model --input-len 1024 --output-len 1
  quire bench latency ./my-model --batch-size 8 --profile
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("workload", "random tokens, fresh in each repetition")
    group.add_argument(
        "--batch-size", type=int, default=1, metavar="N", help="requests at once (default: 1)"
    )
    group.add_argument(
        "--input-len",
        type=int,
        default=128,
        metavar="N",
        help="tokens of each prompt (default: 128)",
    )
    group.add_argument(
        "--output-len",
        type=int,
        default=128,
        metavar="N",
        help="tokens of each answer (default: 128)",
    )
    add_run_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if min(args.batch_size, args.input_len, args.output_len) < 1:
        raise UsageError("--batch-size, --input-len and --output-len must be at least 1")
    from quire.bench.workload import random_workload

    inputs, outputs = (args.input_len, args.input_len), (args.output_len, args.output_len)
    workload = random_workload(args.batch_size, inputs, outputs, seed=args.seed)
    return run_workload(args, "latency", lambda plan: workload)
