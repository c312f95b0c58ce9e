"""What steps cost on this machine: steps of many sizes, and the linear model that fits them best.

An engine that serves learns these costs by itself, from the steps that happen to come
(`quire.core.step_cost`). Here they are measured on purpose, for the simulator: prompts alone,
decodes of few and many sequences with short and long contexts, and both in the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from quire.bench.measure import measure
from quire.bench.workload import Workload, random_workload
from quire.config.limits import SchedulerLimits
from quire.core.step_cost import NUM_COSTS, StepWork, UnitCosts
from quire.engine.loop.engine import Engine
from quire.errors import EngineError
from quire.sim.step_times import Curve, StepTimes

_PROMPT_LENS = (16, 64, 256, 1024, 4096)
_CROWDS = ((1, 64), (2, 64), (4, 64), (8, 64), (16, 64), (32, 64), (64, 64), (1, 1024), (4, 1024))
"""Sequences that decode together, and the length of their prompts."""
_DECODE_LEN = 24
_NUM_MIXED, _MIXED_PROMPT_LENS, _MIXED_OUTPUT_LENS = 32, (16, 512), (8, _DECODE_LEN)
_NUM_COUNTED = 2
_STRAIGHT_FROM = 128
"""Tokens of a step from which on kernels compute whole tiles, whatever the number."""
_LEAST_GROUP = 4
"""Steps of about one number of tokens from which the curve takes a point."""
_LEAST_S = 1e-12
"""Of a unit that the fit finds no cost for: all costs are above 0."""
_ROUNDS, _SWEEPS = 20, 200
_OUTLIER = 1.5
"""Times the median error, beyond which a step counts less: the machine did something else."""


class MeasuredStep(NamedTuple):
    """A step's work, and the seconds that it took."""

    work: StepWork
    seconds: float


class StepFit(NamedTuple):
    """Costs, and what became of them."""

    costs: UnitCosts
    curve: Curve
    kinds: tuple[tuple[str, tuple[MeasuredStep, ...]], ...]
    """Steps by the workload that they were measured in."""

    def lines(self) -> list[str]:
        """Return measured and fitted durations as text."""
        times = StepTimes(self.costs, self.curve)
        found = [f"{'steps of':28} {'number':>6} {'median':>10} {'fitted':>10} {'off by':>7}"]
        for name, steps in self.kinds:
            measured = median(each.seconds for each in steps)
            fitted = median(times.seconds(each.work) for each in steps)
            off = median(abs(times.seconds(each.work) / each.seconds - 1) for each in steps)
            found.append(
                f"{name:28} {len(steps):6} {1e3 * measured:7.1f} ms {1e3 * fitted:7.1f} ms "
                f"{off:7.1%}"
            )
        return found


def measure_steps(engine: Engine, tell: Callable[[str], None]) -> StepFit:
    """Take steps of all kinds that the engine's limits allow, and fit costs to them. A first time
    that is not counted lets pages and caches settle. `tell` hears of progress."""
    kinds, vocab_size = [], engine.plan.spec.vocab_size
    for workload in _workloads(engine.plan.limits):
        tell(f"steps of {workload.name}")
        steps: list[MeasuredStep] = []
        for number in range(1 + _NUM_COUNTED):
            with _observed(engine) as seen:
                measure(engine, workload.requests(number, vocab_size))
            steps += seen if number > 0 else ()
        if steps:
            kinds.append((workload.name, tuple(steps)))
    if not kinds:
        raise EngineError("the engine measured none of its steps")
    costs, curve = fit([step for _, steps in kinds for step in steps])
    return StepFit(costs, curve, tuple(kinds))


def _workloads(limits: SchedulerLimits) -> Iterator[Workload]:
    longest = limits.max_model_len - _DECODE_LEN
    for length in sorted({min(each, longest) for each in _PROMPT_LENS if longest > 0}):
        yield random_workload(1, (length, length), (1, 1), name=f"a prompt of {length}")
    for count, length in _CROWDS:
        num_slots = count * (length + _DECODE_LEN + limits.block_size)
        if count <= limits.max_num_seqs and length <= longest and num_slots <= limits.num_slots:
            lengths, name = (length, length), f"{count} decoding behind {length}"
            yield random_workload(count, lengths, (_DECODE_LEN, _DECODE_LEN), name=name)
    least, most = _MIXED_PROMPT_LENS[0], min(_MIXED_PROMPT_LENS[1], longest)
    if least <= most:
        name = f"{_NUM_MIXED} of mixed lengths"
        yield random_workload(_NUM_MIXED, (least, most), _MIXED_OUTPUT_LENS, name=name)


@contextmanager
def _observed(engine: Engine) -> Iterator[list[MeasuredStep]]:
    """Yield a list of the steps that the engine measures meanwhile."""
    pace = engine.scheduler.pace
    if pace is None:
        raise EngineError("this engine measures no steps: give it a target_step_ms")
    model, seen = pace.model, list[MeasuredStep]()
    observe = model.observe

    def note(work: StepWork, measured_s: float) -> None:
        if work.num_steps and measured_s > 0.0:
            seen.append(MeasuredStep(work, measured_s))
        observe(work, measured_s)

    model.observe = note  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        model.observe = observe  # type: ignore[method-assign]


def fit(steps: Sequence[MeasuredStep]) -> tuple[UnitCosts, Curve]:
    """Return the costs, none below 0, that make the sum of squares of relative errors least, and
    the curve of what they leave; each is fitted to what the other says, in turns. Outliers count
    less (Huber's weights), as they do while serving."""
    weights, curve, costs = [1.0] * len(steps), tuple[tuple[int, float], ...](), [0.0] * NUM_COSTS
    for _ in range(_ROUNDS):
        bent = StepTimes(UnitCosts(*costs), curve)
        shares = [
            [amount * bent.ratio(each.work.num_tokens) / each.seconds for amount in each.work]
            for each in steps
        ]
        costs = [max(cost, _LEAST_S) for cost in _least_squares(shares, weights)]
        linear = StepTimes(UnitCosts(*costs))
        curve = _curve([(each.work, each.seconds / linear.seconds(each.work)) for each in steps])
        bent = StepTimes(UnitCosts(*costs), curve)
        errors = [abs(bent.seconds(each.work) / each.seconds - 1) for each in steps]
        most = max(_OUTLIER * median(errors), 1e-9)
        weights = [min(1.0, most / error) if error else 1.0 for error in errors]
    return UnitCosts(*costs), curve


def _curve(found: Sequence[tuple[StepWork, float]]) -> tuple[tuple[int, float], ...]:
    """The median ratio at each number of tokens, those of half an octave together; 1 from
    `_STRAIGHT_FROM` on, or of the longest steps where none is so long: a curve that may rise
    everywhere would take the place of the costs."""
    groups: dict[int, list[tuple[int, float]]] = {}
    for work, ratio in found:
        if work.num_tokens >= _STRAIGHT_FROM:
            continue
        place = round(2 * math.log2(work.num_tokens))
        groups.setdefault(place, []).append((work.num_tokens, ratio))
    points = tuple(
        (round(median(count for count, _ in group)), median(ratio for _, ratio in group))
        for _, group in sorted(groups.items())
        if len(group) >= _LEAST_GROUP
    )
    if any(work.num_tokens >= _STRAIGHT_FROM for work, _ in found):
        return (*points, (_STRAIGHT_FROM, 1.0))
    return tuple((count, ratio / points[-1][1]) for count, ratio in points)


def _least_squares(shares: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Coordinate descent on the normal equations, each coordinate held at 0 or above."""
    matrix = [[0.0] * NUM_COSTS for _ in range(NUM_COSTS)]
    right = [0.0] * NUM_COSTS
    for row, weight in zip(shares, weights, strict=True):
        for i, a in enumerate(row):
            right[i] += weight * a
            for j, b in enumerate(row):
                matrix[i][j] += weight * a * b
    costs = [0.0] * NUM_COSTS
    for _ in range(_SWEEPS * NUM_COSTS):
        for i in range(NUM_COSTS):
            if matrix[i][i] > 0.0:
                rest = sum(matrix[i][j] * costs[j] for j in range(NUM_COSTS) if j != i)
                costs[i] = max(0.0, (right[i] - rest) / matrix[i][i])
    return costs
