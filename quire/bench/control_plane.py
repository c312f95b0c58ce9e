"""What a step costs the control plane: the real scheduler and KV manager, no model, nothing else in
the loop.

Owns the synthetic load: sequences that decode for ever, and optionally a new prompt in every step.
The tokens that a model would have sampled are made up outside the timing.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from time import perf_counter

from quire.config.limits import SchedulerLimits
from quire.core.plan import StepPlan, StepResult, WorkResult
from quire.core.request_spec import RequestSpec
from quire.core.scheduler.scheduler import Scheduler
from quire.engine.loop.recorder import StepRecorder

BLOCK_SIZE = 16
PROMPT_LEN = 128
NUM_SETTLING_STEPS = 2 * BLOCK_SIZE
"""Steps before counting: until everyone is admitted and has crossed a block's edge."""
_STOP_TOKEN, _OUTPUT_TOKEN = 2, 7


@dataclass(frozen=True, slots=True)
class Load:
    """What the control plane has to deal with."""

    num_running: int = 256
    num_steps: int = 500
    arriving_len: int = 0
    """Tokens of a prompt that arrives in every step and wants one token; 0: none arrives."""
    is_recorded: bool = False
    """Whether steps are kept to be looked at, as an engine that is served does.
    Counted in both halves."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Milliseconds of `schedule` and `update` of each counted step."""

    schedule_ms: list[float]
    update_ms: list[float]

    @property
    def total_ms(self) -> list[float]:
        return [a + b for a, b in zip(self.schedule_ms, self.update_ms, strict=True)]

    def percentile_ms(self, percent: float) -> float:
        ordered = sorted(self.total_ms)
        return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]

    def line(self, name: str) -> str:
        """Return the figures as text."""
        return (
            f"{name:<34} schedule {statistics.median(self.schedule_ms):.3f}  update "
            f"{statistics.median(self.update_ms):.3f}  "
            f"together {self.percentile_ms(50):.3f} (best {self.percentile_ms(0):.3f}, p90 "
            f"{self.percentile_ms(90):.3f}, "
            f"p99 {self.percentile_ms(99):.3f}) ms a step"
        )


def measure_step_costs(load: Load) -> StepCosts:
    """Run the load and time each step."""
    scheduler = Scheduler(_limits(load))
    recorder = StepRecorder(scheduler) if load.is_recorded else None
    for number in range(load.num_running):
        scheduler.add(
            _request(
                f"steady-{number}",
                number,
                PROMPT_LEN + number % (3 * BLOCK_SIZE),
                load.num_steps * 2,
            )
        )
    costs = StepCosts([], [])
    for step in range(load.num_steps + NUM_SETTLING_STEPS + load.num_running // 8):
        if load.arriving_len and scheduler.num_waiting == 0:
            scheduler.add(_request(f"new-{step}", load.num_running + step, load.arriving_len, 1))
        started = perf_counter()
        plan = scheduler.schedule(0.0)
        if recorder is not None:
            recorder.begin(plan, 0.0)
        scheduled = perf_counter()
        result = _made_up(plan)
        resumed = perf_counter()
        scheduler.update(plan, result, 0.0)
        if recorder is not None:
            recorder.end(0.0)
        ended = perf_counter()
        if step >= NUM_SETTLING_STEPS + load.num_running // 8:
            costs.schedule_ms.append(1e3 * (scheduled - started))
            costs.update_ms.append(1e3 * (ended - resumed))
    return costs


def _limits(load: Load) -> SchedulerLimits:
    max_len = PROMPT_LEN + 3 * BLOCK_SIZE + 2 * load.num_steps + load.arriving_len + 1
    return SchedulerLimits(
        num_blocks=(load.num_running + 8) * (max_len // BLOCK_SIZE + 1),
        block_size=BLOCK_SIZE,
        max_num_seqs=load.num_running + 1,
        max_num_batched_tokens=max(2048, load.num_running + load.arriving_len),
        max_model_len=max_len,
    )


def _request(name: str, number: int, prompt_len: int, max_tokens: int) -> RequestSpec:
    # no two prompts share a token, so nothing is served from the cache
    first = 10 * _STOP_TOKEN + number * 100_000
    prompt = tuple(range(first, first + prompt_len))
    stops = frozenset({_STOP_TOKEN})
    return RequestSpec(
        request_id=name, prompt_token_ids=prompt, max_tokens=max_tokens, stop_token_ids=stops
    )


def _made_up(plan: StepPlan) -> StepResult:
    results = tuple(WorkResult((_OUTPUT_TOKEN,) * len(work.tasks)) for work in plan.work)
    return StepResult(plan.step_id, results)
