"""What the measuring commands share: options, the run, and where the record goes."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

from quire.cli.options import add_engine_options, engine_config
from quire.cli.output_file import open_output
from quire.cli.parser import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire.bench.workload import Workload
    from quire.engine.plan.engine_plan import EnginePlan


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Repetitions, profile, record, and the engine's options."""
    group = parser.add_argument_group("run")
    group.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the workload's lengths (default: 0)"
    )
    group.add_argument(
        "--repetitions",
        type=int,
        default=3,
        metavar="N",
        help="counted runs, of which medians (default: 3)",
    )
    group.add_argument(
        "--warmups", type=int, default=1, metavar="N", help="runs before them (default: 1)"
    )
    group.add_argument(
        "--profile", action="store_true", help="show where the time of steps goes (slightly slower)"
    )
    group.add_argument(
        "--detokenize", action="store_true", help="turn output tokens into text as well"
    )
    group.add_argument(
        "--json", metavar="FILE", help="write the record to FILE, - for standard output"
    )
    add_engine_options(parser, exclude=("seed", "skip_tokenizer_init"))


def run_workload(
    args: argparse.Namespace, kind: str, make: Callable[[EnginePlan], Workload]
) -> int:
    """Measure the workload that `make` gives for a plan; print and write the record."""
    if args.repetitions < 1 or args.warmups < 0:
        raise UsageError("--repetitions must be at least 1, and --warmups at least 0")
    config = engine_config(args, skip_tokenizer_init=not args.detokenize)
    from quire.bench.measure import params_of
    from quire.bench.runner import BenchOptions, render, run_benchmark
    from quire.cli.session import PromptJob, check
    from quire.engine.assembly.preparation import prepare_model

    prepared = prepare_model(config)
    plan = prepared.planned.plan
    workload = make(plan)
    requests = workload.requests(0, plan.spec.vocab_size)
    check(
        prepared,
        [PromptJob({"prompt_token_ids": each.token_ids}, params_of(each)) for each in requests],
    )
    options = BenchOptions(kind, args.repetitions, args.warmups, args.profile)
    # opened first, so that a bad path fails first
    with open_output(None if args.json == "-" else args.json) as file:
        record = run_benchmark(
            prepared, workload, options, lambda text: print(f"quire: {text}", file=sys.stderr)
        )
        if args.json is not None:
            file.write(json.dumps(record, indent=1) + "\n")
    print("\n".join(render(record)), file=sys.stderr if args.json == "-" else sys.stdout)
    return 0


def length_range(text: str) -> tuple[int, int]:
    """`128` or `16:256`, both ends included."""
    low, _, high = text.partition(":")
    first, last = int(low), int(high or low)
    if not 1 <= first <= last:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a range of lengths such as 128 or 16:256"
        )
    return first, last
