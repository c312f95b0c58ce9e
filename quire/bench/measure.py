"""One measured run of requests through an engine: every token's time, every step's work, the
scheduler's counters.

All requests are there at the start. Token times are taken after each step, as a program that
streams sees them. The machine's limits may be sampled between steps: that time is no part of the
run, whose clock stands still meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from quire.bench.limits import LimitSample, LimitSampler
from quire.bench.operations import CostModel, StepCost
from quire.bench.spread import spread
from quire.bench.workload import BenchRequest
from quire.core.params import RequestOutputKind, SamplingParams
from quire.core.plan import RowWork, StepPlan, StepResult
from quire.core.scheduler.stats import SchedulerStats
from quire.engine.front.outputs import RequestOutput
from quire.engine.loop.engine import Engine
from quire.engine.loop.step_loop import PlainLoop
from quire.errors import EngineError
from quire.executor.interface import Launched


@dataclass(slots=True)
class RequestTimes:
    """One request: when each of its first sequence's tokens came, in seconds from the start."""

    token_s: list[float] = field(default_factory=list)
    finished_s: float = 0.0
    num_output: int = 0
    num_prompt: int = 0
    num_prefix_hits: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """What was seen."""

    wall_s: float
    execute_s: float
    """Of which the data plane had that much."""
    requests: list[RequestTimes]
    stats: SchedulerStats
    costs: list[StepCost]
    samples: list[LimitSample]
    """Of the machine's limits, before, during and after the run; none unless requested."""

    @property
    def num_prompt(self) -> int:
        """Prompt tokens of all requests."""
        return sum(each.num_prompt for each in self.requests)

    @property
    def num_output(self) -> int:
        """Output tokens of all sequences."""
        return sum(each.num_output for each in self.requests)


def measure(
    engine: Engine, requests: Sequence[BenchRequest], sampler: LimitSampler | None = None
) -> MeasuredRun:
    """Run the requests together. The engine must be idle; its counters start anew."""
    assert not engine.has_work
    engine.scheduler.stats = stats = SchedulerStats()
    times = [RequestTimes(num_prompt=len(each.token_ids)) for each in requests]
    sampling = _Sampling(engine, sampler)
    sampling.take()
    clock = RunClock()
    with _ExecutorTimer(engine, clock) as watch:
        for number, each in enumerate(requests):
            engine.add_request(str(number), {"prompt_token_ids": each.token_ids}, params_of(each))
        while engine.has_work:
            outputs = engine.step()
            now = clock.now()
            for output in outputs:
                assert isinstance(output, RequestOutput)
                _note(times[int(output.request_id)], output, now)
            sampling.take_if_due(clock)
        wall_s = clock.now()
    sampling.take()
    for request, seen in zip(requests, times, strict=True):
        if seen.num_output != request.num_output * request.num_sequences:
            raise EngineError(
                f"a request ended after {seen.num_output} of {request.num_output} tokens; "
                "that is no measurement"
            )
    costs = CostModel(engine.plan.spec, engine.plan.dtype, engine.plan.kv_format)
    return MeasuredRun(
        wall_s,
        watch.execute_s,
        times,
        stats,
        [costs.step(work) for work in watch.work],
        sampling.samples,
    )


def params_of(request: BenchRequest) -> SamplingParams:
    """Return sampling parameters that make exactly the tokens requested."""
    return SamplingParams(
        n=request.num_sequences,
        temperature=request.temperature,
        seed=0 if request.temperature else None,
        max_tokens=request.num_output,
        ignore_eos=True,
        output_kind=RequestOutputKind.DELTA,
    )


def _note(seen: RequestTimes, output: RequestOutput, now_s: float) -> None:
    if output.error is not None:
        raise EngineError(f"a request failed: {output.error}")
    seen.num_output += sum(len(each.token_ids) for each in output.outputs)
    seen.token_s += [now_s] * len(output.outputs[0].token_ids)
    if output.finished:
        seen.finished_s = now_s
        seen.num_prefix_hits = output.metrics.num_prefix_hit_tokens


class RunClock:
    """Seconds since it was made, without those that were spent aside."""

    def __init__(self, read: Callable[[], float] = time.perf_counter) -> None:
        self._read = read
        self._zero_s = read()

    def now(self) -> float:
        """In seconds."""
        return self._read() - self._zero_s

    def aside(self, work: Callable[[], None]) -> None:
        """Do something while the clock stands still."""
        before = self._read()
        try:
            work()
        finally:
            self._zero_s += self._read() - before


class _Sampling:
    """Takes samples of the machine's limits around and, where that is possible,
    in between the steps of a run."""

    def __init__(self, engine: Engine, sampler: LimitSampler | None) -> None:
        self.samples: list[LimitSample] = []
        self._sampler = sampler
        # Steps that overlap leave no moment in which nothing computes.
        has_gaps = isinstance(engine.loop, PlainLoop)
        self._every_s = sampler.every_s if sampler is not None and has_gaps else float("inf")
        self._due_s = self._every_s

    def take(self) -> None:
        """Take a sample."""
        if self._sampler is not None:
            self.samples.append(self._sampler.sample())

    def take_if_due(self, clock: RunClock) -> None:
        """Take a sample if the last one was long ago, while the run's clock stands still."""
        if clock.now() >= self._due_s:
            clock.aside(self.take)
            self._due_s = clock.now() + self._every_s


class _ExecutorTimer:
    """Notes the work and the time of every call of an engine's executor."""

    def __init__(self, engine: Engine, clock: RunClock) -> None:
        self._engine = engine
        self._clock = clock
        self._executor = engine.executor
        self.work: list[tuple[RowWork, ...]] = []
        self.execute_s = 0.0
        """While any step was on its way."""
        self._counted_until_s = 0.0

    def __enter__(self) -> _ExecutorTimer:
        self._engine.executor = self
        return self

    def __exit__(self, *_: object) -> None:
        self._engine.executor = self._executor

    def execute(self, plan: StepPlan) -> StepResult:
        """Pass it on, and take the time."""
        started = self._clock.now()
        result = self._executor.execute(plan)
        self._count(plan, started)
        return result

    def launch(self, plan: StepPlan) -> Launched:
        """Pass it on, and take the time until its result is there."""
        started = self._clock.now()
        launched = self._executor.launch(plan)

        def result() -> StepResult:
            found = launched()
            self._count(plan, started)
            return found

        return result

    def _count(self, plan: StepPlan, started_s: float) -> None:
        now_s = self._clock.now()
        self.execute_s += now_s - max(started_s, self._counted_until_s)
        self._counted_until_s = now_s
        self.work.append(plan.work)

    def register_processor(self, processor: Callable[..., Any]) -> str:
        """Passed on."""
        return self._executor.register_processor(processor)

    def unregister_processor(self, name: str) -> None:
        """Passed on."""
        self._executor.unregister_processor(name)

    def idle(self) -> bool:
        """Passed on."""
        return self._executor.idle()

    def sleep(self, level: int) -> None:
        """Passed on."""
        self._executor.sleep(level)

    def wake(self, parts: Sequence[str]) -> None:
        """Passed on."""
        self._executor.wake(parts)

    def load_weights(self, source: Any) -> Any:
        """Passed on."""
        return self._executor.load_weights(source)

    def replace_weights(self, loaded: Any) -> None:
        """Passed on."""
        self._executor.replace_weights(loaded)

    def close(self) -> None:
        """Passed on."""
        self._executor.close()


def results(run: MeasuredRun, *, num_blocks: int) -> dict[str, Any]:
    """Return a run in numbers: rates over wall time, latencies in seconds, memory, overhead."""
    stats, num_steps = run.stats, max(1, run.stats.num_steps)
    gaps = [
        b - a for each in run.requests for a, b in zip(each.token_s, each.token_s[1:], strict=False)
    ]
    decoded = [each for each in run.requests if len(each.token_s) > 1]
    return {
        "wall_s": run.wall_s,
        "requests_per_s": len(run.requests) / run.wall_s,
        "prompt_tokens_per_s": run.num_prompt / run.wall_s,
        "output_tokens_per_s": run.num_output / run.wall_s,
        "total_tokens_per_s": (run.num_prompt + run.num_output) / run.wall_s,
        "ttft_s": spread([each.token_s[0] for each in run.requests]),
        "tpot_s": spread(
            [(each.token_s[-1] - each.token_s[0]) / (len(each.token_s) - 1) for each in decoded]
        ),
        "itl_s": spread(gaps),
        "e2e_s": spread([each.finished_s for each in run.requests]),
        "prefix_hit_rate": sum(each.num_prefix_hits for each in run.requests) / run.num_prompt,
        "kv_waste": stats.waste,
        "num_preemptions": stats.num_preemptions,
        "peak_num_blocks": stats.peak_num_blocks,
        "peak_block_share": stats.peak_num_blocks / num_blocks,
        "num_steps": stats.num_steps,
        "step_overhead_s": (run.wall_s - run.execute_s) / num_steps,
        "overhead_share": (run.wall_s - run.execute_s) / run.wall_s,
    }


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Repetitions' results in one: the median of each number."""
    first = runs[0]
    combined: dict[str, Any] = {}
    for key, value in first.items():
        if isinstance(value, dict):
            combined[key] = medians([run[key] for run in runs])
        else:
            combined[key] = None if value is None else median(run[key] for run in runs)
    return combined
