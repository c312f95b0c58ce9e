"""`quire simulate`: the scheduler against seeded faults, or against a real trace, without a model.

quire simulate --seeds 1000                 a thousand random scenarios with faults
quire simulate --seed 42                    one of them again
quire simulate --seeds 1000 --overlap       the same, with each step planned while the one before it
runs quire simulate --seeds 1000 --liveness      faults stop early; everything must then end in time
quire simulate --trace conv.csv.gz          replay a trace and report memory, cache hits and the
cost of a step
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--seed", type=int, help="run this seed, or start from it with --seeds")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="run N seeds (default 100, or 1 with --seed)"
    )
    parser.add_argument(
        "--liveness",
        action="store_true",
        help="stop the faults early and bound the steps that follow",
    )
    parser.add_argument(
        "--overlap",
        action="store_true",
        help="plan each step before the outcome of the one before it is known",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="replay a .csv or .jsonl trace, gzipped or not"
    )
    parser.add_argument("--limit", type=int, metavar="K", help="only the trace's first K requests")
    parser.add_argument(
        "--block-size", type=int, default=16, help="tokens per KV block (trace only)"
    )
    parser.add_argument(
        "--num-blocks",
        default="unbounded",
        help='KV blocks, or "unbounded": enough that nothing is evicted (trace only)',
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=256, help="sequences that run at once (trace only)"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=2048, help="tokens per step (trace only)"
    )
    parser.add_argument(
        "--step-ms", type=float, default=10.0, help="virtual milliseconds per step (trace only)"
    )
    parser.add_argument(
        "--token-us",
        type=float,
        default=20.0,
        help="virtual microseconds per computed token (trace only)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status is 0 if everything was as it must be."""
    return _replay(args) if args.trace is not None else _simulate(args)


def _simulate(args: argparse.Namespace) -> int:
    from quire.sim.scenario import make_scenario
    from quire.sim.simulation import Simulation, SimulationError

    first = args.seed if args.seed is not None else 0
    num_seeds = args.seeds if args.seeds is not None else (1 if args.seed is not None else 100)
    num_failed = num_steps = 0
    for seed in range(first, first + num_seeds):
        try:
            outcome = Simulation(
                make_scenario(seed, is_liveness=args.liveness), is_overlapped=args.overlap
            ).run()
        except SimulationError as error:
            num_failed += 1
            print(error)
        else:
            num_steps += outcome.num_steps
            if num_seeds == 1:
                print(
                    f"finished: {outcome.num_finished}, refused: {outcome.num_refused}, "
                    f"faults: {outcome.num_strikes}"
                )
                print(
                    "state after the last step: "
                    f"{outcome.state_hashes[-1] if outcome.state_hashes else 'none'}"
                )
    print(f"{num_seeds - num_failed} of {num_seeds} seeds passed ({num_steps} steps)")
    return 1 if num_failed else 0


def _replay(args: argparse.Namespace) -> int:
    from quire.config.limits import SchedulerLimits
    from quire.errors import ConfigError
    from quire.sim.replay import StepTimeModel, replay
    from quire.sim.traces import read_trace

    trace = read_trace(args.trace, limit=args.limit)
    if args.num_blocks == "unbounded":
        num_blocks = trace.num_blocks_without_eviction(args.block_size)
    elif args.num_blocks.isdecimal():
        num_blocks = int(args.num_blocks)
    else:
        raise ConfigError(f'--num-blocks={args.num_blocks!r} is neither a number nor "unbounded"')
    max_model_len = max(
        request.num_prompt_tokens + request.num_output_tokens for request in trace.requests
    )
    limits = SchedulerLimits(
        num_blocks, args.block_size, args.max_num_seqs, args.max_num_batched_tokens, max_model_len
    )
    report = replay(trace, limits, StepTimeModel(args.step_ms / 1e3, args.token_us / 1e6))
    print("\n".join(report.lines()))
    return 0 if report.num_complete == report.num_requests else 1
