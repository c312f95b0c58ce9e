"""`quire simulate`: the scheduler against seeded faults, or against a real trace, without a model.

quire simulate --seeds 1000                 a thousand random scenarios with faults
quire simulate --seed 42                    one of them again
quire simulate --seeds 1000 --overlap       the same, with each step planned while the one before it
runs quire simulate --seeds 1000 --liveness      faults stop early; everything must then end in time
quire simulate --trace conv.csv.gz          replay a trace and report memory, cache hits and the
cost of a step
quire simulate --trace conv.csv.gz --fleet 4 --num-blocks 20000     the same over four replicas
behind the router: waits, hits and balance
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.common.bounded_files import MAX_SETTINGS_BYTES, read_whole
from quire.config.limits import SchedulerLimits
from quire.config.route import ROUTING_POLICIES
from quire.core.step_cost import UnitCosts
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.sim.step_times import Curve
    from quire.sim.traces import Trace


_FLEET_DEFAULTS: dict[str, Any] = {
    "policy": "kv-aware", "speed": 1.0, "step_costs": None, "target_step_ms": None,
}  # fmt: skip
_SIMPLE_COSTS = {"step_ms": 10.0, "token_us": 20.0}
_DURATIONS = ("step_ms", "token_us", "target_step_ms")
_TRACE_DEFAULTS: dict[str, Any] = {
    "limit": None, "block_size": 16, "num_blocks": "unbounded", "max_num_seqs": 256,
    "max_num_batched_tokens": 2048, "fleet": None, **_SIMPLE_COSTS, **_FLEET_DEFAULTS,
}  # fmt: skip
_MOST = {"fleet": 1 << 10, "block_size": 1 << 12}
"""Beyond which memory is used up before the first request."""
_MAX_DIGITS = 7
"""Of the number of blocks, likewise."""
_SEED_DEFAULTS = {"seed": None, "seeds": None, "liveness": False, "overlap": False}


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
    parser.add_argument("--block-size", type=int, help="tokens per KV block (trace only)")
    parser.add_argument(
        "--num-blocks",
        help='KV blocks, or "unbounded": enough that nothing is evicted (trace only)',
    )
    parser.add_argument("--max-num-seqs", type=int, help="sequences that run at once (trace only)")
    parser.add_argument("--max-num-batched-tokens", type=int, help="tokens per step (trace only)")
    parser.add_argument("--step-ms", type=float, help="virtual milliseconds per step (trace only)")
    parser.add_argument(
        "--token-us",
        type=float,
        help="virtual microseconds per computed token (trace only)",
    )
    fleet = parser.add_argument_group("fleet options", "with --trace and --fleet")
    fleet.add_argument("--fleet", type=int, metavar="N", help="replay over N replicas and a router")
    fleet.add_argument("--policy", choices=ROUTING_POLICIES, help="as of quire route")
    fleet.add_argument(
        "--speed", type=float, help="requests come so many times as fast as recorded"
    )
    fleet.add_argument(
        "--step-costs",
        type=Path,
        metavar="FILE",
        help="what steps cost as quire bench steps has measured it, in place of "
        "--step-ms and --token-us",
    )
    fleet.add_argument(
        "--target-step-ms",
        type=float,
        help="as of quire serve; without it, only the tokens of a step are bounded",
    )
    parser.set_defaults(**_TRACE_DEFAULTS, **_SEED_DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status is 0 if everything was as it must be."""
    _check(args)
    if args.fleet is not None:
        return _simulate_fleet(args)
    return _replay(args) if args.trace is not None else _simulate(args)


def _check(args: argparse.Namespace) -> None:
    """Raise ConfigError for numbers that are none, and for options that would change nothing."""
    for name in ("fleet", "limit", "block_size", "speed", *_DURATIONS):
        value = getattr(args, name)
        may_be_none = args.fleet is None and name in ("step_ms", "token_us")
        if value is not None and not (0 < value < math.inf or (may_be_none and value == 0)):
            raise ConfigError(f"{_flag(name)}={value} must be a number above 0")
        if value is not None and value > _MOST.get(name, math.inf):
            raise ConfigError(f"{_flag(name)}={value} is too many; at most {_MOST[name]}")
    if args.trace is None:
        _refuse_given(args, _TRACE_DEFAULTS, "replays a trace; say which: --trace FILE")
        return
    _refuse_given(args, _SEED_DEFAULTS, "is for scenarios without --trace; leave one of them out")
    if args.fleet is None:
        _refuse_given(args, _FLEET_DEFAULTS, "is for several replicas; say how many: --fleet N")
    if args.step_costs is not None:
        _refuse_given(args, _SIMPLE_COSTS, "and --step-costs both say what a step takes; give one")


def _refuse_given(args: argparse.Namespace, defaults: Mapping[str, Any], why: str) -> None:
    for name, default in defaults.items():
        if getattr(args, name) != default:
            raise ConfigError(f"{_flag(name)} {why}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _simulate(args: argparse.Namespace) -> int:
    from quire.sim.scenario import make_scenario
    from quire.sim.simulation import Simulation, SimulationError

    first = args.seed if args.seed is not None else 0
    num_seeds = args.seeds if args.seeds is not None else (1 if args.seed is not None else 100)
    if first < 0 or num_seeds < 1:
        name, value = ("seed", first) if first < 0 else ("seeds", num_seeds)
        raise ConfigError(f"--{name}={value} must be at least {0 if first < 0 else 1}")
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
    from quire.sim.replay import StepTimeModel, replay
    from quire.sim.traces import read_trace

    trace = read_trace(args.trace, limit=args.limit)
    costs = StepTimeModel(args.step_ms / 1e3, args.token_us / 1e6)
    report = replay(trace, _limits(args, trace), costs)
    print("\n".join(report.lines()))
    return 0 if report.num_complete == report.num_requests else 1


def _limits(args: argparse.Namespace, trace: Trace) -> SchedulerLimits:
    if args.num_blocks == "unbounded":
        num_blocks = trace.num_blocks_without_eviction(args.block_size)
    elif args.num_blocks.isdecimal() and len(args.num_blocks) <= _MAX_DIGITS:
        num_blocks = int(args.num_blocks)
    else:
        raise ConfigError(
            f'--num-blocks={args.num_blocks!r} is neither "unbounded" nor a number of at most '
            f"{_MAX_DIGITS} digits"
        )
    max_model_len = max(
        request.num_prompt_tokens + request.num_output_tokens for request in trace.requests
    )
    return SchedulerLimits(
        num_blocks, args.block_size, args.max_num_seqs, args.max_num_batched_tokens, max_model_len
    )


def _simulate_fleet(args: argparse.Namespace) -> int:
    from quire.sim.fleet import FleetSettings, simple_costs, simulate_fleet
    from quire.sim.traces import read_trace

    trace = read_trace(args.trace, limit=args.limit)
    costs, curve = (
        (simple_costs(args.step_ms / 1e3, args.token_us / 1e6), ())
        if args.step_costs is None
        else _read_costs(args.step_costs)
    )
    settings = FleetSettings(
        args.fleet,
        _limits(args, trace),
        costs,
        policy=args.policy,
        speed=args.speed,
        target_step_s=None if args.target_step_ms is None else args.target_step_ms / 1e3,
        curve=curve,
    )
    report = simulate_fleet(trace, settings)
    print("\n".join(report.lines()))
    return 0 if report.num_complete == report.num_requests else 1


def _read_costs(path: Path) -> tuple[UnitCosts, Curve]:
    """Return what steps cost, as measured, and the curve where there is one. Raises ConfigError."""
    try:
        record = json.loads(read_whole(path, MAX_SETTINGS_BYTES))
        pairs = zip(record["estimate"], record["ratios"], strict=True)
        costs = UnitCosts(*(float(unit_s) * float(ratio) for unit_s, ratio in pairs))
        curve = tuple((int(count), float(ratio)) for count, ratio in record.get("curve", ()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} holds no step costs: {type(error).__name__}") from None
    if not all(0 < unit_s < 1e6 for unit_s in costs):
        raise ConfigError(f"{path} holds step costs that are not above 0: {tuple(costs)}")
    counts = [0, *(count for count, _ in curve)]
    is_ascending = all(one < other for one, other in pairwise(counts))
    if not (is_ascending and all(0 < ratio < 1e6 for _, ratio in curve)):
        raise ConfigError(f"{path} holds step costs with a curve that is none: {curve}")
    return costs, curve
