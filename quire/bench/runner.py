"""A whole benchmark: engine, warm-up, repetitions with the machine's limits sampled in between,
medians, record."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire.bench import record as records
from quire.bench.limits import LimitSample, LimitSampler, limit_sampler, typical
from quire.bench.measure import measure, medians, results
from quire.bench.profiling import OUTER_PHASES, StepProfile
from quire.bench.roofline import attained
from quire.bench.workload import Workload, random_workload, totals
from quire.engine.assembly.builder import assemble, build_executor, select
from quire.engine.assembly.preparation import PreparedModel, machine_for
from quire.engine.loop.engine import Engine
from quire.errors import ConfigError

_WARMUP = random_workload(4, (8, 32), (4, 8), name="warm-up")


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How often, and what else to look at."""

    kind: str
    """"throughput" or "latency"."""
    num_repetitions: int = 3
    num_warmups: int = 1
    """Runs of the workload that are not counted;
    at 0 a few short requests still wake everything up."""
    is_profiled: bool = False


def run_benchmark(
    prepared: PreparedModel,
    workload: Workload,
    options: BenchOptions,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Load, measure, and return a record that `record.problems` has nothing against.
    `tell` hears of progress."""
    plan = prepared.planned.plan
    machine = machine_for(plan.config)
    if options.is_profiled and plan.device != "cpu":
        raise ConfigError(
            "--profile times operations as the host computes them; what a GPU does needs a "
            "profiler of its own"
        )
    started_at = records.timestamp()
    tell("loading the model")
    engine = assemble(prepared, build_executor(prepared.planned))
    try:
        tell("looking for the machine's limits")
        sampler = limit_sampler(plan.device)
        sampler.sample()
        profile = StepProfile(engine) if options.is_profiled else None
        repetitions, samples = _repeat(engine, workload, (options, sampler, profile), tell)
    finally:
        engine.close()
    name = type(select(plan).kernels).__name__.removesuffix("Kernels").lower()
    return {
        "schema": records.SCHEMA,
        "kind": options.kind,
        "started_at": started_at,
        "command": shlex.join(["quire", *sys.argv[1:]]),
        "machine": records.describe_machine(machine),
        "versions": records.describe_versions(),
        "engine": records.describe_engine(plan, name),
        "workload": {
            "name": workload.name,
            "parameters": workload.parameters,
            "totals": totals(workload.requests(0, plan.spec.vocab_size)),
        },
        "peaks": typical(samples)._asdict(),
        "num_repetitions": len(repetitions),
        "repetitions": repetitions,
        "median": medians(repetitions),
        "profile_s": None if profile is None else profile.seconds(),
    }


def _repeat(
    engine: Engine,
    workload: Workload,
    settings: tuple[BenchOptions, LimitSampler, StepProfile | None],
    tell: Callable[[str], None],
) -> tuple[list[dict[str, Any]], list[LimitSample]]:
    """Results and all samples. Warm-ups have negative numbers:
    their tokens differ from those of counted repetitions."""
    options, sampler, profile = settings
    vocab_size = engine.plan.spec.vocab_size
    tell("warming up")
    measure(engine, _WARMUP.requests(0, vocab_size))
    for number in range(options.num_warmups):
        measure(engine, workload.requests(-1 - number, vocab_size))
    while engine.idle():  # an engine that serves has moments for what is recorded in them
        pass
    if profile is not None:
        profile.reset()
    repetitions, samples = [], list[LimitSample]()
    for number in range(options.num_repetitions):
        run = measure(engine, workload.requests(number, vocab_size), sampler)
        samples += run.samples
        outcome = results(run, num_blocks=engine.plan.limits.num_blocks)
        outcome["roofline"] = attained(run.costs, run.wall_s, typical(run.samples))._asdict()
        repetitions.append(outcome)
        tell(
            f"repetition {number + 1} of {options.num_repetitions}: "
            f"{outcome['output_tokens_per_s']:,.1f} output tokens/s"
        )
    return repetitions, samples


def render(record: dict[str, Any]) -> list[str]:
    """Return a record for people."""
    median, engine, work = record["median"], record["engine"], record["workload"]["totals"]
    roof = median["roofline"]
    where = record["machine"]["gpu"] or record["machine"]["cpu"]
    lines = [
        f"{engine['model']}: {engine['architecture']}, {engine['num_parameters']:,} "
        f"parameters, {engine['dtype']}, "
        f"{engine['kernels']} kernels, {engine['num_threads']} threads on {where}",
        f"workload {record['workload']['name']}: {work['num_sequences']} sequences, "
        f"{work['num_prompt_tokens']:,} prompt and "
        f"{work['num_output_tokens']:,} output tokens; medians of {record['num_repetitions']}",
        f"throughput   {median['output_tokens_per_s']:,.1f} output, "
        f"{median['prompt_tokens_per_s']:,.1f} prompt, "
        f"{median['total_tokens_per_s']:,.1f} total tokens/s; {median['requests_per_s']:.2f} "
        "requests/s",
        *(
            _latency(name, median[key])
            for name, key in _LATENCIES.items()
            if median[key] is not None
        ),
        f"memory       {median['peak_num_blocks']:.0f} blocks at the peak "
        f"({median['peak_block_share']:.1%}), "
        f"{median['kv_waste']:.1%} wasted, prefix hits {median['prefix_hit_rate']:.1%}, "
        f"{median['num_preemptions']:.0f} preemptions",
        f"overhead     {1e3 * median['step_overhead_s']:.2f} ms a step outside the model, "
        f"{median['overhead_share']:.1%} of the time",
        f"roofline     {roof['roofline_share']:.1%} of the limits sampled meanwhile: "
        f"{roof['flops_share']:.1%} of "
        f"{roof['peak_flops_per_s'] / 1e9:,.1f} GFLOP/s, {roof['bytes_share']:.1%} of "
        f"{roof['peak_bytes_per_s'] / 1e9:.1f} GB/s",
    ]
    if record["profile_s"] is not None:
        whole = sum(record["profile_s"].values())
        shares = ", ".join(
            f"{phase} {seconds / whole:.1%}" for phase, seconds in record["profile_s"].items()
        )
        host = sum(record["profile_s"][phase] for phase in OUTER_PHASES) / whole
        lines.append(f"step time    {shares}; outside of kernels {host:.1%}")
    return lines


_LATENCIES = {
    "first token": "ttft_s",
    "per token": "tpot_s",
    "token gap": "itl_s",
    "end to end": "e2e_s",
}


def _latency(name: str, values: dict[str, float]) -> str:
    return (
        f"{name:<12} {1e3 * values['p50']:,.1f} ms median, {1e3 * values['p90']:,.1f} p90, "
        f"{1e3 * values['p99']:,.1f} p99"
    )
