"""A trace over many replicas: the real scheduler of each, the real policy of the router, and one
virtual clock.

How long a step takes is modelled, and nothing else: what is in a step, what is cached, evicted
and preempted, and where a request goes, is decided by the code that decides it in production.
Replicas take steps beside one another, one at a time each; a request is known to its replica from
the moment it arrives.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

from quire.config.limits import SchedulerLimits
from quire.core.plan import StepPlan, StepResult
from quire.core.request import FinishReason, Request
from quire.core.request_spec import RequestSpec, fit
from quire.core.scheduler.pace import StepPace
from quire.core.scheduler.scheduler import Scheduler
from quire.core.step_cost import StepCostModel, UnitCosts, work_of
from quire.executor.null import NullExecutor
from quire.routing.ask import Ask
from quire.routing.choices import (
    DEFAULT_MEMORY_CHUNKS,
    make_balancer,
)
from quire.routing.load import LoadShare
from quire.sim.step_times import Curve, StepTimes
from quire.sim.traces import Trace

_TINY_S = 1e-12
"""In place of a cost that a simple model does without: all must be above 0."""


def simple_costs(step_s: float, token_s: float) -> UnitCosts:
    """Return costs of a step that depend on the number of its tokens alone."""
    return UnitCosts(step_s, _TINY_S, token_s, _TINY_S, _TINY_S, _TINY_S)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What is simulated besides the trace."""

    num_replicas: int
    limits: SchedulerLimits
    """Of each replica."""
    costs: UnitCosts
    policy: str = "kv-aware"
    load_factor: float | None = None
    memory_chunks: int = DEFAULT_MEMORY_CHUNKS
    speed: float = 1.0
    """How many times as fast as recorded requests come."""
    target_step_s: float | None = None
    """What each replica keeps its steps within (`target_step_ms`); None: their tokens alone are
    bounded."""
    curve: Curve = ()
    """Of the costs; see `quire.sim.step_times`."""
    is_overlapped: bool = False
    """Whether replicas plan each step as the one before it begins, as engines do."""

    def pace(self) -> StepPace | None:
        """Return a replica's pace."""
        if self.target_step_s is None:
            return None
        return StepPace(StepCostModel(self.costs), self.target_step_s)


@dataclass(slots=True)
class FleetReport:
    """What a simulation came to."""

    num_requests: int
    num_complete: int = 0
    """Requests that got exactly the tokens the trace has."""
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    virtual_s: float = 0.0
    wall_s: float = 0.0
    first_token_s: list[float] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)
    """Of each request, the mean time per token after the first."""
    requests_of: list[int] = field(default_factory=list)
    """Requests that each replica got."""
    residence_s: list[float] = field(default_factory=list)
    """Time that requests spent at each replica, together: its mean load times the run's time."""

    @property
    def hit_rate(self) -> float:
        """Return the share of prompt tokens that were cached."""
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)

    @property
    def imbalance(self) -> float:
        """Return the most loaded replica's mean load over the mean of all."""
        mean_s = sum(self.residence_s) / len(self.residence_s)
        return max(self.residence_s) / mean_s if mean_s else 1.0

    def lines(self) -> list[str]:
        """Return the report as text."""
        faster = self.virtual_s / max(self.wall_s, 1e-9)
        shares = ", ".join(map(str, self.requests_of))
        return [
            f"requests         {self.num_complete} of {self.num_requests} complete; "
            f"by replica {shares}",
            f"time             {self.virtual_s:.1f} s virtual, {self.wall_s:.1f} s real "
            f"({faster:.0f} times as fast), {self.num_steps} steps",
            f"first token      {_ms(self.first_token_s, 50)} median, "
            f"{_ms(self.first_token_s, 95)} p95",
            f"per token        {_ms(self.per_token_s, 50)} median, {_ms(self.per_token_s, 95)} p95",
            f"prefix hits      {100 * self.hit_rate:.2f} % of prompt tokens",
            f"balance          {self.imbalance:.2f} times the mean load at the most loaded replica",
            f"preemptions      {self.num_preemptions}",
        ]


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the nearest value that so many per cent do not exceed; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))] if ordered else 0.0


def _ms(values: Sequence[float], percent: float) -> str:
    return f"{1e3 * percentile(values, percent):.1f} ms"


def simulate_fleet(trace: Trace, settings: FleetSettings) -> FleetReport:
    """Replay a whole trace."""
    started = perf_counter()
    report = _FleetRun(trace, settings).run()
    report.wall_s = perf_counter() - started
    return report


class _Served:
    """A request at its replica."""

    __slots__ = ("arrival_s", "first_s", "number", "request", "share")

    def __init__(self, number: int, request: Request, share: LoadShare, arrival_s: float) -> None:
        self.number = number
        self.request = request
        self.share = share
        self.arrival_s = arrival_s
        self.first_s: float | None = None


class _SimulatedReplica:
    """One engine: a scheduler, the step that it is taking, and the one that follows it where that
    is planned."""

    def __init__(self, name: str, trace: Trace, settings: FleetSettings) -> None:
        limits = settings.limits
        self.name = name
        self.scheduler = Scheduler(limits, pace=settings.pace())
        self.executor = NullExecutor(
            limits.max_num_seqs,
            limits.num_blocks,
            limits.block_size,
            script=lambda row, position: trace.output_token(int(row), position),
        )
        self.steps: deque[tuple[StepPlan, StepResult]] = deque()
        self.served: dict[str, _Served] = {}


class _FleetRun:
    def __init__(self, trace: Trace, settings: FleetSettings) -> None:
        self._trace = trace
        self._settings = settings
        self._times = StepTimes(settings.costs, settings.curve)
        self._balancer = make_balancer(
            settings.policy, settings.load_factor, settings.memory_chunks
        )
        names = [f"replica-{number}" for number in range(settings.num_replicas)]
        self._replicas = [_SimulatedReplica(name, trace, settings) for name in names]
        self._loads = [self._balancer.add(name) for name in names]
        self._number_of = {name: number for number, name in enumerate(names)}
        self._ends: list[tuple[float, int]] = []
        """When steps under way end, and whose they are."""
        self._report = FleetReport(
            len(trace.requests),
            requests_of=[0] * len(names),
            residence_s=[0.0] * len(names),
        )

    def run(self) -> FleetReport:
        """Take arrivals and ends of steps in the order of time; an end before an arrival."""
        arrivals = [request.arrival_s / self._settings.speed for request in self._trace.requests]
        number, now_s = 0, 0.0
        while number < len(arrivals) or self._ends:
            if self._ends and (number >= len(arrivals) or self._ends[0][0] <= arrivals[number]):
                now_s, place = heapq.heappop(self._ends)
                self._end_step(place, now_s)
            else:
                now_s = arrivals[number]
                place = self._admit(number, now_s)
                number += 1
            if not self._replicas[place].steps:
                self._begin_step(place, now_s)
        report = self._report
        report.virtual_s = now_s
        report.num_preemptions = sum(
            replica.scheduler.stats.num_preemptions for replica in self._replicas
        )
        return report

    def _admit(self, number: int, now_s: float) -> int:
        """Send a request to a replica, as the router would; which one."""
        wanted, size = self._trace.requests[number], self._trace.hash_block_size
        ask = Ask(
            None,
            wanted.hashes[: wanted.num_prompt_tokens // size],
            size,
            wanted.num_prompt_tokens,
            wanted.num_output_tokens,
        )
        share, _ = self._balancer.send(ask, self._loads)
        place = self._number_of[share.load.name]
        replica = self._replicas[place]
        spec = RequestSpec(
            request_id=str(number),
            prompt_token_ids=self._trace.prompt(number),
            max_tokens=wanted.num_output_tokens,
        )
        request = replica.scheduler.add(fit(spec, replica.scheduler.limits))
        replica.served[request.request_id] = _Served(number, request, share, now_s)
        self._report.requests_of[place] += 1
        return place

    def _begin_step(self, place: int, now_s: float) -> None:
        """Begin the step that is planned, or plan one; and plan the one after it, where that is the
        way of replicas."""
        replica = self._replicas[place]
        if not replica.steps:
            if not replica.scheduler.has_work:
                return
            plan = replica.scheduler.schedule(now_s)
            assert plan.work, "requests are unfinished, and nothing is scheduled"
            replica.steps.append(self._execute(replica, plan))
        _, result = replica.steps[0]
        heapq.heappush(self._ends, (now_s + result.elapsed_s, place))
        self._report.num_steps += 1
        ahead = replica.scheduler.schedule_ahead(now_s) if self._settings.is_overlapped else None
        if ahead is not None:
            replica.steps.append(self._execute(replica, ahead))

    def _execute(self, replica: _SimulatedReplica, plan: StepPlan) -> tuple[StepPlan, StepResult]:
        """A step, and what comes of it in the virtual time that it takes: a replica's pace learns
        from that, as an engine's does from what it measures."""
        result = replica.executor.execute(plan)
        return plan, replace(result, elapsed_s=self._times.seconds(work_of(plan.work)))

    def _end_step(self, place: int, now_s: float) -> None:
        replica = self._replicas[place]
        plan, result = replica.steps.popleft()
        for sequence, token_id, _ in replica.scheduler.update(plan, result, now_s):
            served = replica.served[sequence.request.request_id]
            if served.first_s is None:
                served.first_s = now_s
                served.share.begin_answer()
            if token_id is None:
                self._account(place, served, now_s)
        if replica.steps:
            self._begin_step(place, now_s)

    def _account(self, place: int, served: _Served, now_s: float) -> None:
        """A request has ended."""
        report, request = self._report, served.request
        del self._replicas[place].served[request.request_id]
        served.share.end()
        wanted, sequence = self._trace.requests[served.number], request.sequences[0]
        assert served.first_s is not None
        report.num_complete += (
            sequence.finish_reason is FinishReason.LENGTH
            and sequence.num_output_tokens == wanted.num_output_tokens
        )
        report.num_prompt_tokens += wanted.num_prompt_tokens
        report.num_hit_tokens += request.metrics.num_prefix_hit_tokens
        report.first_token_s.append(served.first_s - served.arrival_s)
        if wanted.num_output_tokens > 1:
            mean_s = (now_s - served.first_s) / (wanted.num_output_tokens - 1)
            report.per_token_s.append(mean_s)
        report.residence_s[place] += now_s - served.arrival_s
