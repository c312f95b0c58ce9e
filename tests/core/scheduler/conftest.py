"""A scheduler with a null executor, audited at every step,
whose answers are compared with the oracle's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from quire.config.limits import SchedulerLimits
from quire.core.plan import RowSampling, StepPlan, StepResult
from quire.core.request import Request
from quire.core.request_spec import RequestSpec, fit
from quire.core.scheduler.audit import audit, audit_plan
from quire.core.scheduler.scheduler import Progress, Scheduler
from quire.executor.null import NullExecutor
from quire.sim.oracle import Oracle

_VOCAB_SIZE = 16
_PARTS: dict[str, Any] = {"pace": None, "resources": (), "prerequisites": (), "companions": ()}


class Harness:
    """Drives one scheduler; small limits unless a test says otherwise."""

    def __init__(self, **changes: Any) -> None:
        defaults: dict[str, Any] = {
            "num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64,
            "max_model_len": 128, "watermark": 0.0,
        }  # fmt: skip
        pace, resources, prerequisites, companions = (
            changes.pop(name, default) for name, default in _PARTS.items()
        )
        self.limits = SchedulerLimits(**(defaults | changes))
        self.scheduler = Scheduler(
            self.limits, resources=resources, prerequisites=prerequisites, pace=pace
        )
        self.executor = NullExecutor(
            self.limits.max_num_seqs, self.limits.num_blocks, self.limits.block_size,
            vocab_size=_VOCAB_SIZE,
            companions=companions,
        )  # fmt: skip
        self.oracle = Oracle(0, _VOCAB_SIZE)
        self.specs: dict[str, RequestSpec] = {}
        self.progress: list[Progress] = []
        self.num_steps = 0
        self.audit_every = 1
        """Steps from one audit of the whole state to the next."""

    def add(
        self, request_id: str, prompt: int | Iterable[int], max_tokens: int = 4, **changes: Any
    ) -> Request:
        """Add a request; a number as prompt stands for that many tokens
        that no other request has."""
        if isinstance(prompt, int):
            prompt = [1000 + sum(map(ord, request_id)), *range(1, prompt)]
        sampling = changes.pop("sampling", RowSampling(temperature=0.0))
        spec = RequestSpec(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            max_tokens=max_tokens,
            sampling=sampling,
            **changes,
        )
        request = self.scheduler.add(fit(spec, self.limits))
        self.specs[request_id] = spec
        return request

    def step(self, spoil: Callable[[StepPlan, StepResult], StepResult] | None = None) -> StepPlan:
        """One step, audited unless `audit_every` says otherwise."""
        plan = self.scheduler.schedule(float(self.num_steps))
        audit_plan(self.scheduler, plan)
        result = self.executor.execute(plan)
        if self.scheduler.pace is not None:  # every step takes as long as its work is said to
            result = replace(result, elapsed_s=self.scheduler.pace.forecast(plan.work).seconds)
        if spoil is not None:
            result = spoil(plan, result)
        self.progress.extend(self.scheduler.update(plan, result, float(self.num_steps)))
        self.num_steps += 1
        if self.num_steps % self.audit_every == 0:
            audit(self.scheduler)
        return plan

    def run(self, max_steps: int = 1000) -> None:
        """Run until nothing is left, then compare every finished
        sampled request with the oracle."""
        for _ in range(max_steps):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work, f"not finished after {max_steps} steps"
        assert self.scheduler.manager.pool.num_used == 0

    def check(self, request: Request) -> None:
        """Every sequence of a finished request is what the oracle says."""
        spec = self.specs[request.request_id]
        for sequence in request.sequences:
            answer = self.oracle.sample(spec, sequence.index, request.max_tokens)
            assert sequence.output_token_ids == answer.token_ids
            assert sequence.finish_reason is answer.finish_reason
            records = [
                each.logprobs
                for each in self.progress
                if each.sequence is sequence and each.logprobs is not None
            ]
            assert records == answer.logprobs
        if request.scoring is not None:
            assert request.prompt_logprobs == self.oracle.score_prompt(spec)

    def fail_row(self, name: str) -> Callable[[StepPlan, StepResult], StepResult]:
        """A spoiler under which the row of sequence `name` fails."""
        row = next(sequence.row for sequence in self.scheduler.running if sequence.name == name)

        def spoil(plan: StepPlan, result: StepResult) -> StepResult:
            results = tuple(
                outcome._replace(token_ids=(), logprobs=(), error="non-finite")
                if work.row == row
                else outcome
                for work, outcome in zip(plan.work, result.results, strict=True)
            )
            return replace(result, results=results)

        return spoil


@pytest.fixture
def harness() -> type[Harness]:
    """The class, so that each test gives its own limits."""
    return Harness
