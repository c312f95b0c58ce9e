"""Replay of a real trace through the real control plane, with a null executor and a virtual clock.

Shows what scheduling, paging and prefix caching do under production's arrivals and lengths: whether
all requests are served, how much memory stays unused, how many prompt tokens the cache serves
against what an unlimited one would, and what a step costs the control plane.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter, thread_time

from quire.config.limits import SchedulerLimits
from quire.core.request import FinishReason, Request
from quire.core.request_spec import RequestSpec, fit
from quire.core.scheduler.scheduler import Scheduler
from quire.executor.null import NullExecutor
from quire.sim.traces import Trace


@dataclass(frozen=True, slots=True)
class StepTimeModel:
    """What a step takes on the virtual clock."""

    base_s: float = 0.01
    token_s: float = 20e-6


@dataclass(slots=True)
class ReplayReport:
    """What a replay came to."""

    num_requests: int
    num_complete: int = 0
    """Requests that got exactly the tokens the trace has."""
    virtual_s: float = 0.0
    wall_s: float = 0.0
    waste: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_hit_tokens: int = 0
    num_ideal_hit_tokens: int = 0
    misses: list[tuple[int, int, int]] = field(default_factory=list)
    """Requests whose hits are not the ideal: (number, measured, ideal)."""
    num_preemptions: int = 0
    num_evictions: int = 0
    num_blocks: int = 0
    peak_num_blocks: int = 0
    peak_num_running: int = 0
    step_costs_s: list[tuple[int, float]] = field(default_factory=list)
    """(sequences running, processor seconds spent in schedule and update) of each step."""

    def cost_percentile_ms(self, percent: float, *, min_running: int = 0) -> float:
        """Milliseconds of control plane per step, of the steps with at
        least `min_running` sequences."""
        costs = sorted(cost for running, cost in self.step_costs_s if running >= min_running)
        return 1e3 * costs[min(len(costs) - 1, int(len(costs) * percent / 100))] if costs else 0.0

    def lines(self) -> list[str]:
        """Return the report as text."""
        full = self.peak_num_running
        num_full = sum(running >= full for running, _ in self.step_costs_s)
        hit_rate, ideal = (
            self.num_hit_tokens / self.num_prompt_tokens,
            self.num_ideal_hit_tokens / self.num_prompt_tokens,
        )
        return [
            f"requests         {self.num_complete} of {self.num_requests} complete, "
            f"{self.num_prompt_tokens} prompt and "
            f"{self.num_output_tokens} output tokens",
            (
                f"time             {self.virtual_s:.0f} s virtual, {self.wall_s:.1f} s real, "
                f"{len(self.step_costs_s)} steps"
            ),
            f"unused slots     {100 * self.waste:.2f} % of the allocated",
            f"prefix hits      {100 * hit_rate:.3f} % of prompt tokens, ideal {100 * ideal:.3f} %, "
            f"{len(self.misses)} requests differ"
            + "".join(
                f"; request {number}: {hits} of {best}" for number, hits, best in self.misses[:3]
            ),
            (
                f"blocks           {self.peak_num_blocks} in use at most of {self.num_blocks}, "
                f"{self.num_evictions} evictions"
            ),
            f"preemptions      {self.num_preemptions}",
            f"control plane    {self.cost_percentile_ms(50):.3f} ms a step (median), "
            f"{self.cost_percentile_ms(99):.3f} (p99); "
            f"with {full} running ({num_full} steps) "
            f"{self.cost_percentile_ms(50, min_running=full):.3f} and "
            f"{self.cost_percentile_ms(99, min_running=full):.3f}",
        ]


def replay(
    trace: Trace, limits: SchedulerLimits, cost: StepTimeModel = StepTimeModel()
) -> ReplayReport:
    """Replay a whole trace; arrivals are on the virtual clock,
    which stands still while nothing is to be done."""
    run = _Replay(trace, limits, cost)
    started = perf_counter()
    while run.num_arrived < len(trace.requests) or run.scheduler.has_work:
        run.admit_arrivals()
        run.step()
    run.report.wall_s = perf_counter() - started
    return run.finished_report()


class _Replay:
    def __init__(self, trace: Trace, limits: SchedulerLimits, cost: StepTimeModel) -> None:
        self.trace = trace
        self.cost = cost
        self.scheduler = Scheduler(limits)
        self.executor = NullExecutor(
            limits.max_num_seqs, limits.num_blocks, limits.block_size, script=self._script
        )
        self.requests: dict[int, Request] = {}
        self.ideal = trace.ideal_hits()
        self.clock_s = 0.0
        self.num_arrived = 0
        self.report = ReplayReport(len(trace.requests), num_blocks=limits.num_blocks)

    def admit_arrivals(self) -> None:
        """Hand over every request that has arrived; jump to the next one if no request is running
        or waiting."""
        requests = self.trace.requests
        if not self.scheduler.has_work:
            self.clock_s = max(self.clock_s, requests[self.num_arrived].arrival_s)
        while (
            self.num_arrived < len(requests)
            and requests[self.num_arrived].arrival_s <= self.clock_s
        ):
            number = self.num_arrived
            num_output = requests[number].num_output_tokens
            prompt = self.trace.prompt(number)
            spec = RequestSpec(
                request_id=str(number), prompt_token_ids=prompt, max_tokens=num_output
            )
            self.requests[number] = self.scheduler.add(fit(spec, self.scheduler.limits))
            self.num_arrived += 1

    def step(self) -> None:
        """Run and time one step."""
        scheduler = self.scheduler
        started = thread_time()
        plan = scheduler.schedule(self.clock_s)
        scheduled = thread_time()
        assert plan.work, "requests are unfinished, and nothing is scheduled"
        result = self.executor.execute(plan)
        self.clock_s += self.cost.base_s + self.cost.token_s * plan.num_tokens
        num_running = len(scheduler.running)
        executed = thread_time()
        progress = scheduler.update(plan, result, self.clock_s)
        cost_s = thread_time() - executed + scheduled - started
        self.report.step_costs_s.append((num_running, cost_s))
        for sequence, token_id, _ in progress:
            if token_id is None:
                self._account(self.requests.pop(int(sequence.request.request_id)))

    def finished_report(self) -> ReplayReport:
        """Return the report, with the scheduler's totals."""
        report, scheduler = self.report, self.scheduler
        report.virtual_s = self.clock_s
        report.waste = scheduler.stats.waste
        report.num_preemptions = scheduler.stats.num_preemptions
        report.num_evictions = scheduler.manager.num_evictions
        report.peak_num_blocks = scheduler.stats.peak_num_blocks
        report.peak_num_running = scheduler.stats.peak_num_running
        return report

    def _account(self, request: Request) -> None:
        report, number = self.report, int(request.request_id)
        sequence, wanted = request.sequences[0], self.trace.requests[number]
        first = wanted.num_prompt_tokens
        expected = [
            self.trace.output_token(number, position)
            for position in range(first, first + wanted.num_output_tokens)
        ]
        report.num_complete += (
            sequence.finish_reason is FinishReason.LENGTH and sequence.output_token_ids == expected
        )
        hits, ideal = request.metrics.num_prefix_hit_tokens, self.ideal[number]
        report.num_prompt_tokens += wanted.num_prompt_tokens
        report.num_output_tokens += sequence.num_output_tokens
        report.num_hit_tokens += hits
        report.num_ideal_hit_tokens += ideal
        if hits != ideal:
            report.misses.append((number, hits, ideal))

    def _script(self, name: str, position: int) -> int:
        return self.trace.output_token(int(name), position)
