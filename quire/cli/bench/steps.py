"""`quire bench steps`: what steps of a model cost here, for `quire simulate --step-costs`; with a
trace, also how far the simulator is off."""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from quire.cli.options import add_engine_options, engine_config
from quire.cli.output_file import open_output
from quire.cli.parser import UsageError

if TYPE_CHECKING:
    from quire.bench.steps import StepFit
    from quire.engine.loop.engine import Engine
    from quire.sim.traces import Trace

EXAMPLES = """\
examples:
  quire bench steps ./my-model --output my-model.steps.json
  quire bench steps ./my-model --trace conv.csv.gz --limit 100 --speed 0.2
  quire simulate --trace conv.csv.gz --fleet 4 --step-costs my-model.steps.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command."""
    parser.epilog = EXAMPLES
    group = parser.add_argument_group("steps")
    group.add_argument(
        "--output", metavar="FILE", help="write the costs to FILE, - for standard output"
    )
    trace = parser.add_argument_group("comparison", "with a trace, run for real and simulated")
    trace.add_argument("--trace", type=Path, metavar="FILE", help="a .csv or .jsonl trace")
    trace.add_argument("--limit", type=int, metavar="K", help="only the trace's first K requests")
    trace.add_argument(
        "--speed", type=float, metavar="X", help="requests come X times as fast as recorded"
    )
    add_engine_options(parser, exclude=("seed", "skip_tokenizer_init"))


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.trace is None and not (args.limit is None and args.speed is None):
        raise UsageError("--limit and --speed are of a trace; say which: --trace FILE")
    speed = 1.0 if args.speed is None else args.speed
    if not 0 < speed < math.inf:
        raise UsageError(f"--speed={speed} must be a number above 0")
    config = engine_config(args, skip_tokenizer_init=True)
    from quire.bench.steps import measure_steps
    from quire.bench.trace_run import check_fits, without_answers
    from quire.cli.session import PromptJob, check
    from quire.core.params import SamplingParams
    from quire.engine.assembly.builder import assemble, build_executor
    from quire.engine.assembly.preparation import prepare_model
    from quire.sim.traces import read_trace

    prepared = prepare_model(config)
    check(prepared, [PromptJob({"prompt_token_ids": [0]}, SamplingParams(max_tokens=1))])
    trace = None
    if args.trace is not None:
        trace = without_answers(read_trace(args.trace, limit=args.limit))
        check_fits(trace, prepared.planned.plan.limits)
    with open_output(None if args.output == "-" else args.output) as file:
        _tell("loading the model")
        engine = assemble(
            prepared, build_executor(prepared.planned), is_streaming=True
        )  # paced as a server's
        try:
            found = measure_steps(engine, _tell)
            if args.output is not None:
                num_steps = sum(len(steps) for _, steps in found.kinds)
                file.write(json.dumps(_record(found, num_steps)) + "\n")
            lines = found.lines()
            if trace is not None:
                lines += _compare(engine, trace, found, speed)
        finally:
            engine.close()
    print("\n".join(lines), file=sys.stderr if args.output == "-" else sys.stdout)
    return 0


def _tell(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr)


def _record(found: StepFit, num_steps: int) -> dict[str, object]:
    """What a server keeps of the steps that it takes (`StepCostModel.saved`), and the curve."""
    costs = {"estimate": list(found.costs), "ratios": [1.0] * len(found.costs)}
    return costs | {"num_observed": num_steps, "curve": found.curve}


def _compare(engine: Engine, trace: Trace, found: StepFit, speed: float) -> list[str]:
    from quire.bench.trace_run import WaitingTimes, run_trace
    from quire.sim.fleet import FleetSettings, simulate_fleet

    pace, limits = engine.scheduler.pace, engine.plan.limits
    target_s = pace.target_s if pace is not None and pace.is_bounding else None
    settings = FleetSettings(
        1,
        limits,
        found.costs,
        speed=speed,
        target_step_s=target_s,
        curve=found.curve,
        is_overlapped=engine.plan.is_overlapped,
    )
    _tell("simulating the trace")
    report = simulate_fleet(trace, settings)
    _tell(f"running it, for some {report.virtual_s:.0f} s")
    real = run_trace(engine, trace, speed)
    return [
        "",
        *report.lines(),
        "",
        *real.compared(WaitingTimes(report.first_token_s, report.per_token_s)),
    ]
