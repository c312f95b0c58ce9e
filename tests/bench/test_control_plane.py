"""The load of the control-plane benchmark is what it says, and every step of it is counted."""

from __future__ import annotations

import pytest

from quire.bench import control_plane
from quire.bench.control_plane import Load, measure_step_costs
from quire.core.plan import StepPlan, StepResult


@pytest.mark.parametrize("arriving_len", [0, 40])
def test_every_counted_step_is_full(monkeypatch: pytest.MonkeyPatch, arriving_len: int) -> None:
    plans: list[StepPlan] = []
    make_up = control_plane._made_up

    def record(plan: StepPlan) -> StepResult:
        plans.append(plan)
        return make_up(plan)

    monkeypatch.setattr(control_plane, "_made_up", record)
    costs = measure_step_costs(Load(num_running=12, num_steps=50, arriving_len=arriving_len))
    assert len(costs.schedule_ms) == len(costs.update_ms) == 50
    assert {plan.num_tokens for plan in plans[-50:]} == {12 + arriving_len}
    assert (
        costs.percentile_ms(0)
        <= costs.percentile_ms(50)
        <= costs.percentile_ms(100)
        == max(costs.total_ms)
    )
    assert f"{costs.percentile_ms(50):.3f}" in costs.line("x")
