"""`quire bench control-plane`: what deciding a step costs,
with hundreds of sequences and no model."""

from __future__ import annotations

import argparse

from quire.cli.parser import UsageError

EXAMPLES = """\
examples:
  quire bench control-plane
  quire bench control-plane --num-running 1024 --arriving-len 4000
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    for name, default, meaning in (
        ("--num-running", 256, "sequences decoding"),
        (
            "--arriving-len",
            1155,
            "tokens of the prompt that arrives in every step of the second part",
        ),
        ("--num-steps", 500, "steps to time"),
    ):
        parser.add_argument(
            name, type=int, default=default, metavar="N", help=f"{meaning} (default: {default})"
        )


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if min(args.num_running, args.arriving_len, args.num_steps) < 1:
        raise UsageError("--num-running, --arriving-len and --num-steps must be at least 1")
    from quire.bench.control_plane import Load, measure_step_costs

    decodes = measure_step_costs(Load(args.num_running, args.num_steps))
    print(decodes.line(f"{args.num_running} decoding"))
    recorded = measure_step_costs(Load(args.num_running, args.num_steps, is_recorded=True))
    print(recorded.line("the same, each step recorded"))
    mixed = measure_step_costs(Load(args.num_running, args.num_steps, args.arriving_len))
    print(mixed.line(f"and a prompt of {args.arriving_len} every step"))
    return 0
